"""Rotary tables against the formulas, and half-split turning against neighbouring pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pid_jax.models.rope import RopeTable, image_rope, rotate, text_rope


def interleaved_angles(head_dim, grid, thetas):
    """Angles [L, d/2] as the reference orders them, one position and one pair at a time."""
    rows, columns = grid
    angles = np.zeros((rows * columns, head_dim // 2))
    for r, y in enumerate(np.linspace(0, 16, rows)):
        for c, x in enumerate(np.linspace(0, 16, columns)):
            for i in range(head_dim // 4):
                angles[r * columns + c, 2 * i] = x * thetas[1] ** (-4 * i / head_dim)
                angles[r * columns + c, 2 * i + 1] = y * thetas[0] ** (-4 * i / head_dim)
    return angles


@pytest.mark.parametrize("head_dim, grid", [(12, (4, 6)), (64, (3, 5)), (72, (1, 2))])
def test_original_image_table(head_dim, grid):
    angles = interleaved_angles(head_dim, grid, (1e4, 1e4))
    table = image_rope(head_dim, grid)
    np.testing.assert_allclose(table.cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(table.sin, np.sin(angles), atol=1e-7)


def test_ntk_aware_table_stretches_each_axis_by_its_own_ratio():
    head_dim, grid, reference = 16, (6, 12), (8, 4)
    thetas = [1e4 * (n / ref) ** (8 / 6) for n, ref in zip(grid, reference)]
    table = image_rope(head_dim, grid, "ntk_aware", reference)
    np.testing.assert_allclose(table.cos, np.cos(interleaved_angles(head_dim, grid, thetas)),
                               atol=1e-7)


def test_ntk_aware_changes_nothing_at_its_reference():
    for ours, plain in zip(image_rope(16, (4, 8), "ntk_aware", (4, 8)), image_rope(16, (4, 8))):
        np.testing.assert_array_equal(ours, plain)


def test_text_table_has_integer_positions():
    angles = np.arange(7)[:, None] * 1000.0 ** (-2 * np.arange(6) / 12)
    table = text_rope(12, 7, theta=1000.0)
    np.testing.assert_allclose(table.sin, np.sin(angles), atol=1e-7)


def test_half_split_turning_equals_pair_turning_after_the_permutation():
    rng = np.random.default_rng(0)
    x, angles = rng.normal(size=(2, 5, 3, 8)), rng.normal(size=(5, 4))
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * angles)[:, None]
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], -1).astype(np.float32)
    table = RopeTable(jnp.cos(angles), jnp.sin(angles))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(rotate(halves, table), expected, atol=1e-6)


def test_no_table_leaves_tokens_as_they_are():
    x = jnp.ones((1, 2, 3, 4))
    assert rotate(x, None) is x
