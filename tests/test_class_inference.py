import json

import numpy as np
import pytest

from pid_jax import evaluate, generate, objectives
from pid_jax.class_inference import ClassGenerator, parse_classes
from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.training.checkpoint import Checkpointer
from tests import drawing
from tests.objectives.test_ditok import JIT, SIDE, make_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return drawing.write_checkpoint(tmp_path_factory.mktemp("classes"), "pixeldit_c2i")


@pytest.fixture(scope="module")
def generator(checkpoint):
    return ClassGenerator.from_checkpoint(checkpoint)


def test_classes_become_pictures_with_notes(checkpoint, tmp_path):
    assert command.run(generate.main, [
        "--checkpoint", str(checkpoint), "--out", str(tmp_path), "--classes", "0-1,2", "--seed",
        "5", "--size", "16x16"]) == 0
    note = json.loads((tmp_path / "002.json").read_text())
    assert (note["class"], note["seed"], note["size"]) == (2, 7, [16, 16])
    assert note["sampler"] == "flowdpm" and note["guidance_interval"] == [0.0, 1.0]
    assert json.loads((tmp_path / "grid.json").read_text())["rows"] == ["0", "1", "2"]


def test_jit_is_drawn_and_scored_with_its_sampler_noted(tmp_path):
    config = make_config(model=JIT)
    config.sample.update({"sampler": "heun", "guidance_interval": (0.1, 1.0), "steps": 2})
    objective = objectives.build(config)
    saver = Checkpointer(tmp_path / "run", 1)
    saver.save(objective.start(drawing.random_like(objective.abstract_params, 0)), {}, config)
    saver.close()
    assert command.run(evaluate.main, ["--checkpoint", str(tmp_path / "run"), "--out",
                                       str(tmp_path / "scores"), "--count", "2",
                                       "--batch_size", "2", "--guidance", "1"]) == 0
    (result,) = json.loads((tmp_path / "scores" / "results.json").read_text())
    assert result["sampler"] == "heun" and result["guidance_interval"] == [0.1, 1.0]
    assert [result[key] for key in ("steps", "guidance", "noise_scale", "size")] == [2, 1, 1, SIDE]


def test_a_picture_depends_on_its_class_and_seed_only(generator):
    together = generator.generate([1, 0, 1], (16, 16), seed=[4, 5, 6])
    alone = generator.generate([2, 2, 1], (16, 16), seed=[1, 2, 6])
    np.testing.assert_allclose(together[2], alone[2], atol=1e-5)
    assert np.abs(together[0] - together[2]).max() > 1e-3


def test_weights_by_name(checkpoint, generator):
    net = ClassGenerator.from_checkpoint(checkpoint, "net")
    assert not np.allclose(net.generate([0], (16, 16)), generator.generate([0], (16, 16)))
    with pytest.raises(UserError, match="weights 'other' are unknown"):
        ClassGenerator.from_checkpoint(checkpoint, "other")


def test_8_bit_weights_are_those_that_draw(checkpoint, generator):
    small = ClassGenerator.from_checkpoint(checkpoint)
    change = small.keep_weights_as("int8")
    assert 0 < change.mean < change.largest and change.kept < change.stored
    drawn = [each.generate([1], (16, 16)) for each in (small, generator)]
    assert 0 < np.abs(drawn[0] - drawn[1]).max() < 0.3


@pytest.mark.parametrize("labels, options, words", [
    ([4], {}, "class 4 is none"), ([0], {"size": (17,)}, "expected .height, width"),
    ([0], {"steps": 0}, "1 to 10000 steps"), ([0], {"seed": -1}, "seed -1")])
def test_bad_requests_are_refused(generator, labels, options, words):
    with pytest.raises(UserError, match=words):
        generator.generate(labels, **options)


def test_classes_on_the_command_line():
    assert parse_classes("0-2, 7,7") == [0, 1, 2, 7, 7]
    for text in ("cat", "3-1", "1,,2", "-1"):
        with pytest.raises(UserError, match="names no classes"):
            parse_classes(text)
    with pytest.raises(UserError, match="too many classes"):
        parse_classes("0-99999999999")
