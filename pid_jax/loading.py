"""A checkpoint ready to draw with: its folder, its weights, and giving them back."""

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import compilation_cache, models, objectives
from pid_jax.config import check_config
from pid_jax.encoders.frozen import Frozen
from pid_jax.errors import UserError
from pid_jax.models import quantised
from pid_jax.models.lora import AdaptedNet
from pid_jax.objectives.base import Objective
from pid_jax.parallel.mesh import AXES, batch_sharding, make_mesh, single_device
from pid_jax.parallel.sharding import state_shardings
from pid_jax.sampling_inputs import rows_of
from pid_jax.trained_range import departure
from pid_jax.training import checkpoint as checkpoint_lib
from pid_jax.training.state import Params
from pid_jax.training.weights import read_weights

WEIGHTS = {"ema": "ema", "net": checkpoint_lib.PARAMS, "untrained": None}
STORED = "stored"
KEPT_AS = (STORED, *quantised.DTYPES)
COMMAND_OF = {"pid_teacher": "pid_jax.decode", "pid_student": "pid_jax.decode",
              "pixeldit_t2i": "pid_jax.generate --prompts",
              "pixeldit_c2i": "pid_jax.generate --classes",
              "jit_c2i": "pid_jax.generate --classes",
              "ditok_stage2": "pid_jax.tokens decode"}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A network ready to draw.

    Attributes:
      folder: the step's folder.
      which: "ema", "net" or "untrained".
      objective: the run's objective, with its config, network and encoders.
      params: the weights.
      mesh: where they lie and pictures are drawn.
      kept_as: "stored", or the kind of 8-bit kernels in the weights, see `models.quantised`.
      change: what those kernels save and change.
    """

    folder: Path
    which: str
    objective: Objective
    params: Params
    mesh: Mesh
    kept_as: str = STORED
    change: "Change | None" = None

    @property
    def config(self) -> ConfigDict:
        """The config that the run was started with."""
        return self.objective.config

    def note(self) -> dict[str, Any]:
        """What a picture's JSON says about where it comes from."""
        change = {} if self.change is None else {"weights_change": dataclasses.asdict(self.change)}
        return {"checkpoint": str(self.folder), "step": int(self.folder.name),
                "weights": self.which, "weights_kept_as": self.kept_as, **change,
                "config": self.config.to_dict()}


@dataclasses.dataclass(frozen=True)
class Change:
    """What keeping weights in 8 bits saves and changes.

    Attributes:
      kind: "int8" or "fp8"; kept, stored: bytes of all weights, after and before.
      mean, largest: difference of a small test picture to that of the stored weights, of 255.
    """

    kind: str
    kept: int
    stored: int
    mean: float
    largest: float

    def __str__(self) -> str:
        return (f"weights kept as {self.kind}: {self.kept / 1e9:.3f} GB, as stored "
                f"{self.stored / 1e9:.3f} GB; a test picture differs by {self.mean:.3f} of 255 in "
                f"the mean, by {self.largest:.1f} at most")


def load_checkpoint(path: str | Path, which: str,
                    wanted: type[Objective] | tuple[type[Objective], ...],
                    lora_scale: float | None = None, sequence: int = 1, data: int = 1,
                    pit_chunks: int | None = None) -> Checkpoint:
    """Loads what drawing needs; the optimizer is not read.

    Args:
      path: a workdir, its checkpoints folder (newest step) or one step's folder.
      which: "ema" (the average) or the name of another average, "net" (the last weights) or
        "untrained" (drawn as at step 0). A converted checkpoint has one set of weights, which
        serves as both.
      wanted: the objective that the checkpoint must be of.
      lora_scale: strength of the low-rank adapters, 0 for the network without them; default 1.
      sequence: devices over which the tokens of every picture, and the weights, are divided.
      data: devices of this process over which the pictures of a batch are divided.
      pit_chunks: parts into which the pixel blocks cut their tokens; default: the config's.
    Raises:
      UserError: no checkpoint there, one of another objective, or with weights of another network.
    """
    compilation_cache.enable()
    folder = checkpoint_lib.find_step_folder(path)
    check_which(folder, which)
    mesh = drawing_mesh(sequence, data)
    objective = for_drawing(open_objective(folder, wanted, mesh), pit_chunks)
    params = load_weights(folder, which, objective, mesh)
    return Checkpoint(folder, which, *folded(objective, params, lora_scale), mesh)


