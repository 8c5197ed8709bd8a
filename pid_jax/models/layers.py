"""The small layers of every network here, as plain functions over parameter dicts.

Conventions: a linear layer is `{"kernel": [in, out], "bias": [out]}` (no bias: no such key), a
norm is `{"scale": [features]}`. Parameters keep their own dtype; the arithmetic runs in the dtype
of the activations, and statistics of norms in float32. `*_spec` functions describe parameters
for `draw`, `*_init` functions draw them; both float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = Mapping[str, Any]
KernelInit = Callable[[jax.Array, tuple[int, ...]], jax.Array]

RMS_NORM_EPS = 1e-6
LAYER_NORM_EPS = 1e-5
LARGE = 2**20  # elements of a parameter that is drawn by itself
TIME_CHANNELS = 256
TIME_MAX_PERIOD = 10.0
SINCOS_OMEGA = 10000.0
# Where PyTorch's float32 exp lies one ulp above and below the rounded exact value.
TIME_FREQUENCIES_UP = (27, 52, 78)
TIME_FREQUENCIES_DOWN = (106,)


# ---- initial values -----------------------------------------------------------------------------

class Uniform(NamedTuple):
    """A parameter to be drawn from U(-bound, bound)."""

    shape: tuple[int, ...]
    bound: float

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def draw(key: jax.Array, specs: Any) -> Any:
    """Draws every `Uniform` in a tree; arrays in it stay as they are.

    Small ones come from one stream, cut into pieces: XLA takes 0.2 s to compile each random stream.
    Large ones have their own, which devices can make in parts: a piece is cut from a whole stream.
    """
    leaves, structure = jax.tree.flatten(specs, is_leaf=_is_spec)
    small = [leaf for leaf in leaves if _is_spec(leaf) and leaf.size < LARGE]
    stream = _uniform(key, (sum(leaf.size for leaf in small),))
    pieces = iter(jnp.split(stream, np.cumsum([leaf.size for leaf in small], dtype=int)[:-1]))
    return structure.unflatten([
        leaf if not _is_spec(leaf) else
        leaf.bound * (next(pieces).reshape(leaf.shape) if leaf.size < LARGE else
                      _uniform(jax.random.fold_in(key, place), leaf.shape))
        for place, leaf in enumerate(leaves)])


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, minval=-1, maxval=1)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, Uniform)


def torch_spec(n_in: int, *shape: int) -> Uniform:
    """PyTorch's default for kernels and biases of a layer with `n_in` inputs per output."""
    return Uniform(shape, 1 / math.sqrt(n_in))


def torch_uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """PyTorch's default for a kernel [in, out] or [kh, kw, in, out]."""
    return draw(key, torch_spec(math.prod(shape[:-1]), *shape))


def xavier_uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Glorot uniform for a kernel [in, out]."""
    bound = math.sqrt(6 / (shape[0] + shape[1]))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def normal(std: float) -> KernelInit:
    """N(0, std^2)."""
    return lambda key, shape: std * jax.random.normal(key, shape)


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All zeros; the key is not used."""
    return jnp.zeros(shape)


# ---- linear, norms, feed-forward ----------------------------------------------------------------

def linear_spec(n_in: int, n_out: int, bias: bool = True) -> dict:
    """Parameters of a linear layer with PyTorch's default values, for `draw`."""
    spec = {"kernel": torch_spec(n_in, n_in, n_out)}
    return spec | {"bias": torch_spec(n_in, n_out)} if bias else spec


