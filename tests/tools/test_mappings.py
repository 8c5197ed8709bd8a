"""The mapping engine: transforms, round trips, abstract shapes, complete error lists."""

import jax
import numpy as np
import pytest

from pid_jax.errors import UserError
from tools.convert_torch_weights.mappings import jax_to_torch, table_for, torch_to_jax
from tools.convert_torch_weights.mappings import transforms
from tools.convert_torch_weights.mappings.engine import Rule, layer, make_table

OPTIONS = dict(num_groups=2, hidden_size=16, pixel_hidden_size=4, pixel_attn_hidden_size=8,
               pixel_num_groups=1, patch_depth=3, pixel_depth=2, patch_size=2, txt_embed_dim=6,
               txt_max_length=5, enable_ed=True, ed_compress_ratio=4, ed_hidden_size=12,
               ed_num_heads=3, ed_window_size=3)


def random_state_dict(table, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape).astype(dtype) for key, shape in table.shapes().items()}


@pytest.fixture(scope="module")
def table():
    return table_for("pixeldit_t2i", OPTIONS)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_state_dict_comes_back_bit_for_bit(table, dtype):
    tensors = random_state_dict(table, dtype)
    back = jax_to_torch(table, torch_to_jax(table, tensors))
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == dtype
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


def test_names_and_shapes_need_no_memory(table):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                            torch_to_jax(table, random_state_dict(table)))
    shapes = {key: leaf.shape for key, leaf in jax_to_torch(table, abstract).items()}
    assert shapes == table.shapes()


def test_every_difference_of_a_state_dict_is_named(table):
    tensors = random_state_dict(table)
    del tensors["final_layer.norm.weight"], tensors["patch_blocks.2.norm_x1.weight"]
    tensors["lq_proj.gate"] = np.zeros(3)
    tensors["y_pos_embedding"] = np.zeros((1, 4, 16))
    with pytest.raises(UserError) as error:
        torch_to_jax(table, tensors)
    for words in ("final_layer.norm.weight is missing", "patch_blocks.2.norm_x1.weight is missing",
                  "lq_proj.gate is not known",
                  "y_pos_embedding has shape (1, 4, 16), expected (1, 5, 16)"):
        assert words in str(error.value)


def test_parameters_of_another_network_are_refused(table):
    other = table_for("pixeldit_t2i", OPTIONS | {"patch_depth": 2})
    params = torch_to_jax(other, random_state_dict(other))
    with pytest.raises(UserError, match=r"patch_blocks/norm_x1/scale has shape \(2, 16\)"):
        jax_to_torch(table, params)


def test_a_leaf_without_exactly_one_rule_is_a_mistake_of_the_table():
    leaf = {"a": {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32)}}
    with pytest.raises(LookupError, match="a/kernel matches 0 rules"):
        make_table("m", [], leaf)
    with pytest.raises(LookupError, match="a/kernel matches 2 rules"):
        make_table("m", [*layer("a", "a"), Rule("b", "a/kernel")], leaf)


def test_half_split_brings_pairs_to_the_two_halves():
    np.testing.assert_array_equal(transforms.half_split(6), [0, 2, 4, 1, 3, 5])
    rows = transforms.half_split_qkv(8, 2)
    np.testing.assert_array_equal(rows[:8], [0, 2, 1, 3, 4, 6, 5, 7])
    np.testing.assert_array_equal(rows[16:], np.arange(16, 24))


def test_pixel_modulations_become_channel_major():
    pixels, channels, hidden = 4, 3, 5
    weight = np.random.default_rng(0).normal(size=(pixels * 6 * channels, hidden))
    order = transforms.channel_major_modulations(pixels, 6, channels)
    kernel = transforms.linear(order, parts=6).to_jax(weight)
    assert kernel.shape == (6, hidden, channels * pixels)
    # PyTorch views the outputs as [pixel, modulation, channel].
    expected = weight.reshape(pixels, 6, channels, hidden)[2, 4, 1]
    np.testing.assert_array_equal(kernel[4, :, 1 * pixels + 2], expected)


def test_convolutions_are_turned():
    weight = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    kernel = transforms.CONV.to_jax(weight)
    assert kernel.shape == (4, 5, 3, 2) and kernel[1, 2, 0, 1] == weight[1, 0, 1, 2]
    np.testing.assert_array_equal(transforms.CONV.to_torch(kernel), weight)
