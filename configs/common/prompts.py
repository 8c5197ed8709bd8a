"""Texts that the reference trains and samples with."""

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

SCENES = (
    "a lighthouse on a cliff under heavy clouds, waves breaking below",
    "an old man mending a fishing net, hands in sharp focus",
    "a bowl of cherries on a blue checked tablecloth",
    "a tram crossing a wet square at night, reflections of street lamps",
)
"""Fixed prompts for the samples of full-size runs."""
