"""Golden cases of resizing and of what other programs know of their latents and pictures."""

import functools

import numpy as np

from pid_jax import images
from pid_jax.diffusion import noising, resampling
from pid_jax.encoders import pipeline_latents
from pid_jax.encoders.autoencoder import double
from pid_jax.encoders.autoencoder_codec import FAMILIES, batch_normalisation
from pid_jax.models.spatial import channels_to_space
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc
from tools.convert_torch_weights.fix_batch import PLACEHOLDER, read_fix_batch

MATRICES = {"bicubic": resampling.bicubic_matrix, "bilinear": resampling.bilinear_matrix,
            "bicubic_aa": resampling.bicubic_antialias_matrix}


def _close(case: Case, found, name: str, atol: float | None = None) -> None:
    assert_close(found, case.outputs[name], atol or case.tolerance["atol"],
                 case.tolerance["rtol"], name)


@handles("encoders", r"resize.*")
def check_resize(case: Case) -> None:
    for name, expected in case.outputs.items():
        source, mode = name.split("_", 1)
        image = to_nhwc(case.inputs[source])
        if mode.startswith("nearest"):
            found = double(image)
        else:
            found = resampling.resize(image, *expected.shape[-2:], MATRICES[mode])
        atol = case.tolerance["bicubic_atol"] if mode == "bicubic" else None
        _close(case, to_nchw(found), name, atol)


@handles("encoders", r"latent_layouts.*")
def check_layouts(case: Case) -> None:
    size, inputs = (case.meta["height"], case.meta["width"]), case.inputs
    statistics = inputs["flux2_bn_mean"], inputs["flux2_bn_var"]
    found = {f"{name}_latent": pipeline_latents.unpack(family, inputs[f"{name}_packed"], *size)
             for name, family in (("flux", "flux"), ("qwen", "qwenimage"), ("flux2", "flux2"))}
    found["flux2klein_latent"] = pipeline_latents.fold_flux2(
        to_nhwc(inputs["flux2klein_raw"]), *statistics)
    found["flux2_denorm"] = batch_normalisation(*statistics).undo(found["flux2_latent"])
    found["flux2_unpatchified"] = channels_to_space(found["flux2_denorm"], 2)
    for family in ("flux", "sd3", "sdxl"):
        channels = FAMILIES[family].network.get("z_channels", 16)
        latent = found["flux_latent"][..., :channels]
        found[f"{family}_denorm"] = FAMILIES[family].normalisation.undo(latent)
    for name in case.outputs:
        _close(case, to_nchw(found[name]), name)


@handles("encoders", r"sigma_frames.*")
def check_frames(case: Case) -> None:
    meta, inputs = case.meta, case.inputs
    sigmas = inputs["sdxl_sigmas"][meta["sdxl_ks"]].astype(np.float64)
    scaled = [pipeline_latents.reframe(inputs["sdxl_latent"][0], sigma, "euler", "vp")
              for sigma in sigmas]
    _close(case, np.stack([latent for latent, _ in scaled]), "sdxl_captured")
    _close(case, [sigma for _, sigma in scaled], "sdxl_captured_sigma")
    _close(case, np.stack([inputs["sd3_latent"][0]] * len(meta["sd3_ks"])), "sd3_captured")
    _close(case, inputs["sd3_sigmas"][meta["sd3_ks"]], "sd3_captured_sigma")
    for name in case.outputs:
        if "_noised_" in name:
            _check_noised(case, name)
    pixels = images.to_uint8(to_nhwc(inputs["image_pm1"]), truncate=True)
    np.testing.assert_array_equal(pixels, case.outputs["image_uint8"])
    _close(case, pipeline_latents.rae_times(meta["steps"], meta["rae_shift"]), "rae_t_schedule")


def _check_noised(case: Case, name: str) -> None:
    family, sigma = name.split("_noised_")
    noiser = noising.LatentNoiser(path="vp" if family == "sdxl" else "flow")
    clean, noise = case.inputs["clean"], case.inputs["noise"]
    _close(case, noiser.mix(clean, noise, np.full(len(clean), float(sigma), np.float32)), name)


@handles("encoders", r"load_input_image.*")
def check_input_image(case: Case) -> None:
    for name in case.outputs:
        pixels = case.inputs[name.replace("tensor", "rgb")]
        found = images.to_float(images.crop_to_multiple(pixels, 16))
        _close(case, to_nchw(found)[None], name)


@handles("encoders", r"fix_batch.*")
def check_fix_batch(case: Case) -> None:
    batch, meta = read_fix_batch(case.folder / case.meta["file"]), case.meta
    close = functools.partial(_close, case)
    close(to_nchw(batch.latents), "LQ_latent_f32")
    close(to_nchw(batch.small), "LQ_image")
    captions = [meta["caption"]] if isinstance(meta["caption"], str) else meta["caption"]
    assert list(batch.captions) == captions
    assert_close(batch.sigma, [meta["degrade_sigma"]] * len(captions), 1e-7, name="degrade_sigma")
    if "HQ_image_mean" in case.outputs:
        large = np.float32(PLACEHOLDER) / 127.5 - 1 if batch.large is None else batch.large
        close([np.mean(large)], "HQ_image_mean")
