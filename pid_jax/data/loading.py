"""From a slot of the plan to a sample: read, decode, resize, crop, choose the caption.

Every draw is a function of (seed, epoch, record, turn), and so is the replacement of a record that
cannot be read; nothing here depends on threads, workers or processes.
"""

import dataclasses
import itertools

import numpy as np
from PIL import Image

from pid_jax import images
from pid_jax.data import captions, geometry, randomness
from pid_jax.data.buckets import Bucket
from pid_jax.data.dataset import Dataset
from pid_jax.data.plan import Plan, Slot
from pid_jax.data.randomness import Purpose
from pid_jax.data.records import CorruptRecord, Record
from pid_jax.data.sources import Mixture, Source, source_table
from pid_jax.data.stored_latents import StoredLatents
from pid_jax.errors import UserError

CROPS = ("center", "random")
RESIZES = ("fit", "native", "random", "adm")
DECODES = ("exact", "draft")
REPLACEMENTS = 16
COLOUR_ORDERS = tuple(map(list, itertools.permutations(range(3))))


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """How a record becomes a sample.

    Attributes:
      crop: "center" or "random".
      resize: "fit" shrinks the picture until it just covers the bucket, "native" never shrinks,
        "random" draws a size between the two, even in log scale; "adm" takes the square centre
        as JiT and TiTok do (`geometry.adm_crop`).
      decode: "exact", or "draft": a JPEG that is reduced to a half or less is decoded at a half, a
        quarter or an eighth, which is faster and a little different from Lanczos.
      flip: mirrors half of the samples (captions that say left or right become wrong).
      permute_colours: puts red, green and blue in a random order (captions that name a colour
        become wrong); makes few photographs stand for more colours.
      caption_fields: names of captions to choose among, uniformly over the non-empty ones.
      caption_dropout: chance that the caption becomes "".
      min_scale: see `geometry.cover`.
      strict: an unreadable record is an error instead of being replaced.
    """

    crop: str = "center"
    resize: str = "fit"
    decode: str = "exact"
    flip: bool = False
    permute_colours: bool = False
    caption_fields: tuple[str, ...] = captions.PROMPT_FIELDS
    caption_dropout: float = 0.0
    min_scale: float = 1.0
    strict: bool = False

    def __post_init__(self):
        for name, choices in (("crop", CROPS), ("resize", RESIZES), ("decode", DECODES)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} is {getattr(self, name)!r}; choose one of "
                                f"{', '.join(choices)}")
        if self.resize == "adm" and self.crop != "center":
            raise UserError(f"crop is {self.crop!r} with resize 'adm', which takes the centre; set "
                            "it to 'center'")
        if not 0 <= self.caption_dropout <= 1:
            raise UserError(f"caption_dropout is {self.caption_dropout}; expected 0 to 1")


class Draws:
    """Uniform numbers in [0, 1) of one sample, by purpose."""

    def __init__(self, seed: int, slot: Slot):
        self._words = (seed, slot.epoch, slot.record, slot.turn)

    def __call__(self, purpose: Purpose) -> float:
        return float(randomness.uniform(purpose, *self._words)[0])


