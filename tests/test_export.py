import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import pid_v1pt5_flux_2kto4k
from pid_jax import export, loading, objectives, sampling_inputs
from pid_jax.data import command
from pid_jax.errors import RunFailed
from pid_jax.exporting import onnx_file, stablehlo
from pid_jax.exporting.loop_free import LoopFree
from pid_jax.exporting.program import DecoderProgram, decoder_program
from pid_jax.inference import PixelDecoder
from pid_jax.parallel.mesh import single_device
from tests import drawing

HEIGHT, WIDTH = 32, 48
RUN_AND_LOOK = """
import runpy, sys
runpy.run_path(sys.argv[0], run_name="__main__")
assert not any(name.split(".")[0] in ("pid_jax", "flax", "safetensors") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A decoder of a tiny student that draws fresh noise after its first step."""
    workdir = drawing.write_checkpoint(tmp_path_factory.mktemp("student"), "pid_student")
    decoder = PixelDecoder.from_checkpoint(workdir)
    with decoder.objective.config.distill.unlocked():
        decoder.objective.config.distill.sampler = "sde"
    return decoder


def inputs_of(decoder, latents, sigma, seed):
    """What `decoder.decode` draws from, as an artefact takes it."""
    size, seeds = decoder.output_size(latents.shape), sampling_inputs.seeds(seed, len(latents))
    return {"noise": np.asarray(sampling_inputs.starting_noise(seeds, size)), "latent": latents,
            "text": decoder.objective.prompts(["a cat"] * len(latents)),
            "sigma": np.asarray(sigma, np.float32)}


def test_artefact_draws_in_a_process_without_this_package(decoder, pid_checkpoint, tmp_path):
    assert command.run(export.main, ["--checkpoint", str(pid_checkpoint), "--out", str(tmp_path),
                                     "--size", f"{HEIGHT}x{WIDTH}", "--prompt", "a cat"]) == 0
    latents = np.random.default_rng(0).standard_normal((3, 2, 3, 16)).astype(np.float32)
    inputs = inputs_of(decoder, latents, [0, 0.2, 0.4], [1, 2, 3])
    np.savez(tmp_path / "in.npz", **inputs)
    script = RUN_AND_LOOK.replace("sys.argv[0]", repr(str(tmp_path / "run_decoder.py")))
    subprocess.run([sys.executable, "-I", "-c", script, tmp_path, tmp_path / "in.npz",
                    tmp_path / "out.npy"], check=True, cwd=tmp_path)
    expected = decoder.decode(latents, "a cat", [0, 0.2, 0.4], seed=[1, 2, 3])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "text.npy"), inputs["text"][:1])
    card = json.loads((tmp_path / "decoder.stablehlo.json").read_text())
    assert card["inputs"]["latent"] == ["batch", 2, 3, 16] and card["steps"] == 2
    assert card["largest_difference"] < 1e-5 and card["config"]["objective"] == "pid_teacher"
    assert {file.name for file in tmp_path.iterdir()} == {
        *card["files"], "decoder.stablehlo.json", "in.npz", "out.npy"}


def test_weights_are_a_safetensors_file(decoder, tmp_path):
    from safetensors.flax import load_file
    program = decoder_program(decoder, HEIGHT, WIDTH)
    weights = program.weights | {"half": jax.numpy.ones((3,), jax.numpy.bfloat16)}
    stablehlo.write_weights(tmp_path / "weights.safetensors", weights)
    jax.tree.map(np.testing.assert_array_equal, load_file(tmp_path / "weights.safetensors"),
                 dict(weights))


def test_the_full_size_decoder_is_a_program_of_a_few_kilobytes():
    """The released network at 4096 pixels in bfloat16, for every platform; described, not run."""
    mesh = single_device()
    objective = loading.for_drawing(objectives.build(
        pid_v1pt5_flux_2kto4k.get_config("offline"), mesh), None)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16),
                          objective.abstract_params)
    decoder = PixelDecoder(loading.Checkpoint(Path("1"), "planned", objective, params, mesh))
    program = decoder_program(decoder, 4096, 4096, dtype="bfloat16")
    assert sum(leaf.size for leaf in program.weights.values()) > 1.3e9
    blob = stablehlo.serialised(program)
    assert len(blob) < 2**20
    found = jax.export.deserialize(bytearray(blob))
    assert found.platforms == stablehlo.PLATFORMS
    assert str(found.out_avals[0]) == "float32[batch,4096,4096,3]"


