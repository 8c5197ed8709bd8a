"""Pictures to a few tokens and back, with a TiTok or a DiTok checkpoint.

    tokenizer = load_tokenizer("runs/ditok")
    indices = tokenizer.encode(pictures)        # int32 [B, 32]
    again = tokenizer.decode(indices, seed=3)   # [B, H, W, 3]

Pictures are float32 [B, side, side, 3] in [-1, 1].
"""

import functools
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax import loading, models, sampling_inputs
from pid_jax.data.token_cache import digest
from pid_jax.errors import UserError
from pid_jax.models.titok import TiTok
from pid_jax.objectives.ditok_stage2 import FROZEN, DiTokStage2
from pid_jax.training import checkpoint as checkpoint_lib
from pid_jax.training.state import Params


class Tokenizer(Protocol):
    """Attributes:
      side: of the pictures in pixels.
      tokens: indices a picture.
      codebook_size: an index is below it.
    """

    side: int
    tokens: int
    codebook_size: int

    @property
    def fingerprint(self) -> str:
        """Identifies the weights that make tokens (SHA-256, hexadecimal)."""

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures -> indices int32 [B, tokens]."""

    def decode(self, indices: np.ndarray, seed: int = 0, **options) -> np.ndarray:
        """Indices -> pictures; `options` are those of the kind of checkpoint."""


def load_tokenizer(path: str | Path, which: str = "ema") -> "Tokenizer":
    """The tokenizer of a DiTok checkpoint, or of a converted TiTok.

    Args:
      which: of a DiTok: "ema" (or another average by its name), "net" or "untrained".
    Raises:
      UserError: no checkpoint there, or one of another model.
    """
    folder = checkpoint_lib.find_step_folder(path)
    loading.check_which(folder, which)
    config = loading.read_config(folder)
    if config.model.name == "titok":
        options = config.model.to_dict()
        net = models.build_model(options.pop("name"), **options)
        checkpoint_lib.refuse_differences(folder, checkpoint_lib.PARAMS, jax.eval_shape(
            lambda: models.init_parameters(net, jax.random.key(0))))
        return TiTokCodec(net, checkpoint_lib.load_for_inference(
            folder, checkpoint_lib.PARAMS)[1])
    return DiTokCodec(loading.load_checkpoint(folder, which, DiTokStage2))


def _frozen_digest(params: Params) -> str:
    return digest({name: params[name] for name in FROZEN})


class TiTokCodec:
    """TiTok as it was released: tokens to pictures by its own decoder, without noise."""

    def __init__(self, net: TiTok, params: Params):
        self.net, self.params = net, params
        self.side, self.tokens = net.crop_size, net.num_latent_tokens
        self.codebook_size = net.codebook_size
        apply = lambda method: jax.jit(lambda p, x: net.apply({"params": p}, x, method=method))
        self._encode, self._decode = apply("encode"), apply("decode_indices")

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Tokenizer`."""
        return _frozen_digest(self.params)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """See `Tokenizer`."""
        pictures = (jnp.asarray(pictures) + 1) / 2
        return np.asarray(self._encode(self.params, pictures).indices)

    def decode(self, indices: np.ndarray, seed: int = 0, **options) -> np.ndarray:
        """See `Tokenizer`; takes no options, and the seed changes nothing."""
        if options:
            raise UserError(f"TiTok decodes in one step: leave out {', '.join(sorted(options))}")
        check_indices(self, indices)
        pictures = self._decode(self.params, jnp.asarray(indices))
        return sampling_inputs.check_finite(jnp.clip(2 * pictures - 1, -1, 1), "picture")


class DiTokCodec:
    """DiTok: tokens to pictures by diffusion."""

    def __init__(self, checkpoint: loading.Checkpoint):
        self.checkpoint = checkpoint
        net = checkpoint.objective.net
        self.side, self.tokens = net.crop_size, net.num_latent_tokens
        self.codebook_size, self.classes = net.codebook_size, net.num_classes
        self._encode = jax.jit(checkpoint.objective.encode)
        self._decode = jax.jit(self._draw, static_argnames=("steps", "guidance"))

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `Tokenizer`."""
        return _frozen_digest(self.checkpoint.params)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """See `Tokenizer`."""
        return np.asarray(self._encode(self.checkpoint.params, jnp.asarray(pictures))[1])

    def decode(self, indices: np.ndarray, seed: int = 0, label: int | None = None,
               steps: int | None = None, guidance: float | None = None) -> np.ndarray:
        """See `Tokenizer`.

        Args:
          seed: of the noise; picture i of a batch takes seed + i.
          label: class of the pictures; None: no class.
          steps, guidance: default to those of the run's samples; guidance is on the label alone.
        """
        check_indices(self, indices)
        options = self.checkpoint.config.sample
        label = self.classes if label is None else label
        if not 0 <= label <= self.classes:
            raise UserError(f"label {label} is no class; choose one from 0 to {self.classes - 1}")
        steps = options.steps if steps is None else steps
        guidance = options.guidance if guidance is None else guidance
        seeds = sampling_inputs.seeds(range(seed, seed + len(indices)), len(indices))
        pictures = self._decode(self.checkpoint.params, seeds,
                                jnp.asarray(indices), np.full(len(indices), label, np.int32),
                                steps=steps, guidance=float(guidance))
        return sampling_inputs.check_finite(pictures, "picture")

    def _draw(self, params, seeds, indices, labels, *, steps, guidance):
        objective = self.checkpoint.objective
        table = objective.solver_table(self.side, self.side, steps, guidance)
        codes = objective.codes(params, {"indices": indices})
        noise = sampling_inputs.starting_noise(seeds, (self.side, self.side))
        return objective.draw(params, noise, labels, table, conditions=(codes,))


def check_indices(tokenizer: Tokenizer, indices: np.ndarray) -> None:
    """Raises UserError unless indices are int [B, tokens] of the codebook."""
    indices = np.asarray(indices)
    if indices.ndim != 2 or indices.shape[1] != tokenizer.tokens or indices.dtype.kind not in "iu":
        raise UserError(f"the indices are {indices.dtype} {indices.shape}; expected whole numbers "
                        f"[pictures, {tokenizer.tokens}]")
    if indices.size and not (0 <= indices.min() and indices.max() < tokenizer.codebook_size):
        raise UserError(f"an index is outside 0 to {tokenizer.codebook_size - 1}, the codebook of "
                        "this checkpoint")
