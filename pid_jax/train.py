"""The training loop: mesh, objective, data, state, then steps with their hooks, in this order."""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from pid_jax import flops, objectives, startup
from pid_jax.config import check_config
from pid_jax.data import pipeline
from pid_jax.data.buckets import build_layout
from pid_jax.data.sources import open_data as open_data_set
from pid_jax.errors import RunFailed, RunInterrupted, TryAgain, UserError, one_line
from pid_jax.objectives.base import Objective
from pid_jax.objectives.program import CodecProgram
from pid_jax.parallel import mesh as mesh_lib
from pid_jax.parallel import multihost, sequence
from pid_jax.parallel.patience import Patience, patience
from pid_jax.training import metrics as metrics_lib
from pid_jax.training import performance as performance_lib
from pid_jax.training import restore, run_record, sampling_hooks
from pid_jax.training import workdir as workdir_lib
from pid_jax.training.checkpoint import Checkpointer
from pid_jax.training.interruption import Interruption, catch_signals
from pid_jax.training.profiling import Profiler
from pid_jax.training.retention import Retention
from pid_jax.training.sampling_hooks import Sampler
from pid_jax.training.state import TrainState

logger = logging.getLogger(__name__)

StepFunction = Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]


def run(config: ConfigDict, workdir: str | None) -> TrainState:
    """Trains as the config says; running it again goes on from the newest checkpoint.

    Returns:
      The final state.
    Raises:
      UserError: bad input, found before anything compiles wherever that is possible.
      RunFailed: the loss is not finite, or a file could not be written.
      TryAgain: another process of the run died; the same command goes on.
      RunInterrupted: a signal came; the state was saved.
    """
    check_config(config)
    folder = workdir_lib.open_workdir(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdir_lib.only_run(folder))
        stack.enter_context(workdir_lib.logging_to(folder))
        waiting = stack.enter_context(patience(config.mesh.patience))
        stack.enter_context(lost_processes(waiting))

        # Mesh and objective.
        startup.check_processes(config)
        if not config.checkpoint.folder:
            startup.check_shared(folder)
        mesh = mesh_lib.make_mesh(config.mesh, config.data.batch_size, config.optim.accumulate)
        objective = objectives.build(config, mesh)
        startup.check_run(config, objective, mesh, folder)
        objective.load_encoders()

        # Data.
        batches = stack.enter_context(open_data(config, objective, mesh))
        heldout = {size: read_heldout(config, objective, size)
                   for size in sampling_hooks.sizes(objective)}

        # State: own checkpoint, config.resume, config.init_from, scratch.
        checkpointer = Checkpointer(folder, make_retention(config.checkpoint),
                                    config.checkpoint.folder)
        stack.callback(checkpointer.close)
        state, data_state = restore.initial_state(config, objective, mesh, checkpointer)
        objective.check_weights(state.params)
        if data_state is not None:
            batches.set_state(data_state)
        step = int(state.step)
        if multihost.is_writer():
            run_record.append(folder, config, mesh, step)
            workdir_lib.write_config(folder, config)

        # Steps.
        stack.enter_context(explained(checkpointer, waiting))
        writer = open_writer(folder, step, config.log)
        stack.callback(writer.close)
        loop = Loop(
            config=config, objective=objective, mesh=mesh, batches=batches,
            checkpointer=checkpointer, writer=writer,
            sampler=Sampler(objective, folder, mesh, heldout),
            progress=metrics_lib.Progress(step, config.total_steps, config.data.batch_size,
                                          flops.mesh_peak(mesh)),
            profiler=stack.enter_context(Profiler(folder, config.log.profile)),
            interruption=stack.enter_context(catch_signals(config.checkpoint.grace)),
            waiting=waiting)
        state = loop.run(state)

        # What is left when it is done.
        waiting.note("the end of the run")
        checkpointer.wait()
        if multihost.is_writer():
            logger.info("done: %d steps; curves in %s", int(state.step), metrics_lib.plot(folder))
        multihost.barrier("end of the run")
    return state