def drawing_mesh(sequence: int = 1, data: int = 1) -> Mesh:
    """Where pictures are drawn: each process of several draws on its own devices, except where
    `sequence` divides every picture over the devices of all."""
    if sequence == data == 1:
        return single_device()
    local = jax.local_devices() if sequence == 1 else None
    return make_mesh(dict(zip(AXES, (data, 1, sequence))), batch=data, devices=local)


def for_drawing(objective: Objective, pit_chunks: int | None) -> Objective:
    """The objective with a network that recomputes nothing, runs its blocks in a loop (what
    unrolling saves is the backward pass's) and cuts its pixel blocks as asked."""
    options: dict[str, Any] = {name: value for name, value in (("remat", "none"), ("unroll", 1))
                               if hasattr(objective.net, name)}
    if pit_chunks is not None:
        options["pit_chunks"] = pit_chunks
    changed = copy.copy(objective)
    changed.net = objective.net.clone(**options)
    return changed


def open_objective(folder: Path, wanted: type[Objective] | tuple[type[Objective], ...],
                   mesh: Mesh | None = None) -> Objective:
    """The objective of a checkpoint, without weights; UserError when it is no `wanted` one."""
    objective = objectives.build(read_config(folder), mesh, drawing=True)
    if not isinstance(objective, wanted):
        name = objective.config.objective
        raise UserError(f"the checkpoint {folder} is of the objective {name!r}: draw with "
                        f"`python -m {COMMAND_OF[name]}`, or name a checkpoint for this command")
    return objective


def check_which(folder: Path, which: str) -> None:
    """Refuses weights that neither every checkpoint nor this one has."""
    known = [*WEIGHTS, *checkpoint_lib.read_json(folder, checkpoint_lib.CARD).get("averages", ())]
    if which not in known:
        raise UserError(f"weights {which!r} are unknown; choose one of "
                        f"{', '.join(dict.fromkeys(known))}")


def folded(objective: Objective, params: Params, lora_scale: float | None
           ) -> tuple[Objective, Params]:
    """An objective and weights without adapters: they are added to the kernels.

    Raises:
      UserError: a scale for a network that has none, or one that is not finite.
    """
    if not isinstance(objective.net, AdaptedNet):
        if lora_scale is not None:
            raise UserError("lora_scale is set, but this checkpoint has no low-rank adapters; "
                            "leave it out")
        return objective, params
    scale = 1.0 if lora_scale is None else lora_scale
    if not np.isfinite(scale):
        raise UserError(f"lora_scale is {scale}; expected a number, such as 1, or 0 for none")
    plain = copy.copy(objective)
    plain.net = objective.net.net
    for known in ("abstract_params", "mask"):  # of the network with adapters
        plain.__dict__.pop(known, None)
    return plain, jax.jit(objective.net.lora.fold)(params, scale)


def read_config(folder: Path) -> ConfigDict:
    """The checkpoint's config; UserError for one that this version cannot run."""
    config = checkpoint_lib.read_config(folder)
    try:
        check_config(config)
    except UserError as error:
        raise UserError(f"the checkpoint {folder} has another form of config: {error}") from error
    return config


def load_weights(folder: Path, which: str, objective: Objective, mesh: Mesh) -> Params:
    """The weights `which` of one step's folder, checked against the network of its config."""
    name = WEIGHTS.get(which, which)
    if name is None:
        places = state_shardings(objective.abstract_params, mesh)
        draw = jax.jit(lambda key: models.init_parameters(objective.net, key), out_shardings=places)
        return draw(jax.random.key(objective.config.seed))
    if checkpoint_lib.is_converted(folder):
        name = checkpoint_lib.PARAMS
    if name == checkpoint_lib.PARAMS:
        return _read_item(folder, name, objective, objective.abstract_params, mesh)
    average = _read_item(folder, name, objective, objective.averaged(objective.abstract_params),
                         mesh)
    if average.keys() == objective.abstract_params.keys():
        return average
    rest = _read_item(folder, checkpoint_lib.PARAMS, objective, objective.abstract_params, mesh)
    return objective.with_average(rest, average)


