"""Features of picture sets, and the statistics of a reference set, computed or read.

A reference is an `.npz` file: ADM's (`mu`, `sigma`, `mu_s`, `sigma_s`, perhaps pictures `arr_0`),
one written by `Reference.save`, or pictures alone; or a packed data set.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pid_jax import images
from pid_jax.data.dataset import Dataset
from pid_jax.diffusion import resampling
from pid_jax.errors import UserError
from pid_jax.evaluation import inception
from pid_jax.evaluation.frechet import Gaussian, fit
from pid_jax.files import atomic_write
from pid_jax.tensor_files import read_npz

PIXEL_SIDE = 16
BATCH = 32
KINDS = {"pooled": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s"), "pixels": ("mu_p", "sigma_p")}
"""Feature -> names of its mean and covariance in a file; the first two are ADM's."""

Extract = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def pixel_features(pictures: np.ndarray) -> np.ndarray:
    """Raw pixels in [0, 1] of uint8 [B, H, W, 3], by area at most 16 x 16: float32 [B, D]."""
    small = jnp.asarray(pictures, jnp.float32) / 255
    height, width = (min(side, PIXEL_SIDE) for side in pictures.shape[1:3])
    small = resampling.resize(small, height, width, resampling.adaptive_mean_matrix)
    return np.asarray(small.reshape(len(pictures), -1))


def make_extractor(weights: inception.InceptionParams | None) -> Extract:
    """Features by kind of uint8 [B, H, W, 3]: pixels, and with weights those of Inception.

    Pictures go through the network in batches of one size, so that it compiles once.
    """
    forward = jax.jit(inception.inception)

    def extract(pictures: np.ndarray) -> dict[str, np.ndarray]:
        found = {"pixels": pixel_features(pictures)}
        if weights is None:
            return found
        parts, size = [], min(BATCH, len(pictures))
        for start in range(0, len(pictures), size):
            batch = pictures[start:start + size]
            padded = np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])
            parts.append(jax.tree.map(lambda leaf: leaf[:len(batch)],
                                      jax.device_get(forward(weights, padded))))
        whole = {name: np.concatenate([getattr(part, name) for part in parts])
                 for name in ("pooled", "spatial", "logits_unbiased")}
        return found | whole

    return extract


@dataclasses.dataclass(frozen=True)
class Reference:
    """What drawn pictures are compared with.

    Attributes:
      gaussians: by kind of feature.
      pooled: features [N, 2048] of the pictures, for precision and recall; None: not known.
      pictures: how many; None: not known.
    """

    gaussians: Mapping[str, Gaussian]
    pooled: np.ndarray | None = None
    pictures: int | None = None

    def save(self, path: Path) -> None:
        """Writes an `.npz` that `read_reference` reads; ADM's programs read its statistics."""
        arrays = {name: value for kind, gaussian in self.gaussians.items()
                  for name, value in zip(KINDS[kind], gaussian)}
        if self.pooled is not None:
            arrays["pooled"] = self.pooled
        if self.pictures is not None:
            arrays["pictures"] = np.asarray(self.pictures)
        with atomic_write(path, "wb") as file:
            np.savez(file, **arrays)


def reference_of(pictures: np.ndarray, extract: Extract) -> Reference:
    """The reference that uint8 pictures [N, H, W, 3] make."""
    features = extract(pictures)
    gaussians = {kind: fit(features[kind]) for kind in KINDS if kind in features}
    return Reference(gaussians, features.get("pooled"), len(pictures))


def read_reference(path: Path, extract: Extract, size: int | None = None) -> Reference:
    """A reference from a file or a packed data set.

    Args:
      extract: used where there are pictures.
      size: side that pictures of a data set must have (centre crop elsewhere); None: any one.
    Raises:
      UserError: nothing readable there.
    """
    if path.is_dir():
        return reference_of(dataset_pictures(path, size), extract)
    arrays = read_arrays(path)
    if "arr_0" in arrays and not set(KINDS["pooled"]) <= arrays.keys():
        return reference_of(check_pictures(arrays["arr_0"], path), extract)
    gaussians = {kind: _gaussian(arrays, names, path) for kind, names in KINDS.items()
                 if set(names) <= arrays.keys()}
    if not gaussians:
        raise UserError(f"{path} holds neither pictures (arr_0) nor statistics (mu, sigma); it "
                        f"holds {', '.join(arrays) or 'nothing'}")
    pooled, count = arrays.get("pooled"), arrays.get("pictures")
    if pooled is None and "arr_0" in arrays:
        features = extract(check_pictures(arrays["arr_0"], path))
        pooled, count = features.get("pooled"), len(arrays["arr_0"])
        gaussians.setdefault("pixels", fit(features["pixels"]))
    return Reference(gaussians, pooled, None if count is None else int(count))


def _gaussian(arrays: Mapping[str, np.ndarray], names: tuple[str, str], path: Path) -> Gaussian:
    for name in names:
        if arrays[name].dtype.kind not in "fiu" or not np.isfinite(arrays[name]).all():
            raise UserError(f"{path}: {name} ({arrays[name].dtype}) is not all finite numbers")
    mean, covariance = (arrays[name].astype(np.float64) for name in names)
    if mean.ndim != 1 or covariance.shape != (mean.size, mean.size):
        raise UserError(f"{path}: {names[0]} has shape {mean.shape} and {names[1]} "
                        f"{covariance.shape}; expected [D] and [D, D]")
    if mean.size and np.diag(covariance).min() < 0:
        raise UserError(f"{path}: {names[1]} is no covariance, its diagonal holds numbers below 0")
    return Gaussian(mean, covariance)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; UserError when it cannot be read."""
    try:
        return read_npz(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as .npz: {error}") from error


def check_pictures(pictures: np.ndarray, path: Path) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3], at least one; UserError for anything else."""
    shape = pictures.shape
    if pictures.dtype != np.uint8 or pictures.ndim != 4 or shape[-1] != 3 or 0 in shape:
        raise UserError(f"{path}: arr_0 is {pictures.dtype} of shape {shape}; expected uint8 [N, "
                        "height, width, 3] with at least one picture")
    return pictures


def dataset_pictures(path: Path, size: int | None = None) -> np.ndarray:
    """All pictures of a packed data set, uint8 [N, H, W, 3]; they must have one size."""
    dataset = Dataset(path)
    sizes = set(zip(dataset.index.height.tolist(), dataset.index.width.tolist()))
    wanted = (size, size) if size else next(iter(sizes))
    if sizes != {wanted}:
        raise UserError(f"the pictures of {path} are {', '.join(f'{w}x{h}' for h, w in sizes)}; "
                        f"expected all {wanted[1]}x{wanted[0]}: pack them with --center-crop")
    return np.stack([np.asarray(images.decode(dataset[i].image)) for i in range(len(dataset))])
