"""What every objective shares: making the state, and one update from a loss."""

import abc
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from pid_jax import models
from pid_jax.data.token_cache import digest
from pid_jax.diffusion import dpm_solver, schedules, time_sampling
from pid_jax.encoders.frozen import Frozen
from pid_jax.encoders.protocols import LatentCodec, TextEncoder
from pid_jax.errors import UserError
from pid_jax.flops import Flops, count_flops, counted_attention
from pid_jax.models.lora import Lora
from pid_jax.models.placement import unconstrained
from pid_jax.training import ema, freezing, optim
from pid_jax.training.state import Params, TrainState, step_key

VALUE_OF_KIND = {"power": "rate", "constant": "decay"}
LARGEST_SIDE = 16384  # XLA aborts the process on arrays of more elements than it can count

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Update = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Objective(abc.ABC):
    """One thing that is trained. Everything but `prepare` and `prompts` is pure and jit-safe.

    Attributes:
      config: the run's config.
      net: the Flax network; parameters stay outside it.
      text: the text encoder.
      codec: the latent codec of objectives that have one.
      fresh_parameters: path patterns of parameters that `init_from` may lack.
      unused_parameters: path patterns of parameters of `init_from` that are left out.
      guided: whether drawing takes a guidance scale.
      lq_scale: how much larger pictures are than the low-quality ones that they follow, if any.
      needs_heldout: `sample_inputs` reads pictures that training does not see.
    """

    codec: LatentCodec | None = None
    fresh_parameters: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    needs_heldout: bool = False
    guided: bool = True
    lq_scale: int | None = None

    def __init__(self, config: ConfigDict, net: Any, text: TextEncoder):
        """Holds the pieces; `objectives.build` makes and checks them."""
        self.config, self.net, self.text = config, net, text

    def load_encoders(self) -> None:
        """Reads the weights of frozen encoders, so that none can be missing later."""
        for encoder in (self.text, self.codec):
            if isinstance(encoder, Frozen):
                encoder.load()

    def codec_params(self, sharding: jax.sharding.Sharding) -> Params:
        """The codec's parameters on devices; {} where it has none."""
        return self.codec.placed(sharding) if isinstance(self.codec, Frozen) else {}

    def codec_shapes(self) -> Params:
        """Shapes of `codec_params`, which needs no weights."""
        return self.codec.shapes() if isinstance(self.codec, Frozen) else {}

    def latent_origin(self) -> dict[str, str]:
        """What the latents of pictures depend on: the codec, its weights, the reduction.

        Raises: UserError where no codec's latents are read.
        """
        if self.codec is None or self.lq_scale is None:
            raise UserError(f"config.objective {self.config.objective!r} reads no latents; leave "
                            "config.data.latents empty")
        weights = digest(self.codec.params) if isinstance(self.codec, Frozen) else ""
        return {"codec": self.codec.family, "channels": str(self.codec.channels),
                "weights": weights, "scale": str(self.lq_scale)}

    def with_codec_params(self, params: Params) -> "Objective":
        """This objective with other parameters in its codec, such as traced ones."""
        if not params:
            return self
        other = copy.copy(self)
        other.codec = self.codec.with_params(params)
        return other

    @functools.cached_property
    def optimizer(self) -> optim.AdamW:
        """AdamW with the config's schedule and clipping."""
        return make_optimizer(self.config.optim)

    @functools.cached_property
    def averages(self) -> tuple[ema.EmaSpec, ...]:
        """The averages of the parameters that the state holds."""
        return make_averages(self.config.ema)

    def frozen_rules(self) -> tuple[freezing.Freeze, ...]:
        """What does not train."""
        return (freezing.LAST_BLOCK_TEXT,)

    @functools.cached_property
    def mask(self) -> dict:
        """Which parameters train; see `freezing.trainable_mask`. Of a net with adapters, they."""
        rules = (freezing.ALL_BUT_LORA,) if self.config.lora.enabled else self.frozen_rules()
        return freezing.trainable_mask(self.abstract_params, rules)

    @functools.cached_property
    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters."""
        return jax.eval_shape(lambda: models.init_parameters(self.net, jax.random.key(0)))

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def init(self, rng: jax.Array) -> TrainState:
        """A fresh state; under `jax.eval_shape` it costs nothing."""
        return self.start(models.init_parameters(self.net, rng))

    def start(self, params: Params) -> TrainState:
        """A state at step 0 around given parameters."""
        trainable, _ = freezing.partition(params, self.mask)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params,
                          opt_state=self.optimizer.init(trainable),
                          ema=ema.init_ema(self.averaged(params), self.averages))

    def averaged(self, params: Params) -> Params:
        """The part of the parameters that averages follow."""
        return params

    def with_average(self, params: Params, average: Params) -> Params:
        """All parameters, those of `averaged` taken from an average."""
        return average

    def source_paths(self, saved: Params) -> dict[str, str]:
        """For `init_from`: path of our parameter -> its path in the checkpoint `saved`.

        Parameters of the checkpoint that are not named are left out.
        """
        paths = traverse_util.flatten_dict(saved, sep="/")
        return {path: path for path in paths}

    def check_weights(self, params: Params) -> None:
        """Refuses weights that do not fit what the objective reads; called once, on the host."""

    def frozen_sources(self) -> dict[str, str | None]:
        """By name, the checkpoint of each of the state's frozen networks; None: drawn."""
        return {}

    def phases(self) -> dict[str, Update]:
        """The kinds of update that take turns, by name; each is compiled once."""
        return {"train": self.step}

    def phase(self, step: int) -> str:
        """Which of `phases` follows on `step` updates."""
        return "train"

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update on a batch made by `prepare`."""
        examples = self.examples(batch, step_key(self.config.seed, state.step))
        metrics, grads = self.gradients(state.params, examples)
        state, update_metrics = self.update(state, grads)
        return state, metrics | update_metrics

    def gradients(self, params: Params, examples: Batch) -> tuple[Metrics, Params]:
        """Metrics and gradients (trainable leaves only) of the loss, over the micro-batches."""
        return masked_gradients(self.loss, params, self.mask, examples,
                                self.config.optim.accumulate)

    def update(self, state: TrainState, grads: Params) -> tuple[TrainState, Metrics]:
        """Clips, moves the parameters, averages them, counts the step."""
        params, opt_state, metrics = masked_update(self.optimizer, grads, state.opt_state,
                                                   state.params, self.mask)
        averages = ema.update_ema(state.ema, self.averaged(params), state.step, self.averages)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state,
                             ema=averages), metrics

    def check_picture(self, height: int, width: int) -> None:
        """Refuses picture sizes that the network cannot take, before anything compiles."""
        if max(height, width) > LARGEST_SIDE:
            raise UserError(f"pictures of {width} x {height} pixels are too large; a side has at "
                            f"most {LARGEST_SIDE}")
        check_divides(height, width, self.net.patch_size, "the patch size")

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of what `prepare` makes, for compiling without data."""
        return {"image": float_shape(batch, height, width, 3), "text": self.text_shape(batch)}

    def text_shape(self, batch: int) -> jax.ShapeDtypeStruct:
        """Shape of caption embeddings."""
        return float_shape(batch, self.text.length, self.text.width)

    def counting(self) -> "Objective":
        """This objective with a network whose FLOPs `pid_jax.flops` can count; never run it."""
        counted = copy.copy(self)
        whole = {"remat": "none"} | ({"pit_chunks": 1} if hasattr(self.net, "pit_chunks") else {})
        counted.net = self.net.clone(attention=counted_attention, constrain=unconstrained, **whole)
        return counted

    def step_flops(self, batch: Mapping[str, Any], phase: str) -> Flops:
        """FLOPs that one update on a batch of these shapes needs, without recomputation."""
        counted = self.counting()
        state = jax.eval_shape(counted.init, jax.random.key(0))
        return count_flops(
            lambda codec, *inputs: counted.with_codec_params(codec).phases()[phase](*inputs),
            self.codec_shapes(), state, dict(batch))

    @abc.abstractmethod
    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """The function that draws pictures, and the shapes of its arguments per picture.

        It also takes `params` first, and `null_text`, `table` and `scale` by name.
        """

    @abc.abstractmethod
    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of a pipeline's batch that go to the devices; runs on the host."""

    @abc.abstractmethod
    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Draws all randomness of an update: arrays [B, ...] from which the loss follows."""

    @abc.abstractmethod
    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """The loss of examples and what to report; no randomness."""

    @abc.abstractmethod
    def sample_inputs(self, heldout: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """What `sample` reads: fixed prompts, and pictures held out where `needs_heldout`."""

    @abc.abstractmethod
    def sample(self, params: Params, inputs: Batch, rng: jax.Array, size: int | None = None,
               guidance: float | None = None) -> dict[str, jax.Array]:
        """Named pictures [B, H, W, 3] in [-1, 1], in the order of a grid's columns.

        Args:
          size: side of the pictures, where the inputs do not say it; default: `sample_size`.
          guidance: scale; default: the config's.
        """

    @property
    def sample_size(self) -> int:
        """Side of the sampled pictures in pixels."""
        return self.config.sample.image_size or self.config.data.image_size

    @functools.cached_property
    def null_text(self) -> np.ndarray:
        """Embedding of the negative prompt, float32 [1, T, E]."""
        with jax.ensure_compile_time_eval():  # kept, so it must not belong to a trace
            return self.prompts([self.config.sample.negative_prompt])

    def solver_table(self, height: int, width: int, steps: int,
                     order: int = 2) -> dpm_solver.DpmTable:
        """The steps of DPM-Solver++ for pictures of this size; order 1 is DDIM."""
        return dpm_solver.make_table(steps, self.shift(height, width), order=min(steps, order))

    def prompts(self, captions: Sequence[str]) -> np.ndarray:
        """Caption embeddings float32 [B, T, E]."""
        return self.text.embed(list(captions))

    def shift(self, height: int, width: int) -> float:
        """The time shift for pictures of this size."""
        flow = self.config.flow
        if not flow.dynamic_shift:
            return flow.shift
        return time_sampling.dynamic_shift(height, width, flow.dynamic_base_shift,
                                           flow.dynamic_image_size)

    def draw_times(self, rng: jax.Array, batch: int, height: int, width: int) -> jax.Array:
        """Shifted training times, float32 [batch] in [0, 1]; 1 is noise."""
        flow = self.config.flow
        sampler = time_sampling.TimeSampler(mean=flow.logit_mean, std=flow.logit_std)
        return time_sampling.shift_time(sampler(rng, batch), self.shift(height, width))


def check_divides(height: int, width: int, divisor: int, what: str) -> None:
    """Raises UserError unless `divisor` divides both sides; `what` says what it is."""
    for side in (width, height):
        if side % divisor:
            lower = side // divisor * divisor
            choice = f"{lower} or {lower + divisor}" if lower else f"{divisor}"
            raise UserError(f"pictures of {width} x {height} pixels do not fit: {what} "
                            f"({divisor}) does not divide {side}; choose {choice}")


def float_shape(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 array that is only described."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def masked_gradients(loss: Callable[[Params, Batch], tuple[jax.Array, Metrics]], params: Params,
                     mask: Params, examples: Batch, parts: int) -> tuple[Metrics, Params]:
    """Metrics and gradients of a loss, averaged over micro-batches.

    Args:
      loss: (parameters, examples) -> (scalar, metrics).
      mask: see `freezing.trainable_mask`; only what it leaves trainable gets a gradient.
      parts: micro-batches.
    """
    trainable, frozen = freezing.partition(params, mask)

    def loss_of_trainable(trainable: Params, part: Batch) -> tuple[jax.Array, Metrics]:
        return loss(freezing.combine(trainable, frozen), part)

    def metrics_and_gradients(trainable: Params, part: Batch, index: jax.Array):
        grads, metrics = jax.grad(loss_of_trainable, has_aux=True)(trainable, part)
        return metrics, grads

    return optim.accumulate(metrics_and_gradients, trainable, examples, parts)


def masked_update(optimizer: optim.AdamW, grads: Params, opt_state: optim.OptimizerState,
                  params: Params, mask: Params
                  ) -> tuple[Params, optim.OptimizerState, Metrics]:
    """Clips and moves what `mask` leaves trainable; see `optim.AdamW.update`."""
    trainable, frozen = freezing.partition(params, mask)
    moving, _ = freezing.partition(mask, mask)
    trainable, opt_state, metrics = optimizer.update(grads, opt_state, trainable, moving)
    return freezing.combine(trainable, frozen), opt_state, metrics


def make_optimizer(options: ConfigDict) -> optim.AdamW:
    """The optimizer that the config section `optim` describes."""
    schedule = schedules.CycleSchedule(
        warm_up_steps=options.warm_up_steps, cycle_lengths=options.cycle_lengths,
        f_start=options.f_start, f_max=options.f_max, f_min=options.f_min, decay=options.decay)
    threshold = options.skip_grad_norm_threshold
    clip = optim.GradClip(
        max_norm=options.clip_norm, force_finite=options.force_finite,
        skip_on_nonfinite=options.skip_on_nonfinite,
        spike_threshold=math.inf if threshold is None else threshold)
    return optim.AdamW(
        learning_rate=options.lr, multiplier=schedule, beta1=options.betas[0],
        beta2=options.betas[1], eps=options.eps, weight_decay=options.weight_decay, clip=clip)


def make_lora(options: ConfigDict) -> Lora:
    """The adapters that the config section `lora` describes."""
    return Lora(options.rank, options.alpha, options.targets)


def make_averages(options: ConfigDict) -> tuple[ema.EmaSpec, ...]:
    """The averages that the config section `ema` describes: `ema` and others, or none."""
    if not options.enabled:
        return ()
    others = (ema.EmaSpec(name=name, kind=kind, **{VALUE_OF_KIND[kind]: value})
              for name, kind, value in options.others)
    if options.decay is not None:
        return (ema.EmaSpec(kind="constant", decay=options.decay), *others)
    return (ema.EmaSpec(rate=options.rate, iteration_shift=options.iteration_shift), *others)