def _read_item(folder: Path, name: str, objective: Objective, wanted: Params,
               mesh: Mesh) -> Params:
    """One item in the dtypes in which it is stored."""
    stored = checkpoint_lib.flat(checkpoint_lib.saved_shapes(folder, name))
    abstract = checkpoint_lib.nested({
        path: jax.ShapeDtypeStruct(leaf.shape, getattr(stored.get(path), "dtype", leaf.dtype))
        for path, leaf in checkpoint_lib.flat(wanted).items()})
    return read_weights(folder, name, checkpoint_lib.placed(abstract, mesh), "the checkpoint",
                        unused=objective.unused_parameters)[0]


class Drawer:
    """What decoder and generators share: a checkpoint that can be given back.

    Attributes:
      checkpoint: weights and objective; None once it is closed.
    """

    checkpoint: Checkpoint | None

    @property
    def objective(self) -> Any:
        """The run's objective."""
        if self.checkpoint is None:
            raise UserError("this one was closed and its weights are freed; load the checkpoint "
                            "again with from_checkpoint")
        return self.checkpoint.objective

    def close(self) -> None:
        """Frees weights, encoders and compiled functions; a second call does nothing."""
        if self.checkpoint is None:
            return
        objective = self.checkpoint.objective
        for encoder in (getattr(objective, "text", None), objective.codec):
            if isinstance(encoder, Frozen):
                encoder.release()
        for leaf in jax.tree.leaves(self._held()):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.checkpoint = None
        for function in self._compiled():
            function.clear_cache()

    def keep_weights_as(self, kind: str) -> Change | None:
        """Keeps the kernels of the patch blocks as "int8" or "fp8"; "stored" changes nothing.

        A small picture, with the steps of the run's samples, is drawn before and after.

        Returns:
          What that saves and changes; None for "stored".
        Raises:
          UserError: an unknown kind, or a network without such kernels.
        """
        if kind == STORED:
            return None
        stored = self.checkpoint.params
        params = quantised.quantise(stored, kind)
        with warnings.catch_warnings(action="ignore"):  # its size need not be a trained one
            before = self._test_picture()
            self._use(dataclasses.replace(self.checkpoint, params=params, kept_as=kind))
            steps = np.abs(self._test_picture() - before) * 127.5
        change = Change(kind, quantised.stored_bytes(params), quantised.stored_bytes(stored),
                        float(steps.mean()), float(steps.max()))
        self.checkpoint = dataclasses.replace(self.checkpoint, change=change)
        return change

    def _use(self, checkpoint: Checkpoint) -> None:
        """Draws with other weights from now on."""
        self.checkpoint = checkpoint

    def _test_picture(self) -> np.ndarray:
        """A small picture [1, H, W, 3] of the checkpoint's own sampler, the same every time."""
        raise NotImplementedError

    def _note_range(self, height: int, width: int) -> None:
        """Warns about a picture size that the checkpoint was not trained on."""
        if sentence := departure(self.objective.config, height, width):
            warnings.warn(sentence, stacklevel=3)

    def _held(self) -> Any:
        """The arrays to free."""
        return self.checkpoint.params

    def _compiled(self) -> tuple[Any, ...]:
        """The jitted functions to forget."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _placed(self, rows: Any) -> tuple[Any, int]:
        """Arrays [B, ...] over the devices of a batch, and B; the last row fills a part up."""
        data = self.checkpoint.mesh.shape["data"]
        count = len(jax.tree.leaves(rows)[0])
        if data > 1:
            fill = np.minimum(np.arange(-(-count // data) * data), count - 1)
            rows = jax.device_put(rows_of(rows, fill), batch_sharding(self.checkpoint.mesh))
        return rows, count