@contextlib.contextmanager
def lost_processes(waiting: Patience, last_good: Callable[[], str] = lambda: "no step was done"
                   ) -> Iterator[None]:
    """What collectives raise when another process died, as a sentence; the same command goes on."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # jax raises both
        if isinstance(error, UserError) or not multihost.lost_peer(error):
            raise
        raise multihost.lost(f"at {waiting.doing}", one_line(error, 200), last_good()) from error


@contextlib.contextmanager
def explained(checkpointer: Checkpointer, waiting: Patience) -> Iterator[None]:
    """Storage that fails and processes that die, as a sentence with the last good step."""
    try:
        with lost_processes(waiting, checkpointer.last_good):
            yield
    except OSError as error:
        raise RunFailed(f"{error.strerror or error}: {error.filename or waiting.doing}; "
                        f"{checkpointer.last_good()}; make room or bring the storage back, and run "
                        "the same command again") from error
    except RuntimeError as error:
        if "Worker process was terminated" not in str(error):  # Grain's words
            raise
        raise TryAgain(f"a data worker died at {waiting.doing} ({one_line(error, 90)}); "
                       f"{checkpointer.last_good()}; run the same command again, with fewer "
                       "config.data.workers if the host ran out of memory") from error


def make_retention(options: ConfigDict) -> Retention:
    """Which checkpoints the config section `checkpoint` keeps."""
    return Retention(options.keep, options.keep_every, options.best)


def open_writer(folder: Path, step: int, options: ConfigDict) -> metrics_lib.MetricsWriter:
    """The writer of the process that writes; the others' writes nothing."""
    if not multihost.is_writer():
        return metrics_lib.SilentWriter()
    return metrics_lib.MetricsWriter(folder, step, options.tensorboard, options.wandb)


def open_data(config: ConfigDict, objective: Objective, mesh: Mesh) -> pipeline.Batches:
    """The stream of training batches, every picture size checked against network and mesh."""
    if not config.data.path:
        raise UserError("config.data.path is not set: name a folder packed by "
                        "`python -m pid_jax.data.ingest`")
    layout = build_layout(config.data.buckets, config.data.image_size, config.data.sizes)
    drawn = [(size, size) for size in sampling_hooks.sizes(objective)]
    for size in [*((bucket.height, bucket.width) for bucket in layout.buckets), *drawn]:
        objective.check_picture(*size)
        sequence.check_network(mesh, config.mesh.sequence_attention, objective.net, *size)
    objective.solver_table(*drawn[0], config.sample.steps)
    share = multihost.batch_share(mesh_lib.batch_sharding(mesh), config.data.batch_size)
    batches = pipeline.build_pipeline(seed=config.seed, process=share.index,
                                      processes=share.count, **config.data)
    multihost.refuse_difference(json.dumps(batches.get_state()), "the data set")
    if batches.latents is not None:
        batches.latents.check(objective.latent_origin())
    return batches


def read_heldout(config: ConfigDict, objective: Objective, size: int) -> dict[str, Any] | None:
    """The first `sample.count` pictures of `sample.heldout`, for objectives that need them.

    Args:
      size: side in pixels.
    """
    if not objective.needs_heldout:
        return None
    path = config.sample.heldout or config.data.path
    sources = () if config.sample.heldout else config.data.sources
    count = min(config.sample.count, len(open_data_set(path, sources)))
    with pipeline.build_pipeline(
            path, count, image_size=size, shuffle=False, sources=sources,
            threads=0, caption_fields=config.data.caption_fields) as batches:
        return next(batches)


def compile_step(objective: Objective, mesh: Mesh, state: TrainState, phase: str) -> StepFunction:
    """The jitted update of one phase; it overwrites the state that it is given."""
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    return CodecProgram(objective, lambda objective: objective.phases()[phase], mesh, donate=(0,),
                        in_shardings=(places, mesh_lib.batch_sharding(mesh)),
                        out_shardings=(places, mesh_lib.replicated(mesh)))


