"""Cases of JiT's network and its fixed tables."""

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.models import jit
from pid_jax.models.rope import grid_rope
from tests.golden import ditok_support as support
from tests.golden.cases import Case, handles
from tests.golden.layout import to_nchw, to_nhwc


def load_jit(config: dict, tensors: dict) -> support.Part:
    """The network; its fixed patch embedding must be the one that we compute."""
    tensors = {key.removeprefix("net."): value for key, value in tensors.items()}
    stored = tensors.pop("pos_embed")
    part = support.load_part("jit", config, tensors)
    dims = part.net.dims
    np.testing.assert_allclose(jit.patch_positions(dims.hidden_size, dims.grid)[None], stored,
                               atol=2e-6)
    return part


@handles("ditok", r"jit_net.*")
def check_network(case: Case) -> None:
    part = load_jit(case.meta["config"], case.under("param/"))
    assert part.net.dims.mlp_width == case.meta["swiglu_hidden"]
    inputs, cotangent = case.inputs, case.inputs.get("cotangent")

    def loss(params, x):
        out, state = part.apply(params, x, inputs["t"], inputs["y"], mutable="intermediates")
        return jnp.sum(out.x * to_nhwc(cotangent)), (out, state["intermediates"])

    grads, (out, shown) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        part.params, to_nhwc(inputs["x"]))
    blocks = [block for span in shown["blocks"][0] for block in span]
    found = {name: shown[name][0] for name in ("patch_embed", "t_emb", "y_emb")}
    found |= {f"block{i}": value for i, value in enumerate(blocks)}
    support.compare(case, found | _rope(part.net) | {"x_pred": to_nchw(out.x)})
    support.compare(case, part.to_torch(grads[0]) | {"x": to_nchw(grads[1])}, "grad/")


def _rope(net) -> dict[str, np.ndarray]:
    head, grid = net.hidden_size // net.num_heads, (net.dims.grid,) * 2
    plain, context = grid_rope(head, grid), grid_rope(head, grid, net.in_context_len)
    return {"rope_cos": _in_pairs(plain.cos), "rope_sin": _in_pairs(plain.sin),
            "rope_incontext_cos": _in_pairs(context.cos),
            "rope_incontext_sin": _in_pairs(context.sin)}


def _in_pairs(table) -> np.ndarray:
    """A value for each pair of channels -> one for each channel, neighbours being a pair."""
    return np.repeat(np.asarray(table), 2, axis=-1)


@handles("ditok", r"jit_tables.*")
def check_tables(case: Case) -> None:
    config = case.meta["config"]
    table = grid_rope(2 * config["rope_half_head_dim"], (config["grid"],) * 2,
                      config["num_cls_token"])
    found = {"sincos_pos_embed": jit.patch_positions(config["embed_dim"], config["grid"]),
             "rope_cos": _in_pairs(table.cos), "rope_sin": _in_pairs(table.sin),
             "timestep_embedding": jit.time_waves(jnp.asarray(case.inputs["t"]))}
    grids = {name: np.linspace(0.0, 1.0, len(value)) for name, value in case.outputs.items()
             if name.startswith("linspace_")}
    support.compare(case, found | grids)
