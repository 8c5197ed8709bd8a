"""Drawing by overlapping tiles: the network sees a part at a time, the sampler the whole.

At every step each tile of the state goes through the network, and the outputs are blended with
weights that fall linearly over the overlap and add up to 1. The state is one, so neighbouring tiles
start every step from the same numbers; a single tile has the weight 1 everywhere.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.errors import UserError

OVERLAP = 256

TilePredict = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`predict(part of x [B, h, w, C], top, left) -> output of the same shape`; in cells."""


class Tiles(NamedTuple):
    """Tiles of one size over a grid of cells; Python numbers, so hashable.

    Attributes:
      grid: (rows, columns) of cells; part: of every tile.
      tops, lefts: where they begin, along each axis.
    """

    grid: tuple[int, int]
    part: tuple[int, int]
    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.tops) * len(self.lefts)


def make_tiles(height: int, width: int, tile: int, overlap: int, cell: int) -> Tiles:
    """Tiles for pictures of height x width pixels.

    Args:
      tile: side of a tile in pixels; a picture that is smaller has one tile along that side.
      overlap: pixels that neighbours share at least, below half a tile.
      cell: pixels of a cell (a patch of the network); `tile` and `overlap` are multiples.
    Raises:
      UserError: sizes that are no multiples, or tiles that overlap too much.
    """
    for name, value in (("tile", tile), ("overlap", overlap)):
        if value % cell or value < 0 or (name == "tile" and not value):
            raise UserError(f"{name} is {value} pixels; expected a multiple of the patch size "
                            f"{cell}")
    if 2 * overlap > tile:
        raise UserError(f"overlap is {overlap} pixels and tile {tile}; tiles share at most half of "
                        "their side")
    grid = height // cell, width // cell
    part = min(grid[0], tile // cell), min(grid[1], tile // cell)
    return Tiles(grid, part, *(starts(whole, side, overlap // cell)
                               for whole, side in zip(grid, part)))


def usual_overlap(tile: int, cell: int) -> int:
    """The overlap where none is asked for: 256 pixels, or a quarter of a smaller tile."""
    return min(OVERLAP, tile // 4) // cell * cell


def starts(whole: int, part: int, overlap: int) -> tuple[int, ...]:
    """Where the fewest parts begin that cover `whole` with that overlap, evenly spread."""
    if part >= whole:
        return (0,)
    count = math.ceil((whole - overlap) / (part - overlap))
    return tuple(int(start) for start in np.round(np.linspace(0, whole - part, count)))


def axis_weights(whole: int, part: int, begins: tuple[int, ...], cell: int) -> np.ndarray:
    """float32 [tiles, part * cell]: each tile's weights along an axis, which add up to 1.

    A tile's weight rises from its edge over what it shares with its neighbour.
    """
    weights = np.ones((len(begins), part * cell))
    for number, (one, other) in enumerate(zip(begins, begins[1:])):
        shared = (one + part - other) * cell
        ramp = (np.arange(shared) + 0.5) / max(shared, 1)
        weights[number, part * cell - shared:] *= ramp[::-1]
        weights[number + 1, :shared] *= ramp
    total = np.zeros(whole * cell)
    for begin, row in zip(begins, weights):
        total[begin * cell:(begin + part) * cell] += row
    return np.stack([row / total[begin * cell:(begin + part) * cell]
                     for begin, row in zip(begins, weights)]).astype(np.float32)


def blended(predict: TilePredict, x: jax.Array, tiles: Tiles, cell: int) -> jax.Array:
    """The outputs of all tiles of x [B, H, W, C], blended; one tile is in memory at a time."""
    rows, columns = (jnp.asarray(axis_weights(*axis, cell)) for axis in (
        (tiles.grid[0], tiles.part[0], tiles.tops), (tiles.grid[1], tiles.part[1], tiles.lefts)))
    shape = (len(x), tiles.part[0] * cell, tiles.part[1] * cell, x.shape[-1])

    def add(total: jax.Array, place: tuple) -> tuple[jax.Array, None]:
        row, column, top, left = place
        corner = (0, top * cell, left * cell, 0)
        out = predict(jax.lax.dynamic_slice(x, corner, shape), top, left)
        weight = rows[row][:, None, None] * columns[column][None, :, None]
        sum_here = jax.lax.dynamic_slice(total, corner, shape) + weight * out
        return jax.lax.dynamic_update_slice(total, sum_here, corner), None

    row, column = np.divmod(np.arange(tiles.count), len(tiles.lefts))
    places = row, column, np.asarray(tiles.tops)[row], np.asarray(tiles.lefts)[column]
    places = jax.tree.map(lambda numbers: jnp.asarray(numbers, jnp.int32), places)
    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), places)[0]
