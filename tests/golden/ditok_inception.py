"""Golden cases of the family ditok: Inception features, Frechet distance, Inception Score."""

import gzip
import hashlib
import json

import jax
import numpy as np

from pid_jax.evaluation import codebook, frechet, inception
from tests.golden.cases import Case, assert_close, handles
from tests.golden.layout import to_nchw, to_nhwc

# The case keeps every 37th row and every 23rd column of the resized pictures.
KEPT_ROWS, KEPT_COLUMNS = 37, 23


def recipe_weights(case: Case) -> dict[str, np.ndarray]:
    """The weights that the case's recipe makes from its seed, checked by their hash."""
    keys = case.meta["recipe_keys"]
    if isinstance(keys, str):
        with gzip.open(case.folder / keys) as file:
            keys = json.load(file)
    draws, digest, found = np.random.RandomState(case.meta["recipe_seed"]), hashlib.sha256(), {}
    for key, shape in keys:
        if not key.endswith("num_batches_tracked"):
            found[key] = _recipe_tensor(key, draws.standard_normal(int(np.prod(shape))), shape)
            digest.update(found[key].astype("<f4").tobytes())
    assert digest.hexdigest() == case.meta["recipe_sha256"]
    return found


def _recipe_tensor(key: str, draws: np.ndarray, shape: list[int]) -> np.ndarray:
    draws = draws.reshape(shape)
    if key.endswith("running_var"):
        draws = np.exp(0.2 * draws)
    elif key.endswith(("running_mean", "bias")):
        draws = 0.1 * draws
    elif len(shape) >= 2:
        draws = draws * np.sqrt(2 / np.prod(shape[1:]))
    else:
        draws = 1 + 0.1 * draws
    return draws.astype(np.float32)


@handles("ditok", r"inception_fid.*")
def check_inception(case: Case) -> None:
    params = inception.fold(recipe_weights(case), case.name)
    pictures = to_nhwc(case.inputs["images_uint8"])
    out = jax.jit(inception.inception)(params, pictures)
    resized = 128 * inception.prepare(pictures) + 128
    found = {"resized_299_rows": to_nchw(resized)[..., ::KEPT_ROWS, ::KEPT_COLUMNS],
             "2048": out.pooled, "logits": out.logits, "logits_unbiased": out.logits_unbiased,
             **dict(zip(("64", "192", "768"), out.shallow))}
    for name, expected in case.outputs.items():
        largest = np.abs(expected).max()
        atol = (case.tolerance["atol"] + case.tolerance["rtol"]) * largest
        assert_close(found[name], expected, atol, name=name)


@handles("ditok", r"fid_formula.*")
def check_frechet(case: Case) -> None:
    for run in sorted({name.split("/")[0] for name in case.inputs}):
        inputs, outputs = case.under(f"in/{run}/"), case.under(f"out/{run}/")
        deficient = len(inputs["feat1"]) < inputs["feat1"].shape[1]
        atol = 1e-3 if deficient else case.tolerance["atol"]
        given = [frechet.Gaussian(inputs[f"mu{n}"], inputs[f"sigma{n}"]) for n in (1, 2)]
        fitted = [frechet.fit(inputs[f"feat{n}"]) for n in (1, 2)]
        for pair in (given, fitted):
            for name in outputs.keys() - {"fid_self"}:
                assert_close([frechet.frechet_distance(*pair)], outputs[name], atol,
                             case.tolerance["rtol"], f"{run}/{name}")
        assert_close([frechet.frechet_distance(given[0], given[0])], outputs["fid_self"], atol,
                     name=f"{run}/fid_self")


@handles("ditok", r"eval_metrics.*")
def check_scores(case: Case) -> None:
    inputs = case.inputs
    distance = frechet.frechet_distance(frechet.fit(inputs["features_fake"]),
                                        frechet.fit(inputs["features_real"]))
    logits, eps = inputs["logits_fake"], case.meta["config"]["is_eps"]
    ten = frechet.inception_score(logits, splits=10, shuffle=True, eps=0)
    found = {"rFID": distance, "fid_torch_fidelity": distance,
             "IS": frechet.inception_score(logits, eps=eps)[0],
             "is_torch_fidelity_splits1": frechet.inception_score(logits, shuffle=True, eps=0)[0],
             "is_torch_fidelity_splits10_mean": ten[0], "is_torch_fidelity_splits10_std": ten[1]}
    counts = codebook.histogram(inputs["indices"], case.meta["config"]["num_codebook_entries"])
    found |= {"codebook_entropy_bits": codebook.entropy(counts),
              "codebook_usage": codebook.usage(counts)}
    for name, expected in case.outputs.items():
        assert_close([found[name]], expected, case.tolerance["atol"], case.tolerance["rtol"],
                     name)
