import numpy as np
import pytest

from pid_jax.diffusion import tiles
from pid_jax.errors import UserError


@pytest.mark.parametrize("whole, part, overlap", [(10, 4, 1), (10, 4, 2), (7, 7, 3), (5, 9, 2),
                                                  (256, 64, 16), (9, 4, 0)])
def test_tiles_cover_everything_and_weights_add_up(whole, part, overlap):
    begins = tiles.starts(whole, min(part, whole), overlap)
    part = min(part, whole)
    weights, total = tiles.axis_weights(whole, part, begins, 2), np.zeros(2 * whole)
    for begin, row in zip(begins, weights):
        total[2 * begin:2 * (begin + part)] += row
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert begins[0] == 0 and begins[-1] == whole - part and weights.min() > 0
    assert all(one + part - other >= overlap for one, other in zip(begins, begins[1:]))


def test_blending_what_each_tile_knows_of_the_whole_gives_the_whole():
    x = np.random.default_rng(0).standard_normal((1, 20, 12, 3)).astype(np.float32)
    parts = tiles.make_tiles(20, 12, tile=8, overlap=4, cell=2)
    assert parts.count > 4 and parts.part == (4, 4)
    np.testing.assert_allclose(tiles.blended(lambda part, top, left: part, x, parts, 2), x,
                               atol=1e-6)


@pytest.mark.parametrize("tile, overlap, words", [
    (9, 2, "tile is 9"), (0, 0, "tile is 0"), (8, 3, "overlap is 3"), (8, 6, "at most half")])
def test_tiles_that_do_not_fit_are_refused(tile, overlap, words):
    with pytest.raises(UserError, match=words):
        tiles.make_tiles(16, 16, tile, overlap, 2)
