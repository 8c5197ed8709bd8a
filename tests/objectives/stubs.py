"""Stand-ins for a network and its encoders: what they answer is known, nothing compiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax.models.outputs import NetOutput


@dataclasses.dataclass
class Net:
    """A network whose output is `answer(x, t, y, **inputs)`; one 2x2 kernel trains."""

    answer: Any = None
    patch_size: int = 4
    sr_scale: int = 2
    train_lq_proj_only: bool = False
    calls: list = dataclasses.field(default_factory=list)

    def init(self, key, method):
        return {"params": {"lq_proj": {"kernel": jax.random.normal(key, (2, 2))}}}

    def apply(self, variables, x, t, y, feature_indices=(), **inputs):
        self.calls.append({"t": t, "y": y, **inputs})
        picture = self.answer(x, t, y, **inputs)
        return NetOutput(x=picture + 0 * variables["params"]["lq_proj"]["kernel"].sum(),
                         lq_rgb=jnp.zeros((len(x), x.shape[1] // 2, x.shape[2] // 2, 3)))


class LinearNet(Net):
    """A network whose outputs are linear in its four weights."""

    def apply(self, variables, x, t, y, lq_latent=None, **inputs):
        kernel = variables["params"]["lq_proj"]["kernel"]
        picture = kernel[0, 0] * x + kernel[0, 1] * y.mean((1, 2))[:, None, None, None]
        grey = kernel[1, 0] * x[:, ::2, ::2] + kernel[1, 1]
        return NetOutput(x=picture, lq_rgb=grey)


class Text:
    """Embeds a caption as its length, everywhere."""

    width, length = 2, 3

    def embed(self, captions):
        return np.stack([np.full((3, 2), len(caption), np.float32) for caption in captions])


class Codec:
    """Latents are the mean of 4x4 pixels, plus one."""

    family, channels, spatial_factor = "mean", 3, 4

    def encode(self, images):
        batch, height, width, _ = images.shape
        return 1 + images.reshape(batch, height // 4, 4, width // 4, 4, 3).mean((2, 4))