class SampleLoader:
    """Turns a slot into a sample dict, replacing records that cannot be read."""

    def __init__(self, dataset: Dataset | Mixture, plan: Plan, augmentation: Augmentation,
                 latents: StoredLatents | None = None):
        self._dataset, self._plan, self._augmentation = dataset, plan, augmentation
        self._latents = latents
        self._sources = {source.name: source for source in source_table(dataset)}

    def __call__(self, slot: Slot) -> dict:
        """The sample of a slot.

        Returns: pixels uint8 [H, W, 3], caption, key, source, width and height (native), record
          (its number), sigma_range (of its source, or None), with stored latents latent float32
          [h, w, C], skipped: (key, reason) of every unreadable record met on the way.
        Raises: UserError for an unreadable record under `strict`, or 16 of them in a row.
        """
        skipped = []
        for attempt in range(REPLACEMENTS + 1):
            try:
                return self.load(self._replacement(slot, attempt)) | {"skipped": skipped}
            except UserError as error:
                if self._augmentation.strict:
                    raise
                skipped.append(_failure(self._dataset, self._replacement(slot, attempt), error))
        raise UserError(f"{REPLACEMENTS + 1} records in a row cannot be read, the last because "
                        f"{skipped[-1][1]}; check the data set with `python -m "
                        f"pid_jax.data.inspect {self._dataset.folder} --verify`")

    def _replacement(self, slot: Slot, attempt: int) -> Slot:
        """The slot itself, or a record drawn from the same bucket."""
        if not attempt:
            return slot
        members = self._plan.members[self._plan.buckets.index(slot.bucket)]
        draw = randomness.hashed(Purpose.REPLACEMENT, self._plan.seed, slot.epoch, slot.record,
                                 slot.turn, attempt)[0]
        return dataclasses.replace(slot, record=int(members[int(draw) % len(members)]))

    def load(self, slot: Slot) -> dict:
        """The sample of a slot, but `skipped`. Raises UserError when it cannot be read."""
        record = self._dataset[slot.record]
        draws = Draws(self._plan.seed, slot)
        pixels = np.asarray(show(record, slot.bucket, self._augmentation, draws))
        if self._augmentation.permute_colours:
            pixels = pixels[..., COLOUR_ORDERS[int(6 * draws(Purpose.COLOURS))]]
        source = self._sources.get(record.source)
        caption = pick_caption(record, _with_fields(self._augmentation, source), draws)
        sample = {"pixels": pixels, "caption": caption, "key": record.key,
                  "source": record.source, "width": record.width, "height": record.height,
                  "record": slot.record, "sigma_range": source and source.sigma_range}
        if self._latents is not None:
            sample["latent"] = self._latents.of_record(slot.record)
        return sample


def _with_fields(augmentation: Augmentation, source: Source | None) -> Augmentation:
    if source is None or source.caption_fields is None:
        return augmentation
    return dataclasses.replace(augmentation, caption_fields=source.caption_fields)


def decode_record(record: Record) -> Image.Image:
    """The record's picture as RGB. Raises UserError, also for another size than recorded."""
    picture = images.decode(record.image)
    _check_size(record, picture.size)
    return picture


def _check_size(record: Record, found: geometry.Size) -> None:
    if found != (record.width, record.height):
        raise CorruptRecord(f"the picture is {found[0]} x {found[1]}, its record says "
                            f"{record.width} x {record.height}")


def show(record: Record, bucket: Bucket, augmentation: Augmentation, draws: Draws) -> Image.Image:
    """The decoded, resized, cropped and perhaps mirrored picture, of the bucket's size.

    Raises: UserError as of `decode_record`.
    """
    if augmentation.resize == "adm":
        cropped = geometry.adm_crop(decode_record(record), bucket.size[0])
    else:
        native = record.width, record.height
        placement = _placement(native, bucket.size, augmentation, draws)
        cropped = placement.apply(_decoded_for(record, placement, augmentation))
    if augmentation.flip and draws(Purpose.FLIP) < 0.5:
        return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return cropped


def _decoded_for(record: Record, placement: geometry.Placement, augmentation: Augmentation
                 ) -> Image.Image:
    """The picture, in "draft" perhaps smaller, but not than the resized one."""
    if augmentation.decode == "exact":
        return decode_record(record)
    _check_size(record, images.probe(record.image))
    return images.decode(record.image, at_least=placement.resized)


def _placement(native: geometry.Size, target: geometry.Size, augmentation: Augmentation,
               draws: Draws) -> geometry.Placement:
    covering = geometry.cover(native, target, augmentation.min_scale)
    resized = covering.resized
    if augmentation.resize != "fit":
        fraction = 1.0 if augmentation.resize == "native" else draws(Purpose.SCALE)
        resized = geometry.between(native, target, fraction)
    if augmentation.crop == "center":
        return geometry.centred(native, resized, target)
    corner = draws(Purpose.CROP_X), draws(Purpose.CROP_Y)
    return geometry.at_fraction(native, resized, target, corner)


def pick_caption(record: Record, augmentation: Augmentation, draws: Draws) -> str:
    """One of the record's non-empty captions, or ""."""
    offered = [t for f in augmentation.caption_fields if (t := record.captions.get(f))]
    if not offered:
        return ""
    chosen = captions.choose(offered, draws(Purpose.CAPTION))
    return captions.drop(chosen, draws(Purpose.CAPTION_DROPOUT), augmentation.caption_dropout)


def _failure(dataset: Dataset | Mixture, slot: Slot, error: UserError) -> tuple[str, str]:
    return dataset.index.key[slot.record], str(error)
