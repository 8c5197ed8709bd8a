import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.common import reference
from pid_jax import images, loading, objectives, sampling_inputs, trained_range
from pid_jax.errors import RunFailed, UserError
from pid_jax.inference import PixelDecoder, PixelGenerator
from tests import drawing, tiny


def latents(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 2, 3, 16)).astype(np.float32)


def test_an_item_does_not_depend_on_its_batch(decoder):
    batch = latents(2)
    together = decoder.decode(batch, ["a", "b"], [0.0, 0.3], seed=[5, 6])
    alone = decoder.decode(batch[1:], "b", 0.3, seed=6)
    assert together.shape == (2, 32, 48, 3) and np.abs(together).max() <= 1
    np.testing.assert_allclose(together[1:], alone, atol=1e-5)


def test_every_option_reaches_the_picture(decoder):
    plain = {"prompt": "a cat", "sigma": 0.0, "seed": 0}
    changes = [{"prompt": "a rocket"}, {"sigma": 0.5}, {"seed": 1}, {"negative_prompt": "blurry"},
               {"guidance": 1.0}, {"guidance": 1.0, "steps": 3}]
    drawn = [decoder.decode(latents(1), **(plain | change)) for change in [{}, *changes]]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert np.abs(one - other).max() > 1e-4


def test_weights_are_chosen(decoder, pid_checkpoint):
    average = decoder.checkpoint.params
    net = PixelDecoder.from_checkpoint(pid_checkpoint, "net").checkpoint.params
    assert not np.array_equal(average["final_layer"]["linear"]["kernel"],
                              net["final_layer"]["linear"]["kernel"])
    with pytest.raises(UserError, match="'best' are unknown; choose one of ema, net, untrained"):
        PixelDecoder.from_checkpoint(pid_checkpoint, "best")


def test_untrained_weights_are_those_of_a_fresh_run(decoder, monkeypatch):
    objective, shapes = decoder.objective, decoder.objective.abstract_params

    def seed_everywhere(net, key):
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, jax.random.key_data(key)[-1]), shapes)

    monkeypatch.setattr(loading.models, "init_parameters", seed_everywhere)
    weights = loading.load_weights(decoder.checkpoint.folder, "untrained", objective,
                                     decoder.checkpoint.mesh)
    assert all(np.all(leaf == objective.config.seed) for leaf in jax.tree.leaves(weights))


def test_encoding_with_sigma_zero_is_the_codec(decoder):
    small = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32)
    codec = decoder.objective.codec
    clean = decoder.encode(small, [0.0, 0.5], seed=[1, 2])
    np.testing.assert_array_equal(clean[0], codec.encode(small)[0])
    assert np.abs(clean[1] - codec.encode(small)[1]).max() > 0.1


@pytest.mark.parametrize("bad, words", [
    (np.zeros((1, 2, 2, 4)), "'dct' latents .*16"),
    (np.zeros((2, 2, 16)), "'dct' latents"),
    (np.full((1, 2, 2, 16), np.nan), "64 values that are not finite"),
])
def test_latents_that_do_not_fit_are_refused(decoder, bad, words):
    with pytest.raises(UserError, match=words):
        decoder.decode(bad)


@pytest.mark.parametrize("options, words", [
    ({"sigma": 1.5}, "sigma 1.5"), ({"sigma": [0.1, 0.2]}, "2 entries for 1"),
    ({"seed": -1}, "seed -1"), ({"steps": 0}, "steps is 0"),
    ({"sigma": "high"}, "sigma high"), ({"sigma": [None]}, "sigma None"), ({"seed": "x"}, "seed x"),
    ({"seed": None}, "seed None"), ({"steps": float("nan")}, "steps is nan"),
    ({"steps": "2"}, "steps is 2"), ({"size": (float("nan"), 8)}, "size is .nan, 8."),
    ({"guidance": float("nan")}, "guidance is nan")])
def test_options_out_of_range_are_refused(decoder, options, words):
    with pytest.raises(UserError, match=words):
        decoder.decode(latents(1), **options)


def test_output_that_is_not_finite_is_an_error(decoder, monkeypatch):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, decoder.checkpoint.params)
    monkeypatch.setattr(decoder, "checkpoint",
                        dataclasses.replace(decoder.checkpoint, params=broken))
    with pytest.raises(RunFailed, match="not finite"):
        decoder.decode(latents(1))


def test_a_checkpoint_of_another_objective_is_refused(decoder, t2i_checkpoint):
    with pytest.raises(UserError, match="pid_jax.generate"):
        PixelDecoder.from_checkpoint(t2i_checkpoint)
    with pytest.raises(UserError, match="pid_jax.decode"):
        PixelGenerator.from_checkpoint(decoder.checkpoint.folder)


