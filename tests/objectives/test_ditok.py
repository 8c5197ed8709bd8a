"""JiT and DiTok stage 2: what is frozen, ranges, averages, losses, starting points, whole runs."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from pid_jax import loading, objectives, tokenizer, train
from pid_jax.class_inference import ClassGenerator
from pid_jax.config import base_config, check_config
from pid_jax.errors import UserError
from pid_jax.evaluation import history
from pid_jax.models import build_model
from pid_jax.objectives.ditok_stage2 import FROZEN, DiTokStage2
from pid_jax.training import checkpoint
from tests import tiny

SIDE = 16
DITOK = {"name": "ditok", "codebook_size": 32, "token_size": 3, "vit_enc_dims": (8, 1, 2),
         "vit_dec_dims": (8, 2, 2, 4), "vit_enc_patch_size": 8, "patch_size": 8,
         "num_latent_tokens": 4, "crop_size": SIDE, "num_classes": 2}
JIT = {"name": "jit", "input_size": SIDE, "patch_size": 8, "hidden_size": 8, "depth": 2,
       "num_heads": 2, "bottleneck_dim": 4, "num_classes": 2, "in_context_len": 2,
       "in_context_start": 1}


def make_config(data="unused", model=DITOK, **ditok):
    config = base_config()
    config.objective = "jit_c2i" if model["name"] == "jit" else "ditok_stage2"
    config.model = ConfigDict(model)
    config.data.update({"path": str(data), "batch_size": 4, "image_size": SIDE, "threads": 0,
                        "resize": "adm", "caption_dropout": 1.0})
    config.mesh.data = 1
    config.ema.decay = 0.9
    config.ema.others = (("ema2", "constant", 0.5),)
    config.optim.lr = 1e-2
    config.sample.update({"steps": 1, "count": 2, "every": 4, "guidance": 1.0,
                          "sampler": "heun"})
    config.sample.prompts = ("0", "1")
    config.checkpoint.every = 2
    config.log.update({"every": 1, "tensorboard": False})
    config.total_steps = 4
    config.ditok.update(ditok)
    return config


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny.write_dataset(tmp_path_factory.mktemp("ramps") / "data", count=6, size=SIDE)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """Workdir and final state of a run of four steps."""
    folder = tmp_path_factory.mktemp("ditok")
    return folder, train.run(make_config(dataset), str(folder))


@pytest.fixture(scope="module")
def objective():
    return objectives.build(make_config())


@pytest.fixture(scope="module")
def params(objective):
    return objective.init(jax.random.key(0)).params


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


# ---- frozen

def test_training_leaves_the_tokenizer_bit_identical(run):
    folder, state = run
    fresh = jax.jit(objectives.build(make_config()).init)(jax.random.key(0)).params
    halfway = checkpoint.load_for_inference(folder / "checkpoints" / "2", "params")[1]
    for part in FROZEN:
        same(state.params[part], fresh[part])
        same(state.params[part], halfway[part])
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()),
                         state.params["diffusion_decoder"], fresh["diffusion_decoder"])
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_frozen_parameters_have_no_moments_and_no_average(run):
    _, state = run
    paths = checkpoint.flat(state.opt_state)
    assert not [path for path in paths if any(f"/{part}" in path for part in FROZEN)]
    assert state.ema.keys() == {"ema", "ema2"}
    assert all(average.keys() == {"diffusion_decoder"} for average in state.ema.values())


def test_two_averages_follow_as_plain_lerps(objective, params):
    state = objective.start(params)
    moved = state.replace(params=jax.tree.map(lambda p: p + 1, params))
    grads = jax.tree.map(jnp.zeros_like, {"diffusion_decoder": params["diffusion_decoder"]})
    after, _ = objective.update(moved, grads)
    for name, decay in (("ema", 0.9), ("ema2", 0.5)):
        expected = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new,
                                state.ema[name]["diffusion_decoder"],
                                after.params["diffusion_decoder"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
                     after.ema[name]["diffusion_decoder"], expected)


# ---- examples and losses

def test_the_tokenizer_sees_pictures_in_the_unit_range(objective, params):
    picture = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (1, SIDE, SIDE, 3)), jnp.float32)
    titok = build_model("titok", **{k: v for k, v in DITOK.items() if k in (
        "codebook_size", "token_size", "vit_enc_dims", "vit_enc_patch_size", "num_latent_tokens",
        "crop_size")}, with_decoder=False)
    weights = {part: params[part] for part in FROZEN}
    expected = titok.apply({"params": weights}, (picture + 1) / 2, method="encode")
    codes, indices = objective.encode(params, picture)
    np.testing.assert_array_equal(indices, expected.indices)
    np.testing.assert_allclose(codes, expected.vectors, atol=1e-6)
    again = objective.codes(params, {"indices": indices})
    np.testing.assert_allclose(again, codes, atol=1e-6)


def test_labels_are_none_unless_asked_for():
    batch = {"image": np.zeros((2, SIDE, SIDE, 3), np.float32), "caption": ["1", ""]}
    for use, expected in ((False, [2, 2]), (True, [1, 2])):
        objective = objectives.build(make_config(use_labels=use))
        assert objective.prepare(batch)["label"].tolist() == expected


def test_gamma_is_half_the_v_loss_at_the_start():
    model = DITOK | {"gamma_head": True}
    objective = objectives.build(make_config(model=model, gamma_weight=0.5))
    state = objective.init(jax.random.key(0))
    batch = {"image": jnp.ones((2, SIDE, SIDE, 3)), "label": jnp.array([2, 2])}
    examples = objective.examples(batch, jax.random.key(1))
    total, losses = objective.loss(state.params, examples)
    np.testing.assert_allclose(losses["gamma_loss"], 0.5 * losses["v_loss"], rtol=1e-6)
    np.testing.assert_allclose(total, 1.25 * losses["v_loss"], rtol=1e-6)
    assert losses["bpp_loss"] == losses["perceptual_loss"] == 0


def test_the_perceptual_loss_compares_prediction_and_picture(params):
    config = make_config(perceptual_weight=2.0)
    distance = lambda a, b: jnp.mean(jnp.abs(a - b), (1, 2, 3))
    objective = DiTokStage2(config, objectives.build(make_config()).net, distance)
    batch = {"image": jnp.full((2, SIDE, SIDE, 3), 0.5), "label": jnp.array([2, 2])}
    total, losses = objective.loss(params, objective.examples(batch, jax.random.key(1)))
    np.testing.assert_allclose(losses["perceptual_loss"], 0.5, rtol=1e-6)  # it predicts 0
    np.testing.assert_allclose(total, losses["v_loss"] + 1.0, rtol=1e-6)


def test_warm_up_multiplies_the_cosine():
    config = make_config()
    config.optim.update({"lr": 1e-4, "warm_up_steps": (10_000,), "cycle_lengths": (500_000,),
                         "f_start": (0.0,), "f_min": (0.01,), "decay": "cosine_throughout"})
    optimizer = objectives.build(config).optimizer
    rates = [1e-4 * float(optimizer.multiplier(step))
             for step in (0, 5_000, 10_000, 250_000, 500_000)]
    np.testing.assert_allclose(rates, [0, 4.99878e-5, 9.9902e-5, 5.05e-5, 1e-6], rtol=1e-5)


@pytest.mark.parametrize("changes, sentence", [
    ({"gamma_weight": 1.0}, "the head exists exactly"),
    ({"perceptual_weight": 1.0}, "set both, or 'none' and 0"),
    ({"perceptual_weight": 1.0, "perceptual": "vgg16_bn"}, "needs weights"),
    ({"perceptual": "resnet"}, "expected one of none, lpips_vgg")])
def test_settings_that_do_not_fit_are_refused(changes, sentence):
    config = make_config(**changes)
    with pytest.raises(UserError, match=sentence):
        check_config(config)
        objectives.build(config)


def test_other_picture_sizes_are_refused(objective):
    with pytest.raises(UserError, match="this network draws 16 x 16"):
        objective.check_picture(32, 32)


# ---- starting points

def write_titok(folder, params, leave_out=()):
    """A converted TiTok checkpoint with a decoder whose token inputs fit."""
    leaves = checkpoint.flat({part: params[part] for part in FROZEN})
    leaves |= {f"decoder/{path}": leaf + 1 for path, leaf in checkpoint.flat(
        params["diffusion_decoder"]).items() if path.startswith(("decoder_embed", "latent_token"))}
    leaves["decoder/mask_token"] = jnp.zeros((1, 8))
    kept = {path: leaf for path, leaf in leaves.items() if path not in leave_out}
    config = make_config()
    saver = checkpoint.Checkpointer(folder, 1)
    state = objectives.build(config).start(params).replace(params=checkpoint.nested(kept), ema={})
    saver.save(state, {}, config)
    saver.close()
    return folder


def start_from(folder, workdir):
    config = make_config()
    config.init_from = str(folder)
    objective = objectives.build(config)
    saver = checkpoint.Checkpointer(workdir, 1)
    mesh = train.mesh_lib.single_device()
    try:
        return train.restore.initial_state(config, objective, mesh, saver)[0]
    finally:
        saver.close()


def test_a_titok_starts_the_frozen_part_and_the_token_inputs(params, tmp_path):
    other = jax.tree.map(lambda leaf: leaf + 0.5, params)
    state = start_from(write_titok(tmp_path / "titok", other), tmp_path / "run")
    for part in FROZEN:
        same(state.params[part], other[part])
    decoder = state.params["diffusion_decoder"]
    for name in ("decoder_embed", "latent_token_positional_embedding"):
        same(decoder[name], jax.tree.map(lambda leaf: leaf + 1, other["diffusion_decoder"][name]))
    assert state.ema["ema"].keys() == {"diffusion_decoder"}


@pytest.mark.parametrize("key", ["latent_tokens", "quantize/embedding", "encoder/conv_out/kernel"])
def test_a_missing_frozen_key_is_an_error(params, tmp_path, key):
    folder = write_titok(tmp_path / "titok", params, leave_out=(key,))
    with pytest.raises(UserError, match=f"1 missing: {key}"):
        start_from(folder, tmp_path / "run")


# ---- whole runs

def test_a_run_writes_its_evaluation_history(run):
    folder, _ = run
    found = history.read_history(folder)
    assert [e.step for e in found] == [4]
    assert {"psnr", "codebook_entropy", "bpp"} <= found[0].metrics.keys()


def test_resuming_is_bit_exact(run, dataset, tmp_path):
    folder, state = run
    for part in ("config.json", "metrics.jsonl"):
        shutil.copy(folder / part, tmp_path)
    shutil.copytree(folder / "checkpoints" / "2", tmp_path / "checkpoints" / "2")
    again = train.run(make_config(dataset), str(tmp_path))
    same(again, state)


def test_a_checkpoint_encodes_and_decodes(run):
    folder, state = run
    codec = tokenizer.load_tokenizer(folder)
    same(codec.checkpoint.params["diffusion_decoder"], state.ema["ema"]["diffusion_decoder"])
    pictures = np.random.default_rng(3).uniform(-1, 1, (2, SIDE, SIDE, 3)).astype(np.float32)
    indices = codec.encode(pictures)
    drawn = codec.decode(indices, seed=5)
    assert drawn.shape == pictures.shape and np.abs(drawn).max() <= 1
    np.testing.assert_allclose(codec.decode(indices[1:], seed=6), drawn[1:], atol=1e-5)
    for wrong, sentence in ((indices[:, :2], "expected whole numbers"), (indices + 32, "outside")):
        with pytest.raises(UserError, match=sentence):
            codec.decode(wrong)


def test_jit_takes_a_step_and_draws():
    config = make_config(model=JIT)
    config.data.caption_fields = ("label",)
    objective = objectives.build(config)
    state = objective.init(jax.random.key(0))
    batch = {"image": np.zeros((4, SIDE, SIDE, 3), np.float32), "caption": ["0", "1", "", "1"]}
    prepared = objective.prepare(batch)
    assert prepared["label"].tolist() == [0, 1, 2, 1]
    after, metrics = jax.jit(objective.step)(state, prepared)
    assert int(after.step) == 1 and np.isfinite(metrics["loss"])
    inputs = objective.sample_inputs(None)
    assert inputs["label"].tolist() == [0, 1]
    generator = ClassGenerator(loading.Checkpoint(
        None, "net", objective, after.params, train.mesh_lib.single_device()))
    assert generator.generate([0, 2], seed=[4, 5]).shape == (2, SIDE, SIDE, 3)
