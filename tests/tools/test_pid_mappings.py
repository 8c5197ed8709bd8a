"""PidNet and the discriminator to PyTorch's names and layouts and back."""

import jax
import numpy as np
import pytest

from pid_jax.errors import UserError
from tools.convert_torch_weights.mappings import jax_to_torch, table_for, torch_to_jax

PIDNET = dict(num_groups=2, hidden_size=16, pixel_hidden_size=4, pixel_attn_hidden_size=8,
              pixel_num_groups=1, patch_depth=3, pixel_depth=1, patch_size=4, txt_embed_dim=6,
              txt_max_length=5, lq_hidden_dim=8, lq_latent_channels=3, lq_in_channels=3,
              lq_num_res_blocks=2, lq_aux_rgb_head=True, sr_scale=2, pit_lq_inject=True)
DISCRIMINATOR = dict(inner_dim=16, num_blocks=4, feature_indices=(1, 3), num_conv_layers=3)


def random_params(table):
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)
    tensors = {key: draw(np.empty(shape)) for key, shape in table.shapes().items()}
    return torch_to_jax(table, tensors)


@pytest.mark.parametrize("name, options", [("pidnet", PIDNET), ("discriminator", DISCRIMINATOR)])
def test_round_trip_is_exact(name, options):
    table = table_for(name, options)
    params = random_params(table)
    again = torch_to_jax(table, jax_to_torch(table, params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again)):
        np.testing.assert_array_equal(a, b)


def test_every_part_of_the_lq_branch_has_its_pytorch_place():
    shapes = table_for("pidnet", PIDNET).shapes()
    expected = {"lq_proj.latent_proj.0.weight": (8, 3, 3, 3),
                "lq_proj.latent_proj.4.block.5.weight": (8, 8, 3, 3),
                "lq_proj.image_conv.0.weight": (8, 12, 3, 3),
                "lq_proj.merge.0.weight": (8, 16, 1, 1),
                "lq_proj.merge.3.block.3.bias": (8,),
                "lq_proj.output_heads.1.weight": (16, 8),
                "lq_proj.pit_head.bias": (16,),
                "lq_proj.lq_aux_rgb_head.3.weight": (12, 8),
                "lq_proj.gate_modules.1.log_alpha": (),
                "lq_proj.gate_modules.1.content_proj.weight": (16, 32),
                "pit_lq_gate.log_alpha": ()}
    assert {key: shapes[key] for key in expected} == expected
    assert "lq_proj.output_heads.2.weight" not in shapes


def test_discriminator_layers_are_numbered_as_in_pytorch():
    shapes = table_for("discriminator", DISCRIMINATOR).shapes()
    assert shapes["cls_pred_heads.1.0.weight"] == (8, 16, 4, 4)
    assert shapes["cls_pred_heads.1.3.weight"] == (64, 8, 4, 4)
    assert shapes["cls_pred_heads.1.4.weight"] == (64,)
    assert shapes["cls_pred_heads.1.6.weight"] == (1, 64, 1, 1)
    assert len(shapes) == 2 * 10


def test_weights_without_the_pixel_head_are_named():
    table = table_for("pidnet", PIDNET)
    tensors = {key: np.zeros(shape) for key, shape in table.shapes().items()
               if not key.startswith("lq_proj.pit_head")}
    with pytest.raises(UserError, match="pit_head.bias is missing; lq_proj.pit_head.weight is"):
        torch_to_jax(table, tensors)
