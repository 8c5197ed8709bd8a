"""Local attention kernels: what one device runs on the tokens and heads it holds.

Every kernel is `kernel(q, k, v, key_mask=None) -> out` with q [B, Q, H, d], k and v [B, K, H, d]
(unscaled; the kernel applies d**-0.5), `key_mask` bool [B, K], True where a key may be attended.
A query with no key to attend to gets zeros. All are exact: what they pad is masked, never counted.
What the backward pass needs from the forward one carries the name `SAVED_ATTENTION`, which the
remat policy "attention" keeps.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pid_jax.errors import UserError
from pid_jax.models.attention import SAVED_ATTENTION, softmax_attention

Kernel = Callable[..., jax.Array]

KERNELS = ("auto", "dense", "chunked", "splash", "cudnn")
PLATFORM_OF = {"splash": "tpu", "cudnn": "gpu"}

LANES = 128
QUERY_CHUNK = 1024
DENSE_SCORES = 2**27  # elements; 512 MiB of float32 scores, above which queries go in chunks
SPLASH_FROM = 512  # keys; below, one dense product costs less than the kernel's padding
# Largest block edge that fits the default VMEM scope forward and backward at head widths 64-128
# (compiled ahead of time for each chip); 2048 does not fit v5e and v5p.
SPLASH_BLOCK = 1024
PADDING_ALLOWED = 1.02
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
CUDNN_WIDTH = 128


def local_kernel(name: str, device: jax.Device) -> Kernel:
    """The kernel called `name` for devices like `device` (a real one or one of a topology).

    "auto" decides per call from the shapes and the dtype: splash on a TPU, cuDNN on a GPU for
    half precision, else dense up to `DENSE_SCORES` scores and chunked above.
    Raises:
      UserError: an unknown name, or a kernel of another platform.
    """
    if name not in KERNELS:
        raise UserError(f"attention kernel {name!r} is unknown; expected one of "
                        f"{', '.join(KERNELS)}")
    platform = platform_of(device)
    if PLATFORM_OF.get(name, platform) != platform:
        raise UserError(f"attention kernel {name!r} runs on {PLATFORM_OF[name]} only; the devices "
                        f"are {platform}; choose auto, dense or chunked")
    if name == "auto":
        return functools.partial(_auto, platform)
    return {"dense": softmax_attention, "chunked": chunked, "splash": splash, "cudnn": cudnn}[name]


def platform_of(device: jax.Device) -> str:
    """"cpu", "gpu" or "tpu" (CUDA and ROCm devices report their own names)."""
    return "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform


def _auto(platform: str, q: jax.Array, k: jax.Array, v: jax.Array,
          key_mask: jax.Array | None = None) -> jax.Array:
    if platform == "tpu" and k.shape[1] >= SPLASH_FROM:
        return splash(q, k, v, key_mask)
    if platform == "gpu" and cudnn_refusal(q) is None:
        return cudnn(q, k, v, key_mask)
    scores = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    return (softmax_attention if scores <= DENSE_SCORES else chunked)(q, k, v, key_mask)


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array | None = None,
            chunk: int = QUERY_CHUNK) -> jax.Array:
    """Dense attention for `chunk` queries at a time; the backward pass recomputes the scores.

    Memory for scores is B * H * chunk * K float32 in place of B * H * Q * K.
    """
    length = q.shape[1]
    chunk = min(chunk, length)
    pieces = _pad(q, math.ceil(length / chunk) * chunk)
    pieces = pieces.reshape(q.shape[0], -1, chunk, *q.shape[2:]).swapaxes(0, 1)
    # Float32 outside the loop: the gradients of k and v are summed over chunks in their dtype.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint
    def attend(piece: jax.Array) -> jax.Array:
        return softmax_attention(piece, wide[0].astype(k.dtype), wide[1].astype(v.dtype), key_mask)

    out = jax.lax.map(attend, pieces).swapaxes(0, 1)
    out = out.reshape(q.shape[0], -1, *q.shape[2:])[:, :length]
    return checkpoint_name(out, SAVED_ATTENTION)


def splash(q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array | None = None,
           largest_block: int = SPLASH_BLOCK, interpret: bool = False) -> jax.Array:
    """Pallas splash attention (TPU): flash-like, two-kernel backward, no score matrix in memory.

    Lengths are padded to whole blocks; padded and masked keys carry another segment id, so no
    query attends to them. `interpret` runs the kernel's own code on the CPU (tests).
    """
    queries, keys = q.shape[1], k.shape[1]
    block_q, block_k = splash_block(queries, largest_block), splash_block(keys, largest_block)
    rows, columns = _round_up(queries, block_q), _round_up(keys, block_k)
    segments = _segments(rows, columns, keys, q.shape[0], key_mask)
    q = q * q.shape[-1] ** -0.5
    q, k, v = (jnp.swapaxes(_pad(x, length), 1, 2)
               for x, length in ((q, rows), (k, columns), (v, columns)))
    kernel = _splash_kernel(q.shape[1], rows, columns, block_q, block_k, interpret)
    out = jax.vmap(kernel)(q, k, v, segments)
    return _zero_if_blind(jnp.swapaxes(out, 1, 2)[:, :queries], key_mask)


def splash_block(length: int, largest: int = SPLASH_BLOCK) -> int:
    """The largest block edge whose padding stays within 2 %, else the one that pads least."""
    edges = [edge for edge in (LANES << n for n in range(8)) if edge <= largest]
    good = [edge for edge in edges if _round_up(length, edge) <= PADDING_ALLOWED * length]
    return max(good) if good else LANES


def _splash_kernel(heads: int, queries: int, keys: int, block_q: int, block_k: int,
                   interpret: bool) -> Callable:
    from jax.experimental.pallas.ops.tpu import splash_attention

    blocks = splash_attention.BlockSizes(
        block_q=block_q, block_kv=block_k, block_kv_compute=block_k,
        block_q_dkv=block_q, block_kv_dkv=block_k, block_kv_dkv_compute=block_k,
        block_q_dq=block_q, block_kv_dq=block_k)
    mask = splash_attention.MultiHeadMask([splash_attention.FullMask((queries, keys))] * heads)
    return splash_attention.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret,
        residual_checkpoint_name=SAVED_ATTENTION)


def _segments(queries: int, padded: int, keys: int, batch: int, key_mask: jax.Array | None):
    """Segment ids [B, queries] and [B, padded] under which padding and masked keys are unseen."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    if key_mask is None and padded == keys:
        return None
    seen = jnp.ones((batch, keys), bool) if key_mask is None else key_mask
    seen = jnp.pad(seen, ((0, 0), (0, padded - keys))).astype(jnp.int32)
    return splash_attention.SegmentIds(q=jnp.ones((batch, queries), jnp.int32), kv=seen)