@dataclasses.dataclass
class Loop:
    """The steps. After each: metrics, samples, checkpoint; only then the next batch.

    The metrics of a step are read while the next one runs, so the device never waits for the
    host; before samples and checkpoints they are read at once.
    """

    config: ConfigDict
    objective: Objective
    mesh: Mesh
    batches: pipeline.Batches
    checkpointer: Checkpointer
    writer: metrics_lib.MetricsWriter
    sampler: Sampler
    progress: metrics_lib.Progress
    profiler: Profiler
    interruption: Interruption
    waiting: Patience
    unread: "Report | None" = None
    scores: tuple[int, Mapping[str, float]] = (0, {})
    latest: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    work: dict[tuple, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """What follows from the parts."""
        self.vote = multihost.Vote(self.mesh)
        self.performance = performance_lib.Performance(
            self.config.data.batch_size, self.mesh.size, self.progress.peak)

    def run(self, state: TrainState) -> TrainState:
        """Runs to `total_steps`."""
        first, total = int(state.step), self.config.total_steps
        updates = {phase: compile_step(self.objective, self.mesh, state, phase)
                   for phase in self.objective.phases()}
        for step in range(first + 1, total + 1):
            phase = self.objective.phase(step - 1)
            self.profiler.before(step, state)
            state = self.one_step(updates[phase], state, step, phase)
            if step == first + 1:
                self.note_compilation(state)
            if self.due(step, self.config.sample.every):
                self.sample(state)
            stopping = self.stopping()
            if self.due(step, self.config.checkpoint.every) or stopping:
                self.save(state)
            if stopping and step < total:
                self.stop(step)
            self.checkpointer.poll()
        return state

    def due(self, step: int, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, is due."""
        return step % every == 0 or step == self.config.total_steps

    def stopping(self) -> bool:
        """Whether a signal came, to this process or, a step ago, to another; all stop together."""
        return self.vote.ask(bool(self.interruption))

    def one_step(self, update: StepFunction, state: TrainState, step: int,
                 phase: str) -> TrainState:
        """One update; reads the metrics of the one before."""
        began = time.monotonic()
        batch, wait = self.next_batch(step)
        self.waiting.note(f"step {step}")
        arrays = mesh_lib.shard_batch(self.objective.prepare(batch), self.mesh,
                                      self.config.data.batch_size)
        state, values = update(state, arrays)
        self.count_work(arrays, phase)
        self.read_metrics()
        self.performance.add(time.monotonic() - began, wait)
        self.unread = Report(step, phase, values, metrics_lib.digest(self.batches.global_keys))
        return state

    def next_batch(self, step: int) -> tuple[Mapping[str, Any], float]:
        """The batch and the seconds it took; a reader that keeps the step waiting is named."""
        self.waiting.note(f"the batch of step {step}")
        batch, wait = performance_lib.timed(lambda: next(self.batches))
        self.progress.add_wait(wait)
        if wait > performance_lib.SLOW_SECONDS:
            logger.warning("step %d waited %.1f s for the batch of %s, which begins with %r", step,
                           wait, self.batches.reader, batch["key"][0])
        return batch, wait

    def note_compilation(self, state: TrainState) -> None:
        """Says how long the first step took and leaves it out of the speed."""
        jax.block_until_ready(state)
        logger.info("first step after %.1f s, with compilation", self.progress.seconds)
        self.progress.restart(int(state.step))

    def count_work(self, arrays: Mapping[str, jax.Array], phase: str) -> None:
        """Adds the FLOPs of a step to the progress; counted once a phase and picture size."""
        self.flops = 0.0
        if self.progress.peak is None:
            return
        kind = phase, arrays["image"].shape
        if kind not in self.work:
            self.work[kind] = self.objective.step_flops(arrays, phase).total
        self.flops = self.work[kind]
        self.progress.add_work(self.flops)

    def read_metrics(self) -> None:
        """Writes the metrics that are outstanding; stops the run when the loss is not finite."""
        if self.unread is None:
            return
        report, self.unread = self.unread, None
        values = jax.device_get(report.values)
        self.writer.write(report.step, {"phase": report.phase, **values, "batch": report.batch,
                                        "time": time.time()})
        self.latest[report.phase] = values
        metrics_lib.stop_if_not_finite(report.step, values, self.checkpointer.latest_step())
        if values["update_skipped"]:
            logger.warning("step %d: gradient norm %s, the update is skipped", report.step,
                           metrics_lib.norms(values))
        if self.due(report.step, self.config.log.every):
            times = self.performance.report(self.flops)
            self.writer.performance(report.step, times)
            logger.info(self.progress.line(report.step, self.latest) +
                        performance_lib.remark(times))

    def sample(self, state: TrainState) -> None:
        """Draws the sample grid; its time does not count as training."""
        self.read_metrics()
        self.waiting.note(f"the samples of step {int(state.step)}")
        scores = self.sampler.write(state)
        self.scores = int(state.step), scores
        self.writer.board(int(state.step), scores)
        self.progress.restart(int(state.step))

    def save(self, state: TrainState) -> None:
        """Starts a checkpoint whose iterator state fits the step."""
        self.read_metrics()
        self.waiting.note(f"the checkpoint of step {int(state.step)}")
        step, scores = self.scores
        self.checkpointer.save(state, self.batches.get_state(), self.config,
                               scores if step == int(state.step) else {})

    def stop(self, step: int) -> None:
        """Ends the run after a signal."""
        self.checkpointer.wait()
        raise RunInterrupted(f"stopped by {self.interruption} at step {step} of "
                             f"{self.config.total_steps}; the state is saved, run the same "
                             "command again to go on")


@dataclasses.dataclass(frozen=True)
class Report:
    """Metrics of a step that are still on the device, and the digest of its global batch's keys."""

    step: int
    phase: str
    values: Mapping[str, jax.Array]
    batch: str