def linear_init(key: jax.Array, n_in: int, n_out: int, kernel: KernelInit = torch_uniform,
                zero_bias: bool = False) -> dict:
    """Parameters of a linear layer with another kernel, and PyTorch's bias or zeros."""
    kernel_key, bias_key = jax.random.split(key)
    bias = jnp.zeros((n_out,)) if zero_bias else draw(bias_key, torch_spec(n_in, n_out))
    return {"kernel": kernel(kernel_key, (n_in, n_out)), "bias": bias}


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] @ kernel [in, out], with a gradient of the kernel that needs no transposition.

    JAX's own is a product [out, in], turned: XLA on a CPU writes a turned copy of the cotangent
    for it, and a training step takes a quarter longer (docs/speed.md).
    """
    return x @ kernel


def _product_forward(x, kernel):
    return product(x, kernel), (x, kernel)


def _product_backward(saved, cotangent):
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    return cotangent @ kernel.T, jax.lax.dot_general(x, cotangent, ((rows, rows), ((), ())))


product.defvjp(_product_forward, _product_backward)


def linear(params: Params, x: jax.Array) -> jax.Array:
    """x [..., in] -> [..., out]."""
    y = product(x, params["kernel"].astype(x.dtype))
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def norm_init(features: int) -> dict:
    """Parameters of an RMSNorm: a scale of ones."""
    return {"scale": jnp.ones((features,))}


def rms_norm(params: Params, x: jax.Array, axis: int = -1) -> jax.Array:
    """RMSNorm over `axis` with eps 1e-6: statistics in float32, cast back, then scaled."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=axis, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + RMS_NORM_EPS)).astype(x.dtype)
    scale = params["scale"].astype(x.dtype)
    return normed * scale.reshape(scale.shape + (1,) * (-1 - axis))


def swiglu_width(hidden: int) -> int:
    """Inner width of the SwiGLU of a block: int(2 * (4 * hidden) / 3), rounded down."""
    return int(2 * (4 * hidden) / 3)


def swiglu_spec(hidden: int) -> dict:
    """Parameters of a bias-free SwiGLU, for `draw`."""
    inner = swiglu_width(hidden)
    return {"w1": linear_spec(hidden, inner, bias=False),
            "w3": linear_spec(hidden, inner, bias=False),
            "w2": linear_spec(inner, hidden, bias=False)}


def swiglu(params: Params, x: jax.Array) -> jax.Array:
    """w2(silu(w1 x) * w3 x)."""
    return linear(params["w2"], jax.nn.silu(linear(params["w1"], x)) * linear(params["w3"], x))


def mlp_spec(hidden: int, ratio: int = 4) -> dict:
    """Parameters of a two-layer feed-forward with biases, for `draw`."""
    return {"fc1": linear_spec(hidden, ratio * hidden), "fc2": linear_spec(ratio * hidden, hidden)}


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x (1 + erf(x / sqrt 2)) / 2 as in PyTorch."""
    # jax.nn.gelu takes erfc, of which XLA evaluates both branches with an exponential each.
    return 0.5 * x * (1 + jax.lax.erf(x * np.asarray(math.sqrt(0.5), x.dtype)))


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """fc2(gelu(fc1 x)) on the last axis."""
    return linear(params["fc2"], gelu(linear(params["fc1"], x)))


# ---- modulation (adaLN) -------------------------------------------------------------------------

def modulation_spec(n_in: int, n_out: int, count: int = 6) -> dict:
    """One leaf for `count` modulations, for `draw`: kernel [count, n_in, n_out], bias."""
    return {"kernel": torch_spec(n_in, count, n_in, n_out), "bias": torch_spec(n_in, count, n_out)}


def unstack(params: Params) -> list[dict]:
    """The linear layers that a leaf with a leading axis holds, one dict each."""
    leaves, structure = jax.tree.flatten(dict(params))
    count = len(leaves[0])
    # jnp.split differentiates to one concatenation; indexing would sum `count` padded arrays.
    parts = [jnp.split(leaf, count) for leaf in leaves]
    return [structure.unflatten([split[i][0] for split in parts]) for i in range(count)]


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """x * (1 + scale) + shift."""
    return x * (1 + scale) + shift


# ---- patches ------------------------------------------------------------------------------------

def patchify(x: jax.Array, patch: int) -> jax.Array:
    """[B, H, W, C] -> [B, L, C, patch^2]; patches row by row, pixels of a patch row by row."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(b, -1, c, patch * patch)


def unpatchify(tokens: jax.Array, grid: tuple[int, int], patch: int) -> jax.Array:
    """Inverse of `patchify`: [B, L, C, patch^2] -> [B, H, W, C] for a grid (rows, columns)."""
    b, _, c, _ = tokens.shape
    rows, columns = grid
    tokens = tokens.reshape(b, rows, columns, c, patch, patch)
    return tokens.transpose(0, 1, 4, 2, 5, 3).reshape(b, rows * patch, columns * patch, c)