def cudnn_refusal(q: jax.Array) -> str | None:
    """Why cuDNN attention cannot take such queries, or None when it can."""
    if q.dtype not in CUDNN_DTYPES:
        return f"cuDNN attention takes bfloat16 or float16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > CUDNN_WIDTH:
        return f"cuDNN attention takes head widths up to {CUDNN_WIDTH} that 8 divides, " \
               f"not {q.shape[-1]}"
    return None


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array | None = None,
          implementation: str = "cudnn") -> jax.Array:
    """cuDNN flash attention (GPU, half precision), lengths padded to even as it demands.

    Masked keys are sorted behind the others and cut off by the per-sample key count, since the
    order of keys changes nothing and a full mask would be a [Q, K] bias. `implementation` "xla"
    runs the same preparation without a GPU (tests).
    Raises:
      UserError: a dtype or head width that cuDNN refuses.
    """
    if implementation == "cudnn" and (refusal := cudnn_refusal(q)):
        raise UserError(f"{refusal}; choose attention auto or chunked, or dtype bfloat16")
    (batch, queries), keys = q.shape[:2], k.shape[1]
    counts = None
    if key_mask is not None:
        k, v, counts = _seen_first(k, v, key_mask)
    elif keys % 2:
        counts = jnp.full(batch, keys, jnp.int32)
    q, k, v = (_pad(x, _round_up(x.shape[1], 2)) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=counts,
                                       implementation=implementation)
    return _zero_if_blind(out[:, :queries], key_mask)


def _seen_first(k: jax.Array, v: jax.Array,
                key_mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values with the attended ones in front, and how many those are (at least 1)."""
    order = jnp.argsort(~key_mask, axis=1, stable=True)[:, :, None, None]
    counts = jnp.maximum(key_mask.sum(1, dtype=jnp.int32), 1)
    return jnp.take_along_axis(k, order, 1), jnp.take_along_axis(v, order, 1), counts


def _zero_if_blind(out: jax.Array, key_mask: jax.Array | None) -> jax.Array:
    if key_mask is None:
        return out
    return jnp.where(key_mask.any(1)[:, None, None, None], out, 0)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(x: jax.Array, length: int) -> jax.Array:
    """Appends zero tokens to x [B, L, H, d] up to `length`."""
    missing = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