def test_fresh_noise_of_a_stochastic_student_is_an_input(student):
    program = decoder_program(student, HEIGHT, WIDTH)
    assert program.inputs["fresh"] == (1, HEIGHT, WIDTH, 3)
    latents = np.random.default_rng(0).standard_normal((2, 2, 3, 16)).astype(np.float32)
    inputs = inputs_of(student, latents, [0, 0.3], [4, 5])
    inputs["fresh"] = sampling_inputs.fresh_noise(
        sampling_inputs.seeds([4, 5], 2), (HEIGHT, WIDTH), jax.numpy.int32(0))[:, None]
    drawn = jax.jit(program.call)(program.weights, inputs)
    np.testing.assert_allclose(drawn, student.decode(latents, "a cat", [0, 0.3], seed=[4, 5]),
                               atol=1e-5)
    assert "fresh" not in decoder_program(student, HEIGHT, WIDTH, steps=1).inputs


@pytest.mark.parametrize("which", [pytest.param("teacher", marks=pytest.mark.slow), "student"])
def test_onnxruntime_draws_the_same(which, decoder, student, tmp_path):
    program = decoder_program(decoder if which == "teacher" else student, HEIGHT, WIDTH)
    assert onnx_file.write_onnx(tmp_path / "decoder.onnx", program) == ["decoder.onnx"]
    for batch in (1, 3):
        inputs = program.random_inputs(batch)
        expected = jax.jit(program.call)(program.weights, inputs)
        np.testing.assert_allclose(onnx_file.run_onnx(tmp_path / "decoder.onnx", inputs), expected,
                                   atol=1e-5)


def test_loops_inside_loops_are_written_out():
    def function(x, table):
        def outer(carry, row):
            carry, last = jax.lax.scan(lambda c, r: (c * 0.5 + r, c), carry, row, reverse=True)
            return carry, jax.numpy.stack([last.sum(0), carry])
        return jax.lax.scan(outer, x, table)

    x, table = np.ones(3, np.float32), np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    traced = jax.make_jaxpr(function)(x, table)
    evaluate = lambda x: LoopFree()(traced, [x, table])
    for found, expected in zip(evaluate(x), jax.tree.leaves(function(x, table))):
        np.testing.assert_allclose(found, expected)
    assert str(jax.make_jaxpr(evaluate)(x)).count("while[") == 1


def test_an_artefact_that_draws_something_else_is_removed(decoder, tmp_path):
    program = decoder_program(decoder, HEIGHT, WIDTH)
    path = tmp_path / "decoder.onnx"
    path.touch()
    with pytest.raises(RunFailed, match="differ by .* it was removed"):
        export.checked(path, program, lambda inputs: inputs["noise"], "float32")
    assert not path.exists()


def test_a_failed_export_leaves_no_artefact_and_no_earlier_card(decoder, tmp_path, monkeypatch):
    """Weights that are nan, exported where an artefact stands."""
    def write(folder, program):
        (folder / "decoder.onnx").touch()
        return "decoder.onnx", ["decoder.onnx"], None

    def program(*_):
        return DecoderProgram(lambda *_: jax.numpy.full((2, 8, 8, 3), np.nan), {},
                              {"noise": (8, 8, 3)}, None)

    (tmp_path / "decoder.onnx.json").write_text("{}")
    monkeypatch.setattr(PixelDecoder, "from_checkpoint", lambda *_, **__: decoder)
    monkeypatch.setattr(export, "decoder_program", program)
    monkeypatch.setitem(export.WRITERS, "onnx", write)
    assert command.run(export.main, ["--checkpoint", "x", "--out", str(tmp_path), "--format",
                                     "onnx", "--dtype", "float32"]) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, words", [
    (["--size", "30x48"], "do not fit"), (["--steps", "0"], "steps is 0"),
    (["--format", "onnx", "--dtype", "bfloat16"], "ONNX is written in float32"),
    (["--format", "torch"], "invalid choice")])
def test_bad_requests_are_one_sentence(flags, words, decoder, pid_checkpoint, tmp_path,
                                       monkeypatch, capsys):
    monkeypatch.setattr(PixelDecoder, "from_checkpoint", lambda *_, **__: decoder)
    assert command.run(export.main, ["--checkpoint", str(pid_checkpoint), "--out",
                                     str(tmp_path / "out"), *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
