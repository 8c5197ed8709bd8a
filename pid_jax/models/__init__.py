"""Networks: arrays in, arrays out. `build_model` makes one from its name and options."""

import difflib
from typing import Any

import flax.linen as nn
import jax

from pid_jax.errors import UserError
from pid_jax.models.class_conditional import ClassPixelDiT
from pid_jax.models.discriminator import Discriminator
from pid_jax.models.ditok import DiTok
from pid_jax.models.jit import JiT
from pid_jax.models.pid import PidNet
from pid_jax.models.pixeldit import PixelDiT
from pid_jax.models.titok import TiTok

MODELS: dict[str, type[nn.Module]] = {
    "pixeldit_t2i": PixelDiT, "pixeldit_c2i": ClassPixelDiT, "pidnet": PidNet,
    "discriminator": Discriminator, "titok": TiTok, "jit": JiT, "ditok": DiTok}


def build_model(name: str, **options: Any) -> nn.Module:
    """The network `name` with `options`, its class's attributes.

    Raises UserError for an unknown name or option (with the nearest known one) and for options
    that no network can have.
    """
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}{_nearest(name, MODELS)}; "
                        f"known models: {', '.join(MODELS)}")
    known = option_names(name)
    for option in options:
        if option not in known:
            raise UserError(f"model {name} has no option {option!r}{_nearest(option, known)}; "
                            f"its options: {', '.join(known)}")
    return MODELS[name](**options)


def option_names(name: str) -> list[str]:
    """The options that model `name` takes."""
    fields = MODELS[name].__dataclass_fields__
    return [field for field in fields if field not in ("parent", "name")]


def init_parameters(model: nn.Module, key: jax.Array) -> dict:
    """Fresh parameters, a plain nested dict; works under jit and eval_shape, runs no forward."""
    return model.init(key, method="all_parameters")["params"]


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
