"""The PiD student: draws in a few steps what its teacher draws in many (arXiv 2605.23902, DMD2).

| here              | paper                                                                     |
|-------------------|---------------------------------------------------------------------------|
| `generate`        | G: the student's picture from real ones that were noised, or by itself    |
| `loss`            | variational score distillation (VSD, arXiv 2311.18828) + GAN (2405.14867) |
| `fake_score_loss` | denoising score matching (DSM) on G's pictures + discriminator + R1       |
| `decode`          | few-step sampler, deterministic (ODE) or stochastic (SDE)                 |

Every `distill.student_every`-th update is the student's; the others train the fake score and the
discriminator. Four networks take part: `student` (`TrainState.params`), `fake_score` and
`discriminator` (`companions`), `teacher` (`frozen`). Times of distillation are not shifted.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from pid_jax import models
from pid_jax.diffusion import (few_step, flow, guidance, losses, schedules,
                               time_sampling)
from pid_jax.encoders.protocols import LatentCodec, TextEncoder
from pid_jax.errors import UserError
from pid_jax.models.lora import without_adapters
from pid_jax.models.outputs import NetOutput
from pid_jax.objectives.base import (Batch, Metrics, Update, make_optimizer, masked_gradients,
                                     masked_update)
from pid_jax.objectives.pid_teacher import PidTeacher
from pid_jax.training import ema, freezing, optim
from pid_jax.training.state import Params, TrainState, step_key

STUDENT, FAKE_SCORE, DISCRIMINATOR, TEACHER = "student", "fake_score", "discriminator", "teacher"
DISCRIMINATOR_STREAM = 1  # folded into the key of the initial weights


class PidStudent(PidTeacher):
    """Learns to draw as its teacher does, without guidance and in a few steps.

    A batch is the teacher's and the negative prompt's `null_text` [B, T, E]. Examples hold `image`,
    `text`, `null_text`, `latent`, `sigma`, and draws for each sample: `noise` and `step_index` of
    the student's input (`fresh` [B, N - 1, H, W, 3] too where it rolls out stochastically), `t` and
    `eps` of its noised picture; for the fake score's phase `real_t`, `real_eps` and `r1_noise` as
    the options ask for them.

    Losses take the parameters of all networks, by name.
    """

    fresh_parameters = ()
    guided = False
    unused_parameters = (r"^lq_proj/lq_aux_rgb_head/",)

    def __init__(self, config: ConfigDict, net: Any, discriminator: Any, text: TextEncoder,
                 codec: LatentCodec):
        """Holds the pieces; `objectives.build` makes and checks them."""
        super().__init__(config, net, text, codec)
        self.options = config.distill
        self.discriminator = discriminator
        self.times = few_step.sampling_times(self.options.steps, self.options.times,
                                             self.options.steps, self.options.first_time)
        if len(self.times) != self.options.steps + 1:
            raise UserError(f"config.distill.times holds {len(self.options.times)} times; "
                            f"{self.options.steps} steps (config.distill.steps) need "
                            f"{self.options.steps + 1}, the last one 0")

    # The networks and their state.

    @property
    def adversarial(self) -> bool:
        """Whether there is a discriminator at all."""
        return self.options.gan_weight > 0

    @functools.cached_property
    def companion_optimizers(self) -> dict[str, optim.AdamW]:
        """AdamW of the fake score and of the discriminator, which is never clipped."""
        optimizers = {FAKE_SCORE: self._optimizer(self.options.fake_score)}
        if self.adversarial:
            judge = self.options.discriminator
            optimizers[DISCRIMINATOR] = self._optimizer(
                {"lr": judge.lr, "weight_decay": judge.weight_decay, "clip_norm": math.inf})
        return optimizers

    def _optimizer(self, changes: Mapping[str, Any]) -> optim.AdamW:
        """The student's optimizer with other values."""
        options = self.config.optim.copy_and_resolve_references()
        options.update(changes)
        return make_optimizer(options)

    @functools.cached_property
    def masks(self) -> dict[str, dict]:
        """By phase, which parameters of which network train."""
        nothing = jax.tree.map(lambda _: False, self.mask)
        teacher = without_adapters(nothing)
        judge = jax.eval_shape(self.initial_discriminator)
        fixed = {name: jax.tree.map(lambda _: False, tree) for name, tree in judge.items()}
        moving = {name: jax.tree.map(lambda _: True, tree) for name, tree in judge.items()}
        return {STUDENT: {STUDENT: self.mask, FAKE_SCORE: nothing, TEACHER: teacher, **fixed},
                FAKE_SCORE: {STUDENT: nothing, FAKE_SCORE: self.mask, TEACHER: teacher, **moving}}

    def initial_discriminator(self) -> dict[str, Params]:
        """Fresh weights by name; empty without a discriminator."""
        if not self.adversarial:
            return {}
        key = jax.random.fold_in(jax.random.key(self.config.seed), DISCRIMINATOR_STREAM)
        return {DISCRIMINATOR: models.init_parameters(self.discriminator, key)}

    def init(self, rng: jax.Array) -> TrainState:
        """A fresh state whose teacher has the student's first weights."""
        state = super().init(rng)
        return state.replace(frozen={TEACHER: self.stored(without_adapters(state.params))})

    def stored(self, params: Params) -> Params:
        """A frozen network's weights, copied, in the dtype that they are kept in."""
        dtype = jnp.dtype(self.options.frozen_dtype)
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)

    def start(self, params: Params) -> TrainState:
        """A state at step 0: the fake score starts as the student does; no frozen networks yet."""
        state = super().start(params)
        companions = {FAKE_SCORE: jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
                      **self.initial_discriminator()}
        masks = self.masks[FAKE_SCORE]
        others = {name: optimizer.init(freezing.partition(companions[name], masks[name])[0])
                  for name, optimizer in self.companion_optimizers.items()}
        return state.replace(companions=companions,
                             opt_state={STUDENT: state.opt_state, **others})

    def frozen_sources(self) -> dict[str, str | None]:
        """The checkpoint of the teacher; None: drawn from the seed, where the config allows it."""
        source = self.options.teacher or self.config.init_from
        if not source and not self.options.untrained_teacher:
            raise UserError("config.distill.teacher is not set: name the teacher's checkpoint (or "
                            "set config.init_from, which is the default)")
        return {TEACHER: source or None}

    # The phases.

    def phases(self) -> dict[str, Update]:
        """The student's update and the fake score's."""
        return {STUDENT: self.step, FAKE_SCORE: self.fake_score_step}

    def phase(self, step: int) -> str:
        """The student's phase opens every `student_every` updates."""
        of_student, _ = schedules.student_phase(step, self.options.student_every)
        return STUDENT if of_student else FAKE_SCORE

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update of the student."""
        examples = self.examples(batch, step_key(self.config.seed, state.step))
        metrics, grads = self.phase_gradients(STUDENT, state, examples)
        state, found = self.update(state, grads)
        return state, metrics | found

    def fake_score_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update of the fake score and the discriminator."""
        examples = self.fake_score_examples(batch, step_key(self.config.seed, state.step))
        metrics, grads = self.phase_gradients(FAKE_SCORE, state, examples)
        state, found = self.update_companions(state, grads)
        return state, metrics | found

    def phase_gradients(self, phase: str, state: TrainState,
                        examples: Batch) -> tuple[Metrics, Params]:
        """Metrics of a phase's loss, and gradients by network."""
        loss = {STUDENT: self.loss, FAKE_SCORE: self.fake_score_loss}[phase]
        ramp = schedules.linear_ramp(state.step, self.options.gan_warm_up_steps)
        weight = jnp.full(len(examples["image"]), self.options.gan_weight * ramp, jnp.float32)
        return masked_gradients(loss, networks(state), self.masks[phase],
                                {**examples, "gan_weight": weight}, self.config.optim.accumulate)

    def update(self, state: TrainState, grads: Params) -> tuple[TrainState, Metrics]:
        """Moves the student; its averages count its own updates only."""
        params, opt_state, metrics = masked_update(
            self.optimizer, grads[STUDENT], state.opt_state[STUDENT], state.params, self.mask)
        _, finished = schedules.student_phase(state.step, self.options.student_every)
        averages = ema.update_ema(state.ema, params, finished, self.averages)
        return state.replace(step=state.step + 1, params=params, ema=averages,
                             opt_state=state.opt_state | {STUDENT: opt_state}), metrics

    def update_companions(self, state: TrainState, grads: Params) -> tuple[TrainState, Metrics]:
        """Moves the fake score and the discriminator."""
        companions, opt_states, metrics = dict(state.companions), dict(state.opt_state), {}
        for name, optimizer in self.companion_optimizers.items():
            companions[name], opt_states[name], found = masked_update(
                optimizer, grads[name], state.opt_state[name], state.companions[name],
                self.masks[FAKE_SCORE][name])
            metrics |= found if name == FAKE_SCORE else _of_discriminator(metrics, found)
        return state.replace(step=state.step + 1, companions=companions,
                             opt_state=opt_states), metrics

    # Batches and draws.

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The teacher's arrays, and the negative prompt for its guidance."""
        found = super().prepare(batch)
        return found | {"null_text": np.broadcast_to(self.null_text, found["text"].shape)}

    def batch_shapes(self, batch: int, height: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Adds the negative prompt."""
        return super().batch_shapes(batch, height, width) | {"null_text": self.text_shape(batch)}

    def examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """What both phases draw."""
        image, shape = batch["image"], batch["image"].shape
        latent_key, noise_key, index_key, fresh_key, time_key, eps_key = jax.random.split(rng, 6)
        _, latent, sigma = self.degrade(image, batch["sigma_range"], latent_key,
                                        batch.get("latent"))
        examples = {"image": image, "text": batch["text"], "null_text": batch["null_text"],
                    "latent": latent, "sigma": sigma,
                    "noise": jax.random.normal(noise_key, shape),
                    "step_index": self.draw_step_index(index_key, shape[0]),
                    "t": self.draw_times(time_key, *shape[:3]),
                    "eps": jax.random.normal(eps_key, shape)}
        if self.draws_fresh_noise:
            fresh = (shape[0], self.options.steps - 1, *shape[1:])
            examples["fresh"] = jax.random.normal(fresh_key, fresh)
        return examples

    def fake_score_examples(self, batch: Batch, rng: jax.Array) -> Batch:
        """Adds what noises the real pictures, and R1's perturbation."""
        examples, shape = self.examples(batch, rng), batch["image"].shape
        time_key, eps_key, r1_key = jax.random.split(jax.random.fold_in(rng, 1), 3)
        if not self.options.gan_same_noise:
            examples["real_t"] = self.draw_times(time_key, *shape[:3])
            examples["real_eps"] = jax.random.normal(eps_key, shape)
        if self.options.r1_weight:
            examples["r1_noise"] = jax.random.normal(r1_key, shape)
        return examples

    @property
    def rolls_out(self) -> bool:
        """Whether the student's input comes from its own steps instead of a real picture."""
        return self.options.steps > 1 and self.options.input == "self_rollout"

    @property
    def draws_fresh_noise(self) -> bool:
        """Whether the steps of the roll-out draw noise."""
        return self.rolls_out and self.options.sampler == "sde"

    def draw_step_index(self, rng: jax.Array, batch: int) -> jax.Array:
        """int32 [batch] steps of the student; a roll-out takes the same one for all samples."""
        count = 1 if self.rolls_out else batch
        return jnp.broadcast_to(jax.random.randint(rng, (count,), 0, self.options.steps), (batch,))

    def draw_times(self, rng: jax.Array, batch: int, height: int, width: int) -> jax.Array:
        """float32 [batch] logit-normal times, clipped, not shifted."""
        return self.clip_times(jax.random.normal(rng, (batch,)))

    def clip_times(self, normal: jax.Array) -> jax.Array:
        """The times that standard normal draws stand for."""
        times = time_sampling.logit_normal(normal, self.config.flow.logit_mean,
                                           self.config.flow.logit_std)
        return jnp.clip(times, self.options.time_min, self.options.time_max)

    # Losses.

    def call(self, params: Params, x: jax.Array, t: jax.Array, text: jax.Array, examples: Batch,
             **options: Any) -> NetOutput:
        """One call of a denoising network on pictures x at times t in [0, 1]."""
        return self.net.apply({"params": params}, x, flow.network_time(t), text,
                              lq_latent=examples["latent"], degrade_sigma=examples["sigma"],
                              **options)

    def generate(self, params: Params, examples: Batch) -> jax.Array:
        """The student's clean pictures float32 [B, H, W, 3], not clipped."""
        x, t = self.student_input(params, examples)
        output = self.call(params, x, t, examples["text"], examples).x
        return flow.predicted_x0(output, x, t, self.config.flow.prediction_type)

    def student_input(self, params: Params, examples: Batch) -> tuple[jax.Array, jax.Array]:
        """The noised pictures that the student sees, and their times [B]."""
        if self.rolls_out:
            return self.roll_out(jax.lax.stop_gradient(params), examples)
        t = jnp.asarray(self.times)[examples["step_index"]]
        return flow.interpolate(examples["image"], examples["noise"], t), t

    def roll_out(self, params: Params, examples: Batch) -> tuple[jax.Array, jax.Array]:
        """Pure noise after the first `step_index` of the student's own steps, and the next time.

        Steps that are not due are skipped, not computed and dropped.
        """
        table = few_step.make_table(self.times, self.config.flow.prediction_type,
                                    self.options.sampler)
        last = examples["step_index"][0]

        def step(x: jax.Array, row: tuple) -> tuple[jax.Array, None]:
            index, now = row
            return jax.lax.cond(index < last, advance, lambda x, *_: x, x, index, now), None

        def advance(x: jax.Array, index: jax.Array, now: few_step.StepTable) -> jax.Array:
            t = jnp.full(x.shape[:1], now.times)
            output = self.call(params, x, t, examples["text"], examples).x
            return few_step.advance(x, output, now, index, lambda i: examples["fresh"][:, i])

        rows = (jnp.arange(self.options.steps - 1),
                jax.tree.map(lambda column: jnp.asarray(column[:-1]), table))
        x, _ = jax.lax.scan(step, examples["noise"], rows)
        return x, jnp.full(x.shape[:1], jnp.asarray(self.times)[last])

    def loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """VSD plus the weighted GAN loss of the student (`gan_weight` [B] in the examples)."""
        generated = self.generate(params[STUDENT], examples)
        x_t = flow.interpolate(generated, examples["eps"], examples["t"])
        out = self.call(params[TEACHER], x_t, examples["t"], examples["text"], examples,
                        feature_indices=self.discriminator.taps if self.adversarial else ())
        noised = jax.lax.stop_gradient(x_t)
        vsd = losses.vsd_loss(
            generated, self.teacher_x0(params[TEACHER], jax.lax.stop_gradient(out.x), noised,
                                       examples),
            self.fake_x0(params[FAKE_SCORE], noised, examples))
        total, metrics = self.options.vsd_weight * vsd, {"vsd_loss": vsd}
        if self.adversarial:
            gan = losses.gan_generator_loss(self.judge(params, out.features))
            metrics["gan_loss"] = gan
            total = total + jnp.mean(examples["gan_weight"]) * gan
        return total, {"loss": total, **metrics}

    def teacher_x0(self, params: Params, conditional: jax.Array, x_t: jax.Array,
                   examples: Batch) -> jax.Array:
        """The guided teacher's clean picture.

        Args:
          conditional: its output for the captions, already there.
        """
        scale, output = self.options.teacher_guidance, conditional
        if scale != 1.0:
            unconditional = self.call(params, x_t, examples["t"], examples["null_text"],
                                      examples).x
            output = guidance.guide(unconditional, conditional, scale)
        return flow.predicted_x0(output, x_t, examples["t"],
                                 self.options.teacher_prediction_type)

    def fake_x0(self, params: Params, x_t: jax.Array, examples: Batch) -> jax.Array:
        """The fake score's clean picture, without guidance."""
        output = self.call(params, x_t, examples["t"], examples["text"], examples).x
        return flow.predicted_x0(output, x_t, examples["t"], self.config.flow.prediction_type)

    def judge(self, params: Params, features: tuple[jax.Array, ...]) -> jax.Array:
        """The discriminator's logits [B, K] of the teacher's features."""
        return self.discriminator.apply({"params": params[DISCRIMINATOR]}, features)

    def fake_score_loss(self, params: Params, examples: Batch) -> tuple[jax.Array, Metrics]:
        """DSM on the student's pictures, the discriminator's loss and R1."""
        generated = self.generate(params[STUDENT], examples)
        x_t = flow.interpolate(generated, examples["eps"], examples["t"])
        output = self.call(params[FAKE_SCORE], x_t, examples["t"], examples["text"], examples).x
        dsm = losses.mean_squared_error(output, losses.dsm_target(
            generated, examples["eps"], self.config.flow.prediction_type))
        total, metrics = self.options.dsm_weight * dsm, {"dsm_loss": dsm}
        if self.adversarial:
            adversarial, found = self.discriminator_loss(params, x_t, examples)
            total, metrics = total + adversarial, metrics | found
        return total, {"loss": total, **metrics}

    def discriminator_loss(self, params: Params, x_t: jax.Array,
                           examples: Batch) -> tuple[jax.Array, Metrics]:
        """Real against generated, and the approximate R1 penalty."""
        real_t = examples.get("real_t", examples["t"])
        real = flow.interpolate(examples["image"], examples.get("real_eps", examples["eps"]),
                                real_t)

        def logits(x: jax.Array, t: jax.Array) -> jax.Array:
            return self.judge(params, self.call(
                params[TEACHER], x, t, examples["text"], examples,
                feature_indices=self.discriminator.taps, return_features_early=True).features)

        real_logits = logits(real, real_t)
        total = losses.gan_discriminator_loss(real_logits, logits(x_t, examples["t"]))
        metrics = {"discriminator_loss": total}
        if self.options.r1_weight:
            perturbed = real + self.options.r1_alpha * examples["r1_noise"]
            metrics["r1_loss"] = losses.r1_penalty(real_logits, logits(perturbed, real_t))
            total = total + self.options.r1_weight * metrics["r1_loss"]
        return total, metrics

    # Drawing.

    def decode(self, params: Params, noise: jax.Array, latent: jax.Array, sigma: jax.Array,
               text: jax.Array, null_text: jax.Array, table: few_step.StepTable, scale: float,
               draw: few_step.Draw | None = None,
               tile: int = 0) -> jax.Array:
        """Decodes latents with one network call a step; see `PidTeacher.decode`.

        Guidance was distilled into the student: `null_text` and `scale` are not read.
        """
        predict = functools.partial(self.predictor(params, latent, sigma, tile), text=text)
        pictures = few_step.sample(predict, noise, table, draw)
        return jnp.clip(pictures, -1.0, 1.0)

    def solver_table(self, height: int, width: int, steps: int) -> few_step.StepTable:
        """The student's steps; the size of the picture does not matter.

        Raises:
          UserError: more steps than the student has times for.
        """
        times = few_step.sampling_times(steps, self.options.times, self.options.steps,
                                        self.options.first_time)
        if np.any(np.diff(times) == 0):
            raise UserError(f"steps is {steps}, but this student was distilled at "
                            f"{self.options.steps} times, and some would come twice; choose 1 to "
                            f"{self.options.steps} steps")
        return few_step.make_table(times, self.config.flow.prediction_type, self.options.sampler)

    def drawing(self, batch: int, height: int,
                width: int) -> tuple[Callable, dict[str, jax.ShapeDtypeStruct]]:
        """The teacher's, with fresh noise of a fixed seed."""
        decode, shapes = super().drawing(batch, height, width)

        def draw_pictures(params: Params, noise: jax.Array, **inputs: Any) -> jax.Array:
            fresh = few_step.gaussian_draws(jax.random.key(0), noise.shape)
            return decode(params, noise, **inputs, draw=fresh)

        return draw_pictures, shapes


def networks(state: TrainState) -> dict[str, Params]:
    """The parameters of all networks of a state, by name."""
    return {STUDENT: state.params, **state.companions, **state.frozen}


def _of_discriminator(metrics: Mapping[str, jax.Array], found: Metrics) -> Metrics:
    """The discriminator's part in a report whose norm and rate are the fake score's."""
    return {"discriminator_grad_norm": found["grad_norm"],
            "update_skipped": jnp.maximum(metrics["update_skipped"], found["update_skipped"])}
