"""Texts that the reference trains and samples with, and our own fixed prompts."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "prompts"

NEGATIVE = (
    "low quality, worst quality, over-saturated, three legs, six fingers, cartoon, anime, cgi, "
    "low res, blurry, deformed, distortion, duplicated limbs, plastic skin, jpeg artifacts, "
    "watermark")
"""The unconditional side of guidance at inference."""

INSTRUCTION = (
    'Given a user prompt, generate an "Enhanced prompt" that provides detailed visual descriptions '
    "suitable for image generation. Evaluate the level of detail in the user prompt:",
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, "
    "and spatial relationships to create vivid and concrete scenes.",
    "- If the prompt is already detailed, refine and enhance the existing details slightly without "
    "overcomplicating.",
    "Here are examples of how to transform or refine prompts:",
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round "
    "shape, sleeping peacefully on a warm sunny windowsill, surrounded by pots of blooming red "
    "flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, "
    "featuring glowing street lamps, a diverse crowd of people in colorful clothing, and a "
    "double-decker bus passing by towering glass skyscrapers.",
    "Please generate only the enhanced description for the prompt below and avoid including any "
    "additional commentary or evaluations:",
    "User Prompt: ",
)
"""Lines that stand before every caption of the Gemma text encoder."""


def read(name: str) -> tuple[str, ...]:
    """The prompts of `configs/prompts/<name>.txt`: a line each, `#` starts a comment line."""
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def fixed() -> tuple[str, ...]:
    """The prompts of a full-size run's samples: everyday scenes and hard cases in turn."""
    return tuple(prompt for pair in zip(read("everyday"), read("text")) for prompt in pair)
