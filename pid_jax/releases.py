"""The released PiD decoders: which checkpoint belongs to which image generator.

    find("z-image", "2k").config      # "configs/pid_v1_flux_2k.py"

Facts: the PyTorch reference's registry (golden F00); licences and files are the reference's.
"""

import dataclasses
from collections.abc import Iterator

from pid_jax.errors import UserError
from pid_jax.registry import unknown

FILE = "model_ema_bf16.pth"
STEPS = 4
KINDS = {"2k": "2048 px", "2kto4k": "2048-4096 px", "2kto4k_v1pt5": "2048-4096 px, version 1.5"}
# Generators that share another one's latents.
ALIASES = {
    "zimage": "flux", "z-image": "flux", "zimage-turbo": "flux", "z-image-turbo": "flux",
    "flux2-klein": "flux2", "flux2-klein-4b": "flux2", "flux2-klein-9b": "flux2",
    "klein": "flux2", "qwenimage-2512": "qwenimage", "qwen-image": "qwenimage",
    "qwen-image-2512": "qwenimage", "2512": "qwenimage"}


@dataclasses.dataclass(frozen=True)
class Release:
    """One released checkpoint.

    Attributes:
      family: latent family; kind: "2k", "2kto4k" or "2kto4k_v1pt5".
      experiment: the reference's name, a folder under its `checkpoints/`.
      config: of this repository, for converting.
      scale: output pixels per pixel of the encoded picture.
    """

    family: str
    kind: str
    experiment: str
    config: str
    scale: int = 4

    @property
    def file(self) -> str:
        """Path of the weights under the reference's root."""
        return f"checkpoints/{self.experiment}/{FILE}"


def _release(family: str, kind: str) -> Release:
    scale = 8 if family == "siglip" else 4
    resolution = kind.removesuffix("_v1pt5")
    version, ours = ("PiD_v1pt5", "v1pt5") if kind.endswith("_v1pt5") else ("PiD", "v1")
    return Release(family, kind, f"{version}_res{resolution}_sr{scale}x_official_{family}_distill_"
                   f"{STEPS}step", f"configs/pid_{ours}_{family}_{resolution}.py", scale)


RELEASES = tuple(_release(family, kind) for kind, families in {
    "2k": ("flux", "flux2", "sd3", "dinov2", "siglip"), "2kto4k": ("sd3", "sdxl"),
    "2kto4k_v1pt5": ("flux", "flux2", "qwenimage")}.items() for family in families)
FAMILIES = tuple(dict.fromkeys(release.family for release in RELEASES))


def find(backbone: str, kind: str) -> Release:
    """The release for an image generator.

    Args:
      backbone: a latent family ("flux") or a generator that uses its latents ("z-image").
      kind: one of KINDS.
    Raises:
      UserError: an unknown name, or a pair that was not released.
    """
    name = backbone.lower().replace("_", "-")
    family = ALIASES.get(name, name)
    if family not in FAMILIES:
        raise unknown("backbone", backbone, (*FAMILIES, *ALIASES))
    if kind not in KINDS:
        raise unknown("checkpoint type", kind, KINDS)
    found = {release.kind: release for release in RELEASES if release.family == family}
    if kind not in found:
        raise UserError(f"no {kind} checkpoint was released for {backbone}; there is "
                        f"{', '.join(found)}")
    return found[kind]


def table() -> Iterator[str]:
    """The registry as lines for people."""
    row = "{:<10} {:<13} {:>5} {:>5}  {:<34} {}"
    yield row.format("backbone", "type", "scale", "steps", "config", "weights of the reference")
    for one in RELEASES:
        yield row.format(one.family, one.kind, one.scale, STEPS, one.config, one.file)
    yield ""
    for family in FAMILIES:
        if names := [name for name, target in ALIASES.items() if target == family]:
            yield f"as {family}: {', '.join(names)}"
    yield "convert: python -m tools.convert_torch_weights convert --config=CONFIG --src WEIGHTS ..."
