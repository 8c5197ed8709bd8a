"""One network's weights from a checkpoint into a network that may know more or fewer parameters."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pid_jax.errors import UserError
from pid_jax.training import checkpoint
from pid_jax.training.state import Params

logger = logging.getLogger(__name__)


def read_weights(folder: Path, name: str, abstract: Params, source: str,
                 fresh: Sequence[str] = (), unused: Sequence[str] = (),
                 sources: Callable[[Params], Mapping[str, str]] | None = None
                 ) -> tuple[Params, list[str]]:
    """Reads the item `name` of one step's folder.

    Args:
      abstract: shapes, dtypes and shardings of what is wanted.
      source: who asks for it, such as "config.init_from", for messages.
      fresh: path patterns of parameters that the checkpoint may lack.
      unused: path patterns of parameters that the checkpoint may hold beyond what is wanted; they
        are left out.
      sources: from the checkpoint's shapes, path of our parameter -> its path there; what it does
        not name is left out. None: the same paths.
    Returns:
      The weights, and the paths that the checkpoint lacks.
    Raises:
      UserError: any other difference; the first ones are named.
    """
    theirs = checkpoint.flat(checkpoint.saved_shapes(folder, name))
    names = dict(sources(checkpoint.nested(theirs))) if sources else {path: path for path in theirs}
    saved = checkpoint.nested({ours: theirs[path] for ours, path in names.items()})
    missing, extra, changed = checkpoint.tree_differences(saved, abstract)
    lacking, left_out = matching(missing, fresh), matching(extra, unused)
    refused = [path for path in missing if path not in lacking]
    extra = [path for path in extra if path not in left_out]
    if refused or extra or changed:
        raise UserError(f"{source} {folder} holds another model ({name}): "
                        f"{checkpoint.describe_differences(refused, extra, changed)}")
    ours = checkpoint.flat(without(abstract, lacking))
    wanted = {names[path]: leaf for path, leaf in ours.items()}
    if skipped := sorted(theirs.keys() - wanted.keys()):
        logger.info("%s: %d parameters are not used: %s", source, len(skipped), skipped)
    places = checkpoint.flat(checkpoint.placed(
        checkpoint.nested({path: theirs[path] for path in skipped}), None))
    found = checkpoint.flat(checkpoint.restore_tree(
        folder, name, checkpoint.nested(wanted | places)))
    return checkpoint.nested({path: found[names[path]] for path in ours}), lacking


def matching(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The paths that any of the patterns is found in."""
    return [path for path in paths if any(re.search(pattern, path) for pattern in patterns)]


def without(tree: Params, paths: Sequence[str]) -> Params:
    """The tree without some leaves."""
    return checkpoint.nested({path: leaf for path, leaf in checkpoint.flat(tree).items()
                              if path not in paths})
