"""Group F00: our configs hold the values of the reference's experiments."""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from pid_jax.diffusion.flow import NETWORK_TIME_SCALE
from tests.golden.cases import Case, handles

CONFIG_OF_EXPERIMENT = {
    "pixeldit_text_to_image_finetune_res_2048": "pixeldit_t2i_2k",
    "pixeldit_text_to_image_finetune_res_2048_to_3840": "pixeldit_t2i_2kto4k",
    **{f"pid_v1pt5_teacher_{family}_h1024_d4_fix_backbone_res_2048": f"pid_teacher_{family}_2k"
       for family in ("flux", "flux2", "qwenimage")},
    **{f"pid_v1pt5_student_{family}_h1024_d4_res_2048_distill": f"pid_student_{family}_2k"
       for family in ("flux", "flux2", "qwenimage")},
    **{f"PiD_res2k_sr4x_official_{family}_distill_4step": f"pid_v1_{family}_2k"
       for family in ("flux", "flux2", "sd3", "dinov2")},
    "PiD_res2k_sr8x_official_siglip_distill_4step": "pid_v1_siglip_2k",
    **{f"PiD_res2kto4k_sr4x_official_{family}_distill_4step": f"pid_v1_{family}_2kto4k"
       for family in ("sd3", "sdxl")},
    **{f"PiD_v1pt5_res2kto4k_sr4x_official_{family}_distill_4step": f"pid_v1pt5_{family}_2kto4k"
       for family in ("flux", "flux2", "qwenimage")},
}

NETWORK_OF_MODEL = {"pixeldit_t2i": "PixDiT_T2I", "pidnet": "PidNet"}
PATH_OF_NOISING = {"flow": "flow_matching"}
TOKENIZERS = {"dinov2": "dinov2_rae_tokenizer", "siglip": "scale_rae_tokenizer"}
INPUTS = {"teacher_forcing": "teacher_forcing", "self_rollout": "pidself_rollout"}

# Of the students: what else is without a counterpart.
STUDENTS_WITHOUT_COUNTERPART = {
    r"model\.config\.num_sample_steps": "of the teacher's solver; the student takes its own steps",
    r"(optimizer|scheduler|grad_clip)": "null in experiments that only draw",
}

# Reference values without a counterpart, each with its reason.
WITHOUT_COUNTERPART = {
    r".*\._target_|_recursive_|model\._recursive_": "class names of the reference",
    r"model\.config\.(input_data_key|input_caption_key)": "names of batch entries",
    r"model\.config\.conditioner\..*_key": "names of batch entries",
    r"model\.config\.y_norm(_scale_factor)?": "read by nothing in the reference",
    r"model\.config\.text_encoder_name": "the released Gemma; our `text.name`",
    r"model\.config\.(repa_config|loss_weights\.repa)": "REPA is off",
    r"model\.config\.lora_config\.(lora_target_modules|adapter_name)":
        "names of torch modules; our lora.targets are paths",
    r"model\.config\.tokenizer\.chunk_duration": "video",
    r"model\.config\.tokenizer\.(decoder|final|native|normal|pretrained|resize)_?\w*":
        "sizes and files of the two released feature codecs; fixed by the codec of that name",
    r"model\.config\.(net_teacher|net_fake_score)": "null: copies of the network",
    r"model\.config\.pretrained_teacher_path": "a path of the reference; our distill.teacher",
    r"model\.config\.latent_noising\.url_sigma_overrides": "null: our overrides are empty",
    r"optimizer\.(optim_type|model|fused)": "AdamW, by its values",
    r"scheduler\.verbosity_interval": "logging",
    r"checkpoint\.(?!save_iter).*": "the reference's own storage",
    r"trainer\.(distributed_parallelism|ddp\..*)": "torch's DistributedDataParallel",
    r"model_parallel": "an object that was not resolved",
}


@handles("pid", r"F00.*")
def check_experiments(case: Case) -> None:
    for name, reference in case.meta["experiments"].items():
        _check_experiment(name, reference)


def _check_experiment(name: str, reference: dict) -> None:
    module = importlib.import_module(f"configs.{CONFIG_OF_EXPERIMENT[name]}")
    config = module.get_config("")
    left_out = [*WITHOUT_COUNTERPART]
    left_out += STUDENTS_WITHOUT_COUNTERPART if config.objective == "pid_student" else ()
    for path, expected in _leaves(reference):
        if any(re.fullmatch(pattern, path) for pattern in left_out):
            continue
        ours = _our_value(config, path)
        assert ours == expected, f"{name}: {path} is {ours!r}, expected {expected!r}"
    target = reference["model"]["config"]["net"]["_target_"]
    assert NETWORK_OF_MODEL[config.model.name] == target, name


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _our_value(config: ConfigDict, path: str) -> Any:
    network = "model.config.net."
    if path.startswith(network):
        return config.model[path.removeprefix(network)]
    assert path in VALUES, f"nothing says what {path} is here"
    return VALUES[path](config)


