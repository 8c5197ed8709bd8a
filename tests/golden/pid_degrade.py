"""Group E: down-sampling, pixel ranges and latent noise."""

import functools

import jax
import numpy as np

from pid_jax.diffusion import degrade, noising
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc

PATHS = {"flow_matching": "flow", "sdxl": "vp"}


def _close(case: Case):
    return functools.partial(assert_close, atol=case.tolerance["atol"],
                             rtol=case.tolerance["rtol"])


@handles("pid", r"E01.*")
def check_downsample(case: Case) -> None:
    for row in case.meta["table"]:
        expected = case.outputs[f"{row['image']}_down{row['downscale']:g}"]
        small = jax.jit(degrade.downsample, static_argnums=1)(
            _signed(case, row["image"]), row["downscale"])
        assert list(small.shape[1:3]) == row["out_hw"]
        _close(case)(to_nchw(small), expected, name=f"{row['image']} / {row['downscale']}")


def _signed(case: Case, image: str) -> np.ndarray:
    if image in case.inputs:
        return to_nhwc(case.inputs[image])
    return np.asarray(degrade.normalize_image(to_nhwc(case.inputs[f"{image}_uint8"])))


@handles("pid", r"E02.*")
def check_normalize_image(case: Case) -> None:
    for name, images in case.inputs.items():
        _close(case)(jax.jit(degrade.normalize_image)(images), case.outputs[name], name=name)


@handles("pid", r"E03.*")
def check_latent_noiser(case: Case) -> None:
    latent = to_nhwc(case.inputs["latent"])
    batch = len(latent)
    for run in case.meta["runs"]:
        noiser = _noiser(run["config"])
        given = case.under(f"in/{run['name']}/")
        unused = np.ones(batch, np.float32)
        draws = noising.NoiserDraws(
            given["apply_u"], given.get("clean_u", unused), given.get("sigma_u", unused),
            to_nhwc(given["eps"]) if "eps" in given else np.zeros_like(latent))
        noised, sigma = jax.jit(noiser.apply)(
            latent, noiser.sigma_ranges(run["urls"], batch), draws)
        out = case.under(f"out/{run['name']}/")
        _close(case)(to_nchw(noised), out["latent"], name=f"{run['name']}/latent")
        _close(case)(sigma, out["sigma"], name=f"{run['name']}/sigma")


def _noiser(config: dict) -> noising.LatentNoiser:
    overrides = tuple(
        noising.SigmaOverride(rule["url_substring"], rule["add_sigma_min"], rule["add_sigma_max"])
        for rule in config["url_sigma_overrides"] or ())
    return noising.LatentNoiser(config["apply_prob"], config["clean_latent_ratio"],
                                config["add_sigma_min"], config["add_sigma_max"],
                                PATHS[config["backbone"]], overrides)
