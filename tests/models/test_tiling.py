import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models.attention import dense_attention
from pid_jax.models.tiling import attended_by_tiles, from_tiles, updated_by_tiles

TOKENS = 10
X = np.random.default_rng(0).standard_normal((2, TOKENS, 8)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((1, TOKENS, 8)).astype(np.float32)
SIZES = [0, 1, 4, 5, 7, 10, 99]  # 4 and 7 do not divide: the last tile reaches back


@pytest.mark.parametrize("size", SIZES)
def test_every_token_is_worked_on_once(size):
    """Twice would show: the function does not give the same when it sees its own result."""
    wanted = jnp.tanh(X + Y) + 1
    np.testing.assert_allclose(updated_by_tiles(size, lambda x, y: jnp.tanh(x + y) + 1, X, Y),
                               wanted, atol=1e-6)
    one, two = from_tiles(size, lambda x, y: (jnp.tanh(x + y) + 1, (x * y)[..., :3, None]), X, Y)
    np.testing.assert_allclose(one, wanted, atol=1e-6)
    np.testing.assert_allclose(two, (X * Y)[..., :3, None], atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text, masked", [(0, False), (3, False), (3, True)])
def test_a_tile_attends_to_all_tokens(size, text, masked):
    project = lambda x, y: tuple((x * scale + y).reshape(*x.shape[:2], 2, 4) for scale in (1, 2, 3))
    rest = lambda out, x, y: x + out.reshape(x.shape) * y
    others = project(X[:, :text], Y[:, :text])
    mask = np.arange(text + TOKENS)[None] % 3 > 0 if masked else None
    found, attend = attended_by_tiles(size, dense_attention, project, rest, X, Y,
                                      before=others[1:] if text else None, key_mask=mask)
    image = project(X, Y)
    if not text:
        np.testing.assert_allclose(found, rest(dense_attention(*image)[0], X, Y), atol=1e-5)
        return
    out, text_out = dense_attention(*image, *others, key_mask=mask)
    np.testing.assert_allclose(found, rest(out, X, Y), atol=1e-5)
    np.testing.assert_allclose(attend(others[0]), text_out, atol=1e-5)


def test_one_tile_at_a_time_is_wide():
    """The hidden layer of all tokens does not exist."""
    wide = np.zeros((8, 64), np.float32)
    traced = str(jax.make_jaxpr(lambda x: updated_by_tiles(
        5, lambda x: x + jnp.tanh(x @ wide) @ wide.T, x))(X))
    assert "f32[2,5,64]" in traced and "f32[2,10,64]" not in traced