def to_grid(tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """[B, L, D] -> [B, rows, columns, D]."""
    return tokens.reshape(tokens.shape[0], *grid, tokens.shape[-1])


# ---- positions and time -------------------------------------------------------------------------

def sincos_table(length: int, channels: int) -> np.ndarray:
    """[channels, length] float32: sines, then cosines of k / 10000^(i/(channels/2)).

    Computed in float64 and cast once. `channels` must be even.
    """
    omega = SINCOS_OMEGA ** (-np.arange(channels // 2, dtype=np.float64) / (channels / 2))
    angles = omega[:, None] * np.arange(length, dtype=np.float64)
    return np.concatenate([np.sin(angles), np.cos(angles)]).astype(np.float32)


def pixel_positions(grid: tuple[int, int], patch: int, channels: int) -> jax.Array:
    """2-D sin-cos embedding of every pixel of the full image, [L, channels, patch^2] float32.

    The first half of the channels tells the column, the second the row; built from two small
    tables so that no image-sized constant enters the program.
    """
    return join_positions(*position_parts(grid, patch, channels), patch)


def position_parts(grid: tuple[int, int], patch: int, channels: int
                   ) -> tuple[jax.Array, jax.Array]:
    """What `join_positions` makes the embedding of: [L, channels / 2 * patch] float32 of the row
    and of the column of every patch."""
    half = channels // 2
    row, column = (sincos_table(n * patch, half).reshape(half, n, patch).transpose(1, 0, 2)
                   .reshape(n, -1) for n in grid)
    shape = (*grid, half * patch)
    return (jnp.broadcast_to(row[:, None], shape).reshape(-1, shape[-1]),
            jnp.broadcast_to(column, shape).reshape(-1, shape[-1]))


def join_positions(row: jax.Array, column: jax.Array, patch: int) -> jax.Array:
    """The embedding of n patches, [n, channels, patch^2], from their rows of `position_parts`."""
    row, column = (part.reshape(len(part), -1, patch) for part in (row, column))
    shape = (*row.shape, patch)
    both = [jnp.broadcast_to(column[:, :, None, :], shape),
            jnp.broadcast_to(row[:, :, :, None], shape)]
    return jnp.concatenate(both, axis=1).reshape(len(row), -1, patch * patch)


def time_frequencies(channels: int = TIME_CHANNELS) -> np.ndarray:
    """The channels / 2 frequencies of the time embedding, float32.

    PiD's table is built in float32: log 10 is rounded, then its product with the index, and exp
    is PyTorch's. t reaches 1000, so one ulp here moves the output by 1e-4.
    """
    if channels < TIME_CHANNELS and TIME_CHANNELS % channels == 0:
        return time_frequencies()[::TIME_CHANNELS // channels]
    half = channels // 2
    log_period = np.float32(-np.log(TIME_MAX_PERIOD))
    exponent = log_period * np.arange(half, dtype=np.float32) / np.float32(half)
    table = np.exp(exponent.astype(np.float64)).astype(np.float32)
    if channels == TIME_CHANNELS:
        for entries, towards in ((TIME_FREQUENCIES_UP, 2), (TIME_FREQUENCIES_DOWN, 0)):
            table[list(entries)] = np.nextafter(table[list(entries)], np.float32(towards))
    return table


def time_waves(t: jax.Array, channels: int = TIME_CHANNELS) -> jax.Array:
    """t [B] float32 -> [cos, sin](t * f), float32 [B, channels]."""
    angles = t.astype(jnp.float32)[:, None] * time_frequencies(channels)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def time_init(key: jax.Array, hidden: int, std: float = 0.02) -> dict:
    """Parameters of the time embedding's MLP: kernels N(0, std^2)."""
    keys = jax.random.split(key)
    return {"fc1": linear_init(keys[0], TIME_CHANNELS, hidden, kernel=normal(std)),
            "fc2": linear_init(keys[1], hidden, hidden, kernel=normal(std))}


def time_embedding(params: Params, t: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """t [B] float32 in the network's units -> [B, D]: fc2(silu(fc1([cos, sin](t * f))))."""
    waves = time_waves(t).astype(dtype)
    return linear(params["fc2"], jax.nn.silu(linear(params["fc1"], waves)))
