"""Texts that the reference trains and samples with, and our own fixed prompts."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "prompts"

NEGATIVE = (
    "low quality, worst quality, over-saturated, three legs, six fingers, cartoon, anime, cgi, "
    "low res, blurry, deformed, distortion, duplicated limbs, plastic skin, jpeg artifacts, "
    "watermark")
"""The unconditional side of guidance at inference."""


def read(name: str) -> tuple[str, ...]:
    """The prompts of `configs/prompts/<name>.txt`: a line each, `#` starts a comment line."""
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def fixed() -> tuple[str, ...]:
    """The prompts of a full-size run's samples: everyday scenes and hard cases in turn."""
    return tuple(prompt for pair in zip(read("everyday"), read("text")) for prompt in pair)
