import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from pid_jax import evaluate
from pid_jax.errors import UserError
from pid_jax.evaluation import drawing, features, frechet, inception
from tests import drawing as checkpoints
from tests import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("classes"), "pixeldit_c2i")


def draw(labels, seeds):
    """Pictures that depend on label and seed alone."""
    return np.stack([np.random.default_rng((label, seed)).integers(0, 256, (4, 4, 3), np.uint8)
                     for label, seed in zip(labels, seeds)])


PLAN = drawing.Plan(count=620, classes=7, seed=3)


def test_hosts_and_batches_change_nothing(tmp_path):
    settings = {"step": 1}
    for host in (1, 0):
        drawing.draw_parts(PLAN, draw, tmp_path / "two", settings, 64, host, 2)
    drawing.draw_parts(PLAN, draw, tmp_path / "one", settings, 100)
    one, two = (drawing.gather(PLAN, tmp_path / name) for name in ("one", "two"))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, draw(PLAN.labels(0, 620), range(3, 623)))


def test_ten_thousand_features_on_two_hosts_equal_one(tmp_path):
    plan = drawing.Plan(count=10_000, classes=10)
    colours = lambda labels, seeds: np.stack([
        np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8) for seed in seeds])
    for host in (0, 1):
        drawing.draw_parts(plan, colours, tmp_path / "two", {}, 500, host, 2)
    drawing.draw_parts(plan, colours, tmp_path / "one", {}, 250)
    one, two = (frechet.fit(features.pixel_features(drawing.gather(plan, tmp_path / name)))
                for name in ("one", "two"))
    np.testing.assert_array_equal(one.covariance, two.covariance)
    other = frechet.Gaussian(one.mean + 1, one.covariance)
    assert frechet.frechet_distance(one, other) == frechet.frechet_distance(two, other)


def test_what_is_there_is_not_drawn_again(tmp_path):
    drawing.draw_parts(PLAN, draw, tmp_path, {"step": 1}, 64, host=0, hosts=2)
    with pytest.raises(UserError, match="lacks 1 of 3 parts"):
        drawing.gather(PLAN, tmp_path)
    made = []

    def counted(labels, seeds):
        made.extend(seeds)
        return draw(labels, seeds)

    drawing.draw_parts(PLAN, counted, tmp_path, {"step": 1}, 50)
    assert set(made) == set(range(3 + 250, 3 + 500))
    with pytest.raises(UserError, match="step was 1, now 2"):
        drawing.draw_parts(PLAN, draw, tmp_path, {"step": 2}, 50)


def test_damaged_parts_and_settings_are_named(tmp_path):
    drawing.draw_parts(PLAN, draw, tmp_path, {"step": 1}, 250)
    for pictures, words in ((draw([1], [1]), "holds 1 pictures instead of 250"),
                            (np.zeros((0, 4, 4, 3), np.uint8), "at least one picture")):
        np.savez(drawing.part_path(tmp_path, 1), arr_0=pictures)
        with pytest.raises(UserError, match=words):
            drawing.gather(PLAN, tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / drawing.SETTINGS).write_text(text)
        with pytest.raises(UserError, match="are damaged"):
            drawing.draw_parts(PLAN, draw, tmp_path, {"step": 1}, 250)


def test_a_run_is_scored_and_goes_on(checkpoint, tmp_path, capsys):
    data = tiny.write_dataset(tmp_path / "data", 8)
    arguments = ["--checkpoint", str(checkpoint), "--reference", str(data), "--out",
                 str(tmp_path / "out"), "--count", "9", "--batch_size", "4", "--guidance", "1",
                 "2", "--steps", "2"]
    evaluate.main(arguments)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["guidance"] for result in results] == [1.0, 2.0]
    assert results[0]["sampler"] == "flowdpm" and results[0]["weights"] == "ema"
    assert all(result["scores"]["pixel_frechet"] > 0 for result in results)
    assert "unavailable" in capsys.readouterr().out
    folder = tmp_path / "out" / "step3_ema_guidance2"
    with np.load(folder / "samples.npz") as saved:
        assert saved["arr_0"].shape == (9, 32, 32, 3) and list(saved["arr_1"][:4]) == [0, 1, 2, 0]
    assert (folder / "grid.png").exists() and (tmp_path / "out" / "scores.png").exists()
    evaluate.main([*arguments[:4], *arguments[4:]])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results


