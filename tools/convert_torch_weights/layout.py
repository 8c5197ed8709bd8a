"""Which tensors of a file are which weights: wrappers around names, averages, other networks.

Any nesting of the known wrappers is peeled off every name; what they said decides the part that
the tensor belongs to. `{"model": {"module.net_ema.x": ...}}` is `x` of the part `ema`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pid_jax.errors import UserError
from tools.convert_torch_weights.readers import LazyTensor, Source

NET, EMA, PROJECTOR, OTHER = "net", "ema", "projector", "other"

# Words that may stand before a parameter's name, and the part they speak of (None: no change).
WRAPPERS = {
    "state_dict": None, "model": None, "module": None, "net": None, "core": None,
    "denoiser": None,
    "net_ema": EMA, "ema_denoiser": EMA,
    "model_ema1": EMA, "ema_state_dict1": EMA, "model_ema2": "ema2", "ema_state_dict2": "ema2",
    "fake_score": "fake_score", "discriminator": "discriminator",
    "_repa_projector": PROJECTOR, "repa_mlp": PROJECTOR, "diffusion_trainer": PROJECTOR,
    "optimizer": OTHER, "optimizers": OTHER, "optim": OTHER, "optimizer_states": OTHER,
    "scheduler": OTHER, "lr_schedulers": OTHER, "rng_state": OTHER,
}
# Words that wrapping libraries put anywhere into a name.
INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parts of a source.

    Attributes:
      path: the source, for messages.
      parts: part ("net", "ema", "fake_score", "discriminator", "projector", "other") -> parameter
        name without wrappers -> tensor.
      prefixes: what was peeled off ("module.net.") -> number of tensors.
    """

    path: Path
    parts: Mapping[str, Mapping[str, LazyTensor]]
    prefixes: Mapping[str, int]

    def choose(self, which: str | None) -> tuple[str, Mapping[str, LazyTensor]]:
        """The part to use: `which` ("ema", "net", ...), by default the average if there is one.

        Returns:
          Its name and its tensors.
        Raises:
          UserError: the source has no such part, or no network at all.
        """
        name = which or next((part for part in (EMA, NET) if part in self.parts), None)
        if name not in self.parts:
            held = ", ".join(f"{part} ({counted(len(t))})" for part, t in self.parts.items())
            raise UserError(f"{self.path} holds no {name or 'network'} weights; it holds "
                            f"{held or 'no tensors'}")
        return name, self.parts[name]


def read_layout(source: Source) -> Layout:
    """Sorts the tensors of a source into parts.

    Raises:
      UserError: two tensors of one part have the same name once the wrappers are gone.
    """
    parts: dict[str, dict[str, LazyTensor]] = {}
    prefixes = Counter()
    for full_name, tensor in source.tensors.items():
        part, prefix, name = split_name(full_name)
        known = parts.setdefault(part, {})
        if name in known:
            raise UserError(f"{source.path} holds {known[name].name!r} and {full_name!r}, both "
                            f"{name!r} of the part {part}; remove one of them")
        known[name] = tensor
        prefixes[prefix] += 1
    return Layout(source.path, parts, prefixes)


def split_name(full_name: str) -> tuple[str, str, str]:
    """`module.net_ema._orig_mod.a.weight` -> ("ema", "module.net_ema._orig_mod.", "a.weight")."""
    words, part = full_name.split("."), NET
    start = _wrapped(words)
    for word in words[:start]:
        part = WRAPPERS.get(word) or part
    prefix = "".join(f"{word}." for word in words[:start])
    return part, prefix, ".".join(word for word in words[start:] if word not in INSERTED)


def _wrapped(words: list[str]) -> int:
    """How many leading words are wrappers; at least the last word is the name."""
    for count, word in enumerate(words[:-1]):
        if word not in WRAPPERS and word not in INSERTED:
            return count
    return len(words) - 1


def counted(count: int, noun: str = "tensor") -> str:
    """"1 tensor", "2 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