VALUES: dict[str, Callable[[ConfigDict], Any]] = {
    "model.config.precision": lambda c: c.dtype,
    "model.config.caption_channels": lambda c: c.text.width,
    "model.config.model_max_length": lambda c: c.text.length,
    "model.config.chi_prompt": lambda c: list(c.text.instruction),
    "model.config.conditioner.caption.dropout_rate": lambda c: c.data.caption_dropout,
    "model.config.conditioner.lq_latent.dropout_rate": lambda c: c.noising.latent_dropout,
    "model.config.fm_timescale": lambda c: NETWORK_TIME_SCALE,
    "model.config.logit_mean": lambda c: c.flow.logit_mean,
    "model.config.logit_std": lambda c: c.flow.logit_std,
    "model.config.prediction_type": lambda c: c.flow.prediction_type,
    "model.config.shift": lambda c: c.flow.shift,
    "model.config.dynamic_shift": lambda c: None if not c.flow.dynamic_shift else "on",
    "model.config.dynamic_shift.base_shift": lambda c: c.flow.dynamic_base_shift,
    "model.config.dynamic_shift.base_image_size_for_shift_calc":
        lambda c: c.flow.dynamic_image_size if c.flow.dynamic_shift else None,
    "model.config.loss_weights.diffusion": lambda c: c.flow.loss_weight,
    "model.config.cfg_scale": lambda c: c.sample.guidance,
    "model.config.image_size": lambda c: c.sample.image_size,
    "model.config.negative_prompt": lambda c: c.sample.negative_prompt,
    "model.config.num_sample_steps": lambda c: c.sample.steps,
    "model.config.ema.enabled": lambda c: c.ema.enabled,
    "model.config.ema.rate": lambda c: c.ema.rate,
    "model.config.ema.iteration_shift": lambda c: c.ema.iteration_shift,
    "model.config.train_degradation_config.downscale": lambda c: c.model.sr_scale,
    "model.config.tokenizer.name":
        lambda c: TOKENIZERS.get(c.codec.name, f"{c.codec.name}_vae_tokenizer"),
    "model.config.state_ch": lambda c: c.model.lq_latent_channels,
    "model.config.latent_noising.enabled": lambda c: c.noising.enabled,
    "model.config.latent_noising.backbone": lambda c: PATH_OF_NOISING[c.noising.path],
    "model.config.latent_noising.apply_prob": lambda c: c.noising.apply_prob,
    "model.config.latent_noising.clean_latent_ratio": lambda c: c.noising.clean_latent_ratio,
    "model.config.latent_noising.add_sigma_min": lambda c: c.noising.add_sigma_min,
    "model.config.latent_noising.add_sigma_max": lambda c: c.noising.add_sigma_max,
    **{f"model.config.lq_latent_image_align_config.{key}": lambda c, key=key: c.align[key]
       for key in ("enabled", "weight", "sigma_power", "y_weight", "chroma_weight", "eps")},
    **{f"model.config.{theirs}": lambda c, ours=ours: c.distill[ours] for theirs, ours in {
        "teacher_prediction_type": "teacher_prediction_type", "teacher_cfg_scale":
        "teacher_guidance", "student_update_freq": "student_every", "student_sample_steps": "steps",
        "student_timestep": "first_time", "student_sample_type": "sampler",
        "dmd_timestep_clamp_min": "time_min", "dmd_timestep_clamp_max": "time_max",
        "vsd_loss_weight": "vsd_weight", "dsm_loss_weight": "dsm_weight",
        "gan_loss_weight_gen": "gan_weight", "gan_warmup_steps": "gan_warm_up_steps",
        "gan_use_same_t_noise": "gan_same_noise", "gan_r1_reg_weight": "r1_weight",
        "gan_r1_reg_alpha": "r1_alpha"}.items()},
    "model.config.student_t_list": lambda c: list(c.distill.times),
    "model.config.student_input_mode": lambda c: INPUTS[c.distill.input],
    "model.config.fake_score_lr": lambda c: c.distill.fake_score.lr,
    "model.config.fake_score_weight_decay": lambda c: c.distill.fake_score.weight_decay,
    "model.config.fake_score_betas": lambda c: list(c.distill.fake_score.betas),
    "model.config.discriminator_lr": lambda c: c.distill.discriminator.lr,
    "model.config.discriminator_weight_decay": lambda c: c.distill.discriminator.weight_decay,
    "model.config.net_discriminator.feature_indices":
        lambda c: list(c.distill.discriminator.feature_indices),
    "model.config.net_discriminator.num_blocks": lambda c: c.model.patch_depth,
    "model.config.net_discriminator.inner_dim": lambda c: c.model.hidden_size,
    **{f"model.config.net_discriminator.{key}": lambda c, key=key: c.distill.discriminator[key]
       for key in ("num_conv_layers", "patch_logits")},
    "model.config.lora_config.enabled": lambda c: c.lora.enabled,
    "model.config.lora_config.lora_rank": lambda c: c.lora.rank,
    "model.config.lora_config.lora_alpha": lambda c: c.lora.alpha,
    "optimizer.lr": lambda c: c.optim.lr,
    "optimizer.weight_decay": lambda c: c.optim.weight_decay,
    "optimizer.betas": lambda c: list(c.optim.betas),
    "optimizer.eps": lambda c: c.optim.eps,
    **{f"scheduler.{key}": lambda c, key=key: list(c.optim[key])
       for key in ("warm_up_steps", "cycle_lengths", "f_start", "f_max", "f_min")},
    **{f"grad_clip.{key}": lambda c, key=key: c.optim[key]
       for key in ("clip_norm", "force_finite", "skip_on_nonfinite", "skip_grad_norm_threshold")},
    "checkpoint.save_iter": lambda c: c.checkpoint.every,
    "trainer.max_iter": lambda c: c.total_steps,
    "trainer.grad_accum_iter": lambda c: c.optim.accumulate,
    "model_parallel.context_parallel_size": lambda c: c.mesh.sequence,
}
