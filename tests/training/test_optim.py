import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.diffusion.schedules import CycleSchedule
from pid_jax.errors import UserError
from pid_jax.training import freezing, optim

RULES = (freezing.LAST_BLOCK_TEXT, freezing.Freeze(r"y_pos_embedding"))


def params(seed=0):
    draw = np.random.default_rng(seed)
    leaf = lambda *shape: draw.standard_normal(shape).astype(np.float32)
    return {"patch_blocks": {"attn": {"proj_y": {"kernel": leaf(3, 4, 4), "bias": leaf(3, 4)}},
                             "norm_y2": {"scale": leaf(3, 4)},
                             "mlp_y": {"w1": {"kernel": leaf(3, 4, 2)}},
                             "norm_x1": {"scale": leaf(3, 4)}},
            "y_pos_embedding": leaf(1, 5, 4),
            "lq_proj": {"stem": {"kernel": leaf(2, 4)}},
            "pit_lq_gate": {"log_alpha": leaf()}}


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# freezing


def test_frozen_leaves_and_layers_stay_bit_identical_under_weight_decay():
    start = params()
    mask = freezing.trainable_mask(start, RULES)
    trainable, frozen = freezing.partition(start, mask)
    layer_mask, _ = freezing.partition(mask, mask)
    adam = optim.AdamW(1e-2, weight_decay=0.5)
    state = adam.init(trainable)
    for seed in range(3):
        grads, _ = freezing.partition(params(seed + 1), mask)
        trainable, state, _ = jax.jit(adam.update)(grads, state, trainable, layer_mask)
    end = freezing.combine(trainable, frozen)
    assert jax.tree.structure(end) == jax.tree.structure(start)
    for (path, old), new in zip(flat(start).items(), flat(end).values()):
        tail = any(part in path for part in ("proj_y", "norm_y2", "mlp_y"))
        moved = old[:2] if tail else old
        if "y_pos" in path:
            np.testing.assert_array_equal(old, new)
            continue
        assert np.all(moved != (new[:2] if tail else new)), path
        if tail:
            np.testing.assert_array_equal(old[2], new[2], err_msg=path)


def test_wholly_frozen_leaves_hold_no_optimizer_state():
    start = params()
    mask = freezing.trainable_mask(start, (freezing.ALL_BUT_LQ,))
    trainable, frozen = freezing.partition(start, mask)
    assert set(trainable) == {"lq_proj", "pit_lq_gate"} and set(frozen) == {
        "patch_blocks", "y_pos_embedding"}
    sizes = [leaf.size for leaf in jax.tree.leaves(optim.AdamW(1e-3).init(trainable))]
    assert sum(sizes) == 2 * (8 + 1) + 2


def test_masked_layers_do_not_count_in_the_norm():
    start = params()
    mask = freezing.trainable_mask(start, RULES)
    trainable, _ = freezing.partition(start, mask)
    layer_mask, _ = freezing.partition(mask, mask)
    grads = jax.tree.map(np.zeros_like, trainable)
    grads["patch_blocks"]["norm_y2"]["scale"][2] = 7.0
    grads["lq_proj"]["stem"]["kernel"][0, 0] = 3.0
    adam = optim.AdamW(1e-3)
    _, _, metrics = jax.jit(adam.update)(grads, adam.init(trainable), trainable, layer_mask)
    np.testing.assert_allclose(metrics["grad_norm"], 3.0)


def test_a_stack_of_one_frozen_layer_is_frozen_whole():
    tree = {"patch_blocks": {"norm_y2": {"scale": np.ones((1, 4))}}}
    mask = freezing.trainable_mask(tree, (freezing.LAST_BLOCK_TEXT,))
    assert mask["patch_blocks"]["norm_y2"]["scale"] is False


def test_rules_see_abstract_shapes_and_must_match():
    abstract = jax.eval_shape(params)
    mask = freezing.trainable_mask(abstract, RULES)
    assert mask["patch_blocks"]["norm_y2"]["scale"].shape == (3, 1)
    assert mask["patch_blocks"]["norm_x1"]["scale"] is True
    with pytest.raises(UserError, match="pacth_blocks"):
        freezing.trainable_mask(abstract, (freezing.Freeze("pacth_blocks/.*"),))


# clipping and skipping


def test_skipped_update_touches_nothing_but_the_schedule():
    adam = optim.AdamW(1e-2, CycleSchedule((4,), (100,), (0.0,), (1.0,), (1.0,)),
                       weight_decay=0.1, clip=optim.GradClip(spike_threshold=50.0))
    start = {"w": np.ones(3, np.float32)}
    good, bad = {"w": np.full(3, 0.5, np.float32)}, {"w": np.full(3, 100.0, np.float32)}
    update = jax.jit(adam.update)
    weights, state, first = update(good, adam.init(start), start)
    after, skipped, metrics = update(bad, state, weights)
    assert metrics["update_skipped"] == 1 and first["update_skipped"] == 0
    np.testing.assert_array_equal(after["w"], weights["w"])
    for old, new in zip(jax.tree.leaves(state.adam), jax.tree.leaves(skipped.adam)):
        np.testing.assert_array_equal(old, new)
    assert skipped.schedule_step == 2
    _, _, third = update(good, skipped, after)
    np.testing.assert_allclose(third["learning_rate"], 1e-2 * 2 / 4, rtol=1e-6)


def test_overflowing_norm_skips_or_zeroes():
    huge = {"w": np.float32([1e30, 1.0])}
    _, norm, skip = optim.GradClip()(huge)
    assert np.isinf(norm) and skip
    clipped, _, skip = optim.GradClip(skip_on_nonfinite=False)(huge)
    assert not skip and np.all(clipped["w"] == 0)


def test_infinite_max_norm_means_no_clipping():
    grads = {"w": np.float32([30.0, 40.0])}
    clipped, norm, skip = optim.GradClip(max_norm=np.inf)(grads)
    assert norm == 50.0 and not skip
    np.testing.assert_array_equal(clipped["w"], grads["w"])


def test_first_adam_steps_match_the_formula():
    adam = optim.AdamW(0.1, weight_decay=0.01, clip=optim.GradClip(np.inf))
    w, m, v = np.float64([1.0, -2.0]), 0.0, 0.0
    tree = {"w": w.astype(np.float32)}
    state = adam.init(tree)
    for count, g in enumerate(([0.3, -0.1], [0.2, 0.4], [-0.5, 0.1]), start=1):
        g = np.float64(g)
        tree, state, _ = adam.update({"w": g.astype(np.float32)}, state, tree)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**count)) / (
            np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        np.testing.assert_allclose(tree["w"], w, atol=1e-5 * 0.1 * count)


# accumulation


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulated_gradients_equal_the_whole_batch(steps):
    weights = {"w": np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)}
    batch = {"x": np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)}
    loss = lambda p, b: jnp.mean(jnp.square(jnp.tanh(b["x"] @ p["w"])))
    part = lambda p, b, index: jax.value_and_grad(loss)(p, b)
    value, grads = jax.jit(lambda p, b: optim.accumulate(part, p, b, steps))(weights, batch)
    whole, whole_grads = jax.value_and_grad(loss)(weights, batch)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], whole_grads["w"], rtol=1e-5, atol=1e-7)


def test_accumulation_strides_over_the_batch_and_tells_the_part():
    batch = jnp.arange(6.0)
    part = lambda p, b, index: ((b[0], index.astype(jnp.float32)), {"g": b.sum()})
    (first, index), grads = optim.accumulate(part, {}, batch, 3)
    assert (first, index) == (1.0, 1.0) and grads["g"] == 5.0
