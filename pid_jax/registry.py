"""Building things by name from a table, with errors that a person can act on."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pid_jax.errors import UserError

T = TypeVar("T")


def build(kind: str, factories: Mapping[str, Callable[..., T]], name: str,
          options: Mapping[str, Any]) -> T:
    """Calls `factories[name](**options)`.

    Args:
      kind: what is being built, for messages ("codec").
      factories: name -> callable (a class, dataclass or function) taking keyword arguments.
      name: which one.
      options: its keyword arguments; each must be a parameter of the callable.
    Raises:
      UserError: unknown name, unknown option or missing option, with the nearest known name.
    """
    if name not in factories:
        raise unknown(kind, name, factories)
    parameters = inspect.signature(factories[name]).parameters
    for option in options:
        if option not in parameters:
            raise unknown(f"option of {kind} {name!r}", option, parameters)
    missing = [p.name for p in parameters.values()
               if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"{kind} {name!r} needs {', '.join(missing)}: add to its options")
    return factories[name](**options)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a `name` that is none of `known`; names the nearest one and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listing = f"; known: {', '.join(known)}" if known else "; it takes none"
    return UserError(f"unknown {kind}: {name!r}{hint}{listing}")
