"""The orders of axes in which programs save latents, brought to [B, h, w, C]."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pid_jax.encoders import CHANNELS, pipeline_latents
from pid_jax.errors import UserError

LAYOUTS = ("auto", "channels_last", "channels_first", "packed", "raw")
RAW = {"flux2": 32}  # latent family -> channels before its cells are folded and normalised

Statistics = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Gives the running mean and variance [C] by which a raw latent is normalised."""


def bring(latents: np.ndarray, channels: int, family: str, layout: str, path: Path,
          picture: tuple[int, int] | None = None, statistics: Statistics | None = None
          ) -> np.ndarray:
    """Latents of any accepted layout as float32 [B, h, w, C].

    Args:
      channels, family: of the latents that the network reads.
      layout: "channels_last" ([B,] h, w, C); "channels_first" ([B,] C, h, w); "packed" ([B,] L, C',
        the tokens of flux, qwenimage and flux2 pipelines); "raw" (flux2 before its 2 x 2 cells are
        folded and normalised, 32 channels, either order); "auto": what fits, the last axis first.
      path: where they come from, for messages.
      picture: (height, width) in pixels that packed latents cover; default: square.
      statistics: needed for raw latents.
    Raises:
      UserError: an unknown layout, or latents that do not fit.
    """
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    if latents.dtype.kind not in "fiuV" or not latents.size or latents.ndim not in (2, 3, 4):
        raise _refusal(latents, channels, family, path)
    if layout == "packed" or layout == "auto" and _looks_packed(latents, channels, family):
        return _unpacked(latents, family, picture, path)
    if layout == "raw" or layout == "auto" and _looks_raw(latents, channels, family):
        return _folded(latents, channels, family, path, statistics)
    return _channels_last(latents, channels, family, layout, path)


def _channels_last(latents, channels, family, layout, path):
    if latents.ndim < 3:
        raise _refusal(latents, channels, family, path)
    batch = latents.reshape((-1,) + latents.shape[-3:])
    if layout != "channels_first" and batch.shape[-1] == channels:
        return batch.astype(np.float32)
    if layout != "channels_last" and batch.shape[1] == channels:
        return np.moveaxis(batch, 1, -1).astype(np.float32)
    raise _refusal(latents, channels, family, path)


def _looks_packed(latents: np.ndarray, channels: int, family: str) -> bool:
    """Two axes; or three whose last one is a token's, unless it may be a single latent's."""
    if family not in pipeline_latents.PACKED or latents.ndim > 3:
        return False
    token = channels * pipeline_latents.PACKED[family]**2
    if latents.shape[-1] != token or channels in latents.shape[:-2]:
        return False
    return latents.ndim == 2 or token != channels or latents.shape[0] == 1


def _unpacked(latents, family, picture, path):
    if latents.ndim == 4:
        raise UserError(f"{path} has shape {latents.shape}; packed latents are [batch, tokens, "
                        "channels], or without the batch")
    tokens = latents.reshape((-1,) + latents.shape[-2:]).astype(np.float32)
    if picture is None:
        side = round(tokens.shape[1] ** 0.5)
        if side**2 != tokens.shape[1]:
            raise UserError(f"{path} holds {tokens.shape[1]} packed tokens, which are no square; "
                            "say the size of the drawn picture with --size HEIGHTxWIDTH")
        picture = (side * pipeline_latents.TOKEN_PIXELS,) * 2
    return np.asarray(pipeline_latents.unpack(family, tokens, *picture))


def _looks_raw(latents: np.ndarray, channels: int, family: str) -> bool:
    if family not in RAW or latents.ndim < 3:
        return False
    ends = (latents.shape[-1], latents.shape[-3])
    return channels not in ends and RAW[family] in ends


def _folded(latents, channels, family, path, statistics):
    if family not in RAW or statistics is None:
        raise UserError(f"{path}: latents of {family!r} have no raw layout; only flux2's have")
    batch = _channels_last(latents, RAW[family], family, "auto", path)
    if batch.shape[1] % 2 or batch.shape[2] % 2:
        raise UserError(f"{path} holds raw {family} latents of {batch.shape[1]} x "
                        f"{batch.shape[2]} cells, which do not fold by 2 x 2")
    return np.asarray(pipeline_latents.fold_flux2(batch, *statistics()))


def _refusal(latents: np.ndarray, channels: int, family: str, path: Path) -> UserError:
    wanted = (f"this checkpoint reads {family!r} latents with {channels} channels: [batch, height, "
              f"width, {channels}] or [batch, {channels}, height, width], or without the batch")
    if latents.dtype.kind not in "fiuV" or not latents.size or latents.ndim not in (3, 4):
        return UserError(f"{path} holds {latents.dtype} of shape {latents.shape}; {wanted}")
    return UserError(f"{path} has shape {latents.shape}{_family_of(latents)}; {wanted}. Latents of "
                     "another family need a checkpoint of that family")


def _family_of(latents: np.ndarray) -> str:
    """Which latent family has so many channels, where one alone does."""
    found = {family: channels for family, channels in CHANNELS.items()
             if channels in (latents.shape[-3], latents.shape[-1])}
    if len(found) != 1:
        return ""
    (family, channels), = found.items()
    return f" (as {channels}-channel {family} latents have)"
