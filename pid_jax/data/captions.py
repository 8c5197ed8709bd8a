"""Which of a picture's captions is shown, and when none is.

The rules are the reference's `CaptionExtractor` (spec: golden I02) and its caption dropout. Draws
come from outside as numbers in [0, 1), so that the choice is a pure function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_FIELDS = ("prompt", "prompt_medium", "prompt_short")
SAMPLE_KEYS = ("caption", "captions_qwen2p5_7b_v4")
WRAPPERS = ("caption", "captions")


def extract_captions(sample: Mapping[str, Any]) -> tuple[str, ...]:
    """The captions that a raw sample offers; each is chosen equally often.

    Exactly one of `caption` and `captions_qwen2p5_7b_v4` must be present: a string is taken as it
    is, even empty; a dict offers its non-empty prompt fields, and dicts inside `caption` or
    `captions` are unwrapped.
    Returns: empty when the sample must be dropped.
    """
    present = [key for key in SAMPLE_KEYS if key in sample]
    if len(present) != 1:
        return ()
    value = sample[present[0]]
    if isinstance(value, str):
        return (value,)
    return tuple(named_captions(value).values())


def named_captions(value: Any, fields: Sequence[str] = PROMPT_FIELDS) -> dict[str, str]:
    """The non-empty strings among `fields` of a caption dict, unwrapped; {} for anything else."""
    while isinstance(value, Mapping):
        inner = next((value[k] for k in WRAPPERS if isinstance(value.get(k), Mapping)), None)
        if inner is None:
            return {f: value[f] for f in fields if isinstance(value.get(f), str) and value[f]}
        value = inner
    return {}


def choose(captions: Sequence[str], draw: float) -> str:
    """One of `captions`, uniformly for a uniform `draw` in [0, 1)."""
    return captions[int(draw * len(captions))]


def drop(caption: str, draw: float, probability: float) -> str:
    """"" with the given probability (when `draw` in [0, 1) falls below it), else the caption."""
    return "" if draw < probability else caption
