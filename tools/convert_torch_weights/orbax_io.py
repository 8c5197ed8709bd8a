"""Orbax folders written and read one parameter at a time, so that no whole copy is in memory."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from pid_jax.errors import UserError, one_line
from tools.convert_torch_weights.mappings.engine import flatten, unflatten
from tools.convert_torch_weights.readers import LazyTensor

# Chunks of a stored array: a device of a mesh reads the ones that its shard needs.
CHUNK_BYTES = 64 << 20


# Small parameters are written together, up to this much at a time.
BATCH_BYTES = 64 << 20


class _LazyHandler(type_handlers.NumpyHandler):
    """Makes the next batch of leaves while one is written; they are stored as plain arrays."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        writing: list = []
        for batch in _batches(list(zip(values, infos, args, strict=True))):
            making = asyncio.to_thread(lambda batch=batch: [value.read() for value, _, _ in batch])
            made = (await _all(making, *writing))[0]
            futures = await super().serialize(made, [info for _, info, _ in batch],
                                              [arg for _, _, arg in batch])
            writing = [asyncio.to_thread(future.result) for future in futures]
            del made
        await _all(*writing)
        return []


async def _all(*waiting: Awaitable) -> list:
    """The results when everything has ended, so that no thread writes on after a failure."""
    results = await asyncio.gather(*waiting, return_exceptions=True)
    for failure in results:
        if isinstance(failure, BaseException):
            raise failure
    return results


def _batches(items: list[tuple]) -> Iterator[list[tuple]]:
    batch, size = [], 0
    for item in items:
        if batch and size + item[0].nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item[0].nbytes
    yield batch


def write_step(folder: Path, items: Mapping[str, Mapping[str, LazyTensor]],
               texts: Mapping[str, dict]) -> None:
    """Writes one checkpoint step.

    Args:
      folder: the step's folder, which must not exist.
      items: name of an item -> parameter path ("patch_blocks/attn/qkv_x/kernel") -> leaf.
      texts: further items, as JSON.
    """
    trees = {item: unflatten(leaves) for item, leaves in items.items()}
    registry = type_handlers.create_type_handler_registry(
        (LazyTensor, _LazyHandler()), (jax.Array, type_handlers.ArrayHandler()))
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    handlers = {**dict.fromkeys(items, arrays),
                **{name: ocp.JsonCheckpointHandler() for name in texts}}
    with (_writers_ended(),
          ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer):
        checkpointer.save(folder.absolute(), args=ocp.args.Composite(
            **{item: ocp.args.PyTreeSave(tree, save_args=_in_chunks(tree))
               for item, tree in trees.items()},
            **{name: ocp.args.JsonSave(text) for name, text in texts.items()}))


@contextlib.contextmanager
def _writers_ended(patience: float = 60.0) -> Iterator[None]:
    """Waits, after a failure, for the threads in which Orbax still writes the other items, and for
    those that they start."""
    before = set(threading.enumerate())
    try:
        yield
    except BaseException:
        end = time.monotonic() + patience
        while (writers := set(threading.enumerate()) - before) and time.monotonic() < end:
            for thread in writers:
                thread.join(max(0.0, end - time.monotonic()))
        raise


def _in_chunks(tree: dict) -> dict:
    return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)


def stored_leaves(item_folder: Path) -> dict[str, LazyTensor]:
    """Parameter path -> leaf of an item such as `checkpoints/0/params`; numbers stay on disk.

    Raises UserError when the item is damaged, now or when a leaf is read.
    """
    item_folder = item_folder.absolute()
    with _damage(item_folder):
        tree = ocp.StandardCheckpointHandler().metadata(item_folder).tree
    handler = ocp.PyTreeCheckpointHandler()
    return {path: LazyTensor(path, np.dtype(leaf.dtype), tuple(leaf.shape),
                             lambda path=path: _restore(handler, item_folder, path))
            for path, leaf in flatten(tree)}


def _restore(handler: ocp.PyTreeCheckpointHandler, folder: Path, path: str) -> np.ndarray:
    wanted: dict[str, Any] = unflatten({path: 0})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    with _damage(folder):
        restored = handler.restore(folder, args=ocp.args.PyTreeRestore(
            item=wanted, restore_args=as_numpy, partial_restore=True))
    return dict(flatten(restored))[path]


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """What Orbax raises about missing or altered files, as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = one_line(error, 200)
        raise UserError(f"the checkpoint {folder} is damaged: {reason}; make it again or take "
                        "another") from error