def test_generating_depends_on_prompt_and_seed_only(generator):
    one, two = generator.generate(["a", "b"], size=(16, 24), seed=[3, 4])
    again = generator.generate(["b", "a"], size=(16, 24), seed=[4, 3])
    assert one.shape == (16, 24, 3)
    np.testing.assert_allclose(again, [two, one], atol=1e-5)
    cut = generator.generate(["a"], size=(10, 18), seed=3)
    np.testing.assert_allclose(cut[0], one[:10, :18], atol=1e-5)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A decoder of a tiny distilled student with random weights."""
    workdir = drawing.write_checkpoint(tmp_path_factory.mktemp("student"), "pid_student")
    return PixelDecoder.from_checkpoint(workdir)


def test_student_draws_without_guidance_and_each_item_by_its_own_seed(student):
    batch = latents(2)
    together = student.decode(batch, ["a", "b"], seed=[5, 6])
    np.testing.assert_allclose(student.decode(batch[1:], "b", seed=6), together[1:], atol=1e-5)
    settings = sampling_inputs.sampler_settings(student.objective, 32, 48)
    assert settings.note() == {"steps": 2, "guidance": 1.0, "negative_prompt": ""}
    with pytest.raises(UserError, match="guidance is 3.0, but this checkpoint is a distilled"):
        student.decode(latents(1), guidance=3.0)


@pytest.mark.parametrize("tile", [8, 32])  # 4 tiles of a row; 2 of two rows
def test_tiles_draw_the_whole_picture(student, tile):
    """Attention, the LQ projection and the positions are the whole picture's: no seam, no tone."""
    latent = latents(2)
    whole = student.decode(latent, ["a", "b"], 0.2, seed=[4, 5])
    by_tiles = student.decode(latent, ["a", "b"], 0.2, seed=[4, 5], tile=tile)
    assert whole.std() > 0.1
    np.testing.assert_allclose(by_tiles, whole, atol=2e-5)


def test_tiles_of_the_picture_or_larger_are_the_whole(student):
    assert student.tile_rows((32, 48), 48) == student.tile_rows((32, 48), None) == 0
    assert [student.tile_rows((32, 48), tile) for tile in (8, 24, 32)] == [1, 1, 2]
    for tile in (9, 0, -8):
        with pytest.raises(UserError, match=f"tile is {tile} pixels; expected a multiple"):
            student.tile_rows((32, 48), tile)


def test_sizes_types_batches_and_noise(student):
    batch = latents(3)
    whole = student.decode(batch, ["a", "b", "c"], seed=[1, 2, 3])
    cut = student.decode(batch, ["a", "b", "c"], size=(29, 41), seed=[1, 2, 3], dtype="uint8",
                         batch_size=2)
    assert cut.shape == (3, 29, 41, 3) and cut.dtype == np.uint8
    assert np.abs(cut.astype(int) - images.to_uint8(whole[:, :29, :41]).astype(int)).max() <= 1
    for options, words in (({"size": (33, 48)}, "at most"), ({"dtype": "int8"}, "dtype is 'int8'"),
                           ({"noise": np.zeros((1, 2, 2, 3))}, "noise has shape"),
                           ({"prompt": np.zeros((3, 4, 17))}, "caption embeddings of shape"),
                           ({"batch_size": 0}, "batch_size is 0")):
        with pytest.raises(UserError, match=words):
            student.decode(batch, **options)


def test_closing_gives_the_memory_back(pid_checkpoint):
    def held() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    first = held()
    for _ in range(2):
        with PixelDecoder.from_checkpoint(pid_checkpoint) as decoder:
            decoder.decode(latents(1)[:, :, :2], guidance=1.0, steps=1)
            assert held() > first + 10_000
        assert held() <= first
    decoder.close()
    with pytest.raises(UserError, match="was closed"):
        decoder.decode(latents(1))


def test_sizes_outside_of_the_trained_range_are_named():
    config = reference.released_v1_up_to_4k("sdxl", lq_latent_channels=4)
    assert trained_range.departure(config, 3072, 4096) is None
    assert "2048^2 to 4096^2 pixels" in trained_range.departure(config, 1024, 1024)
    assert "0.56 to 1.79" in trained_range.departure(config, 8192, 1024)


def test_adapters_are_folded_by_their_scale(tmp_path):
    config = tiny.config("pixeldit_t2i", "unused")
    config.lora.update({"enabled": True, "rank": 2, "targets": ("attn/qkv_x/kernel$",)})
    objective = objectives.build(config)
    params = drawing.random_like(objective.abstract_params, 0)
    found = {scale: loading.folded(objective, params, scale) for scale in (0.0, None, 2.0)}
    kernel = {scale: np.asarray(tree["patch_blocks"]["attn"]["qkv_x"]["kernel"])
              for scale, (_, tree) in found.items()}
    np.testing.assert_array_equal(kernel[0.0], params["patch_blocks"]["attn"]["qkv_x"]["kernel"])
    np.testing.assert_allclose(kernel[2.0] - kernel[0.0], 2 * (kernel[None] - kernel[0.0]),
                               rtol=1e-3, atol=1e-5)
    plain, tree = found[None]
    assert jax.tree.structure(tree) == jax.tree.structure(plain.abstract_params)


def test_a_scale_needs_adapters(t2i_checkpoint):
    with pytest.raises(UserError, match="has no low-rank adapters"):
        PixelGenerator.from_checkpoint(t2i_checkpoint, lora_scale=0.5)


def test_8_bit_weights_draw_nearly_the_same(decoder):
    small = PixelDecoder(decoder.checkpoint)
    assert small.keep_weights_as("stored") is None and small.checkpoint is decoder.checkpoint
    change = small.keep_weights_as("int8")
    assert 0 < change.mean < 127.5 * 0.02 and change.mean < change.largest
    assert change.kept < change.stored and small.checkpoint.note()["weights_change"] == {
        "kind": "int8", "kept": change.kept, "stored": change.stored, "mean": change.mean,
        "largest": change.largest}
    difference = np.abs(small.decode(latents(1)) - decoder.decode(latents(1)))
    assert 0 < difference.mean() < 0.02
    assert small.checkpoint.note()["weights_kept_as"] == "int8"
    assert decoder.checkpoint.note()["weights_kept_as"] == "stored"
