"""Latents as image-generation pipelines hand them out, brought to the codecs' form.

Their layouts (packed tokens, a raw Flux2 latent) and what is known of a latent that was caught in
the middle of sampling: its noise level, and for SDXL another scale.
"""

import jax
import numpy as np

from pid_jax.encoders.autoencoder_codec import batch_normalisation
from pid_jax.errors import UserError
from pid_jax.models.spatial import channels_to_space, space_to_channels

# Latent family -> cells of a token's side. A token covers 16 pixels in all of them.
PACKED = {"flux": 2, "qwenimage": 2, "flux2": 1}
TOKEN_PIXELS = 16
FRAMES = ("flow", "vp", "euler")
SMALLEST_RAE_TIME = 1 / 1000


def unpack(family: str, tokens: jax.Array, height: int, width: int) -> jax.Array:
    """Packed tokens [B, L, C'] of a picture of height x width pixels -> latents [B, h, w, C].

    Tokens go row by row; the channels of one are (channel, row, column) of its cells.
    Raises:
      UserError: a family whose pipeline does not pack, or another number of tokens.
    """
    if family not in PACKED:
        raise UserError(f"latents of {family!r} come in no packed form; known: "
                        f"{', '.join(PACKED)}")
    rows, columns = height // TOKEN_PIXELS, width // TOKEN_PIXELS
    if tokens.ndim != 3 or tokens.shape[1] != rows * columns:
        raise UserError(f"packed latents of shape {tuple(tokens.shape)} do not fit a picture of "
                        f"{height} x {width}: expected [B, {rows * columns}, channels]")
    grid = tokens.reshape(tokens.shape[0], rows, columns, tokens.shape[-1])
    return channels_to_space(grid, PACKED[family])


def fold_flux2(raw: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
    """A raw Flux2 latent [B, h, w, 32] (as the klein pipelines end with) -> [B, h/2, w/2, 128].

    Args:
      mean, var: [128] running statistics of the auto-encoder's BatchNorm.
    """
    return batch_normalisation(mean, var).apply(space_to_channels(raw, 2))


def reframe(latent: np.ndarray, sigma: float, frame: str, path: str) -> tuple[np.ndarray, float]:
    """A noised latent a x0 + b noise in the scale of one kind of sampler, brought to another's.

    Args:
      latent: float32, any shape.
      sigma: noise level as its sampler counts it: b.
      frame: "flow" (a = 1 - b), "vp" (a = sqrt(1 - b^2)) or "euler" (a = 1, any b >= 0: SDXL's
        Euler sampler).
      path: what the network reads: "flow" or "vp".
    Returns:
      The latent, divided by a + b (flow) or sqrt(a^2 + b^2) (vp), and its noise level, b by the
      same.
    Raises:
      UserError: an unknown frame, or a noise level that it does not have.
    """
    if frame not in FRAMES:
        raise UserError(f"frame is {frame!r}; choose one of {', '.join(FRAMES)}")
    if not 0 <= sigma <= (np.inf if frame == "euler" else 1) or not np.isfinite(sigma):
        raise UserError(f"sigma {sigma} is no noise level of the frame {frame!r}; choose a number "
                        f"{'of at least 0' if frame == 'euler' else 'from 0 (clean) to 1'}")
    if frame == path:
        return latent, float(sigma)
    noise = np.float64(sigma)
    clean = 1.0 if frame == "euler" else 1 - noise if frame == "flow" else np.sqrt(1 - noise**2)
    length = float(clean + noise if path == "flow" else np.hypot(clean, noise))
    return latent / np.float32(length), float(sigma) / length


def rae_times(steps: int, shift: float) -> np.ndarray:
    """float32 [steps + 1] times of the ODE sampler of representation auto-encoders; 1 is noise.

    1 - linspace(0, 1 - 1/1000) with the time shift s t / (1 + (s - 1) t). The state after K steps
    is at noise level `[K]`; the end counts as 0.
    """
    times = 1 - np.linspace(0, 1 - SMALLEST_RAE_TIME, steps + 1)
    return (shift * times / (1 + (shift - 1) * times)).astype(np.float32)
