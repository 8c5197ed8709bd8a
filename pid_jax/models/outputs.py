"""What a denoising network hands back."""

import flax.struct
import jax


@flax.struct.dataclass
class NetOutput:
    """Result of one network call; a field is None when the call did not produce it."""

    # [B, H, W, 3] float32, the raw prediction (its meaning is the objective's affair).
    x: jax.Array | None = None
    # One [B, h, w, D] per asked block, in the order of the blocks.
    features: tuple[jax.Array, ...] = ()
    # [B, L, D] tokens for representation alignment (REPA).
    repa_tokens: jax.Array | None = None
    # [B, h, w, 3] low-quality image as the auxiliary RGB head of PiD sees it.
    lq_rgb: jax.Array | None = None
    # [B, L] float32 log-variance of every patch, from the gamma head of DiTok's decoder.
    gamma: jax.Array | None = None