def test_ready_pictures_against_saved_statistics(tmp_path):
    extract = features.make_extractor(None)
    rng = np.random.default_rng(0)
    real, fake = (rng.integers(0, high, (40, 4, 4, 3), np.uint8) for high in (256, 200))
    features.reference_of(real, extract).save(tmp_path / "reference.npz")
    drawing.save_samples(tmp_path / "fake.npz", fake, None)
    evaluate.main(["--samples", str(tmp_path / "fake.npz"), "--reference",
                   str(tmp_path / "reference.npz"), "--out", str(tmp_path / "out")])
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())
    expected = frechet.frechet_distance(
        *(frechet.fit(pictures.reshape(40, -1) / 255) for pictures in (fake, real)))
    assert result["scores"]["pixel_frechet"] == pytest.approx(expected, rel=1e-4)


def test_bad_references_are_refused(tmp_path):
    extract = features.make_extractor(None)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "odd.npz", mu=np.zeros(3), sigma=np.zeros((2, 2)))
    np.savez(tmp_path / "float.npz", arr_0=np.zeros((3, 4, 4, 3)))
    (tmp_path / "broken.npz").write_bytes(b"PK")
    np.savez(tmp_path / "none.npz", arr_0=np.zeros((0, 4, 4, 3), np.uint8))
    np.savez(tmp_path / "nan.npz", mu_p=np.zeros(2), sigma_p=np.full((2, 2), np.nan))
    np.savez(tmp_path / "text.npz", mu_p=np.array(["a"]), sigma_p=np.eye(1))
    np.savez(tmp_path / "negative.npz", mu_p=np.zeros(1), sigma_p=-np.eye(1))
    for name, words in (("other.npz", "neither pictures"), ("odd.npz", r"expected \[D\]"),
                        ("none.npz", "at least one picture"), ("nan.npz", "not all finite"),
                        ("text.npz", "not all finite"), ("negative.npz", "no covariance"),
                        ("float.npz", "expected uint8"), ("broken.npz", "it is no zip file")):
        with pytest.raises(UserError, match=words):
            features.read_reference(tmp_path / name, extract)


@pytest.mark.slow
def test_all_scores_with_random_inception_weights(tmp_path):
    rng = np.random.default_rng(0)
    save_file({name: np.float32(rng.standard_normal(shape) * (2 / max(1, np.prod(shape[1:]))) ** 0.5
                                if len(shape) > 1 else np.ones(shape))
               for name, shape in inception.tensor_shapes().items()}, tmp_path / "w.safetensors")
    real, fake = (rng.integers(0, high, (6, 16, 16, 3), np.uint8) for high in (256, 200))
    for name, drawn in (("real", real), ("fake", fake)):
        drawing.save_samples(tmp_path / f"{name}.npz", drawn, None)
    evaluate.main(["--samples", str(tmp_path / "fake.npz"), "--reference",
                   str(tmp_path / "real.npz"), "--inception", str(tmp_path / "w.safetensors"),
                   "--out", str(tmp_path / "out"), "--period", "4"])
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"fid", "sfid", "inception_score", "precision", "recall", "pixel_frechet",
            "artefact_pattern"} <= result["scores"].keys()
    saved = features.read_reference(tmp_path / "out" / "reference.npz", None)
    assert saved.gaussians.keys() == features.KINDS.keys() and saved.pictures == 6


def test_inception_features_are_scored_by_name():
    rng = np.random.default_rng(0)
    made = {"pooled": rng.standard_normal((30, 4)), "spatial": rng.standard_normal((30, 3)),
            "pixels": rng.standard_normal((30, 2)), "logits_unbiased": rng.standard_normal((30, 5))}
    reference = features.Reference({kind: frechet.fit(made[kind]) for kind in features.KINDS},
                                   made["pooled"])
    from pid_jax.evaluation.scores import score
    found = score(made, reference)
    assert found["fid"] == pytest.approx(0, abs=1e-9) and found["precision"] == 1.0
    assert {"sfid", "recall", "inception_score", "pixel_frechet"} <= found.keys()
    assert "fid" not in score({"pixels": made["pixels"]}, reference)
    assert jax.tree.leaves(score({}, None)) == []
