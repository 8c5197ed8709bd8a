"""Low-rank adapters: where they sit, that fresh ones change nothing, and that only they train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax import objectives
from pid_jax.errors import UserError
from pid_jax.models.lora import AdaptedNet, Lora
from pid_jax.models.outputs import NetOutput
from tests import tiny


class Net:
    """x times a kernel; `bias` cannot be adapted."""

    width = 3

    def init(self, key, method):
        return {"params": {"layer": {"kernel": jax.random.normal(key, (2, 3, 4)),
                                     "bias": jnp.zeros(4)}}}

    def apply(self, variables, x):
        return NetOutput(x=x @ variables["params"]["layer"]["kernel"][1])

    def clone(self, **options):
        return self


LORA = Lora(rank=2, alpha=8.0, targets=("layer/kernel$",))


def test_fresh_adapters_change_nothing_and_follow_stacked_kernels():
    net = AdaptedNet(Net(), LORA)
    params = net.init(jax.random.key(0), method="all_parameters")["params"]
    assert params["lora"]["layer"]["down"]["kernel"].shape == (2, 3, 2)
    assert params["lora"]["layer"]["up"]["kernel"].shape == (2, 2, 4)
    x = jnp.ones((1, 3))
    np.testing.assert_array_equal(net.apply({"params": params}, x).x,
                                  net.net.apply({"params": params}, x).x)
    assert net.width == 3 and isinstance(net.clone(), AdaptedNet)


def test_adapters_are_added_with_alpha_over_rank():
    params = {"layer": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}, "lora": {"layer": {
        "down": {"kernel": jnp.ones((3, 2))}, "up": {"kernel": jnp.ones((2, 4))}}}}
    np.testing.assert_allclose(LORA.fold(params)["layer"]["kernel"], 2 * 4.0)
    np.testing.assert_allclose(LORA.fold(params, 0.5)["layer"]["kernel"], 4.0)
    assert "lora" not in LORA.fold(params, 0.0)


@pytest.mark.parametrize("target, sentence", [
    ("nowhere", "'nowhere' matches no parameter"), ("bias", "layer/bias .* is no matrix")])
def test_targets_must_be_kernels(target, sentence):
    params = Net().init(jax.random.key(0), "")["params"]
    with pytest.raises(UserError, match=sentence):
        Lora(2, 8.0, (target,)).init(jax.random.key(0), params)


@pytest.mark.parametrize("objective", ["pixeldit_t2i", "pid_student"])
def test_only_adapters_train(objective):
    config = tiny.config(objective, "unused")
    config.lora.enabled = True
    built = objectives.build(config)
    state = jax.eval_shape(built.init, jax.random.key(0))
    optimizer = state.opt_state["student"] if objective == "pid_student" else state.opt_state
    assert set(optimizer.adam[0].mu) == {"lora"}
    assert "attn" in state.params["lora"]["patch_blocks"]
    if objective == "pid_student":
        assert "lora" not in state.frozen["teacher"] and "lora" in state.companions["fake_score"]
