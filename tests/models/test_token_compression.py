"""The encoder-decoder path: windows, sizes and refusals (its numbers are golden, A10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.errors import UserError
from pid_jax.models import build_model, init_parameters, token_compression

OPTIONS = dict(num_groups=2, hidden_size=16, pixel_hidden_size=4, pixel_attn_hidden_size=8,
               pixel_num_groups=1, patch_depth=2, pixel_depth=1, patch_size=4, txt_embed_dim=6,
               txt_max_length=5, enable_ed=True, ed_compress_ratio=4)


def test_windows_are_gathered_by_row_column_channel():
    x = jnp.arange(4 * 6 * 2).reshape(1, 24, 2)
    gathered = token_compression.gather_windows(x, (4, 6), 2)
    image = np.asarray(x).reshape(4, 6, 2)
    np.testing.assert_array_equal(gathered[0, 4], image[2:4, 2:4].reshape(-1))
    np.testing.assert_array_equal(token_compression.scatter_windows(gathered, (2, 3), 2), x)


@pytest.mark.parametrize("channels, window, aligned", [(36, 2, 36), (32, 3, 36), (36, 4, 48)])
def test_aligned_width(channels, window, aligned):
    assert token_compression.aligned_width(channels, window) == aligned


def run(height, width, **call):
    net = build_model("pixeldit_t2i", **OPTIONS)

    def forward(key):
        x = jnp.ones((1, height, width, 3))
        return net.apply({"params": init_parameters(net, key)}, x, jnp.ones(1),
                         jnp.ones((1, 3, 6)), **call)

    return jax.eval_shape(forward, jax.random.key(0))


def test_features_live_on_the_small_grid():
    out = run(32, 16, feature_indices=(0,))
    assert out.features[0].shape == (1, 2, 1, 16)
    assert out.repa_tokens.shape == (1, 32, 16) and out.x.shape == (1, 32, 16, 3)


def test_a_grid_that_windows_do_not_tile_is_refused():
    with pytest.raises(UserError, match="does not divide into"):
        run(24, 16)
