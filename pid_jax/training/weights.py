"""One network's weights from a checkpoint into a network that may know more or fewer parameters."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from pid_jax.errors import UserError
from pid_jax.training import checkpoint
from pid_jax.training.state import Params

logger = logging.getLogger(__name__)


def read_weights(folder: Path, name: str, abstract: Params, source: str,
                 fresh: Sequence[str] = (), unused: Sequence[str] = ()
                 ) -> tuple[Params, list[str]]:
    """Reads the item `name` of one step's folder.

    Args:
      abstract: shapes, dtypes and shardings of what is wanted.
      source: who asks for it, such as "config.init_from", for messages.
      fresh: path patterns of parameters that the checkpoint may lack.
      unused: path patterns of parameters that the checkpoint may hold beyond what is wanted; they
        are left out.
    Returns:
      The weights, and the paths that the checkpoint lacks.
    Raises:
      UserError: any other difference; the first ones are named.
    """
    saved = checkpoint.saved_shapes(folder, name)
    missing, extra, changed = checkpoint.tree_differences(saved, abstract)
    lacking, left_out = matching(missing, fresh), matching(extra, unused)
    refused = [path for path in missing if path not in lacking]
    extra = [path for path in extra if path not in left_out]
    if refused or extra or changed:
        raise UserError(f"{source} {folder} holds another model ({name}): "
                        f"{checkpoint.describe_differences(refused, extra, changed)}")
    if left_out:
        logger.info("%s: %d parameters are not used: %s", source, len(left_out), left_out)
    places = checkpoint.flat(checkpoint.placed(
        checkpoint.nested({path: checkpoint.flat(saved)[path] for path in left_out}), None))
    wanted = checkpoint.nested(checkpoint.flat(without(abstract, lacking)) | places)
    return without(checkpoint.restore_tree(folder, name, wanted), left_out), lacking


def matching(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The paths that any of the patterns is found in."""
    return [path for path in paths if any(re.search(pattern, path) for pattern in patterns)]


def without(tree: Params, paths: Sequence[str]) -> Params:
    """The tree without some leaves."""
    return checkpoint.nested({path: leaf for path, leaf in checkpoint.flat(tree).items()
                              if path not in paths})
