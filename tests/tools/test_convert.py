"""convert, verify and export: round trips, what is refused, and what is left after a failure."""

import functools
import gc
import json
import os
import threading
import time
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from ml_collections import ConfigDict

from pid_jax.config import base_config, to_json
from pid_jax.errors import UserError
from pid_jax.training.checkpoint import load_for_inference
from tests import tiny
from tests.tools import forge
from tools.convert_torch_weights import orbax_io
from tools.convert_torch_weights.card import read_card
from tools.convert_torch_weights.convert import Request, convert
from tools.convert_torch_weights.export import export
from tools.convert_torch_weights.mappings import jax_to_torch, table_for
from tools.convert_torch_weights.matching import AUX_HEAD, LQ, Exceptions
from tools.convert_torch_weights.readers import LazyTensor, open_source
from tools.convert_torch_weights.verify import verify

T2I = {key: value for key, value in tiny.NETWORK.items() if key != "patch_depth"} | {
    "patch_depth": 3}
V1 = T2I | {"lq_hidden_dim": 8, "lq_num_res_blocks": 1, "lq_interval": 2, "sr_scale": 2,
            "lq_latent_channels": 16, "latent_spatial_down_factor": 8}
V1PT5 = V1 | {"lq_gate_type": "sigma_aware_per_token", "pit_lq_inject": True,
              "lq_conv_padding_mode": "replicate", "lq_aux_rgb_head": True}
FLUX2 = V1PT5 | {"lq_latent_channels": 32, "lq_latent_unpatchify_factor": 2,
                 "latent_spatial_down_factor": 16}
DISCRIMINATOR = {"feature_indices": (1,), "num_blocks": 3, "inner_dim": 24, "num_conv_layers": 2}
NETWORKS = {"t2i": ("pixeldit_t2i", T2I), "v1": ("pidnet", V1), "v1.5": ("pidnet", V1PT5),
            "flux2": ("pidnet", FLUX2), "discriminator": ("discriminator", DISCRIMINATOR)}


@functools.cache
def state_dict(network: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A PyTorch state dict of random numbers."""
    rng = np.random.default_rng(seed)
    return {key: np.asarray(rng.standard_normal(shape, np.float32))
            for key, shape in table(network).shapes().items()}


@functools.cache
def table(network: str):
    name, options = NETWORKS[network]
    return table_for(name, options)


def prefixed(prefix: str, tensors: dict) -> dict:
    return {prefix + key: value for key, value in tensors.items()}


def request(tmp_path, network: str, src, **changes) -> Request:
    name, options = NETWORKS[network]
    config = base_config()
    config.model = ConfigDict({"name": name, **options})
    file = tmp_path / f"{network}.json"
    file.write_text(to_json(config))
    return Request(str(src), changes.pop("dst", tmp_path / "out"), config=str(file), **changes)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_round_trip_is_bit_equal(tmp_path, network, ending):
    src = forge.save(tmp_path / f"src{ending}", prefixed("net.", state_dict(network)))
    card = convert(request(tmp_path, network, src))
    assert card["parameters"] == sum(v.size for v in state_dict(network).values())
    assert verify(str(src), tmp_path / "out") == len(state_dict(network))
    export(tmp_path / "out", tmp_path / f"back{ending}", "net.")
    back, before = open_source(tmp_path / f"back{ending}"), open_source(src)
    assert back.tensors.keys() == before.tensors.keys()
    for key, tensor in before.tensors.items():
        assert tensor.read().tobytes() == back.tensors[key].read().tobytes(), key


def test_bfloat16_is_kept_and_made(tmp_path):
    halves = {k: v.astype(ml_dtypes.bfloat16) for k, v in state_dict("t2i").items()}
    src = forge.save(tmp_path / "half.safetensors", halves)
    assert convert(request(tmp_path, "t2i", src))["dtype"] == "bfloat16"
    full = forge.save(tmp_path / "full.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", full, dst=tmp_path / "cast", dtype="bfloat16"))
    for folder in ("out", "cast"):
        assert verify(str(src), tmp_path / folder) == len(halves)
        export(tmp_path / folder, tmp_path / f"{folder}.pth")
        for key, tensor in open_source(tmp_path / f"{folder}.pth").tensors.items():
            np.testing.assert_array_equal(tensor.read(), halves[key])


def test_the_folder_loads_for_inference(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("v1.5"))
    convert(request(tmp_path, "v1.5", src))
    config, params = load_for_inference(tmp_path / "out")
    assert config.model.name == "pidnet" and config.param_dtype == "float32"
    assert config.model.lq_gate_type == "sigma_aware_per_token"
    back = jax_to_torch(table("v1.5"), jax.device_get(params))
    for key, value in state_dict("v1.5").items():
        np.testing.assert_array_equal(back[key], value)


def test_parts_are_chosen_and_the_card_says_so(tmp_path):
    ema = state_dict("t2i", seed=1)
    src = forge.save(tmp_path / "src.pth", prefixed("net.", state_dict("t2i"))
                     | prefixed("net_ema.", ema))
    card = convert(request(tmp_path, "t2i", src))
    assert card["weights"] == "ema" and card["left_out"]["parts"] == {"net": len(ema)}
    assert card["source"]["prefixes"] == {"net.": len(ema), "net_ema.": len(ema)}
    assert set(card["source"]["sha256"]) == {"src.pth"} and "NSCLv1" in card["licence"]["weights"]
    assert card == read_card(tmp_path / "out")
    convert(request(tmp_path, "t2i", src, which="net", overwrite=True))
    assert read_card(tmp_path / "out")["weights"] == "net"
    with pytest.raises(UserError, match="is .* in the source and .* in the checkpoint"):
        verify(str(src), tmp_path / "out", "ema")


# ---- what is refused

def refused(tmp_path, network: str, tensors: dict, **changes) -> str:
    """The message of a conversion that must fail and leave nothing."""
    src = forge.save(tmp_path / "src.pth", tensors)
    wanted = request(tmp_path, network, src, **changes)
    before = names(tmp_path)
    with pytest.raises(UserError) as caught:
        convert(wanted)
    assert names(tmp_path) == before
    assert "src.pth" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_every_fault_is_listed(tmp_path):
    tensors = dict(state_dict("t2i"))
    del tensors["final_layer.norm.weight"], tensors["pixel_blocks.0.norm1.weight"]
    tensors |= {"strange.weight": np.zeros(3, np.float32),
                "y_embedder.proj.bias": np.zeros(5, np.float32),
                "y_embedder.norm.weight": np.zeros(24, np.int64)}
    message = refused(tmp_path, "t2i", tensors)
    for part in ("5 tensors not as expected", "final_layer.norm.weight is missing",
                 "pixel_blocks.0.norm1.weight is missing", "strange.weight is not known",
                 "y_embedder.proj.bias has shape [5], expected [24]",
                 "y_embedder.norm.weight holds int64"):
        assert part in message


def test_every_tensor_that_is_not_finite_is_listed(tmp_path):
    tensors = {k: v.copy() for k, v in state_dict("t2i").items()}
    tensors["final_layer.linear.bias"][1] = np.nan
    tensors["patch_blocks.1.mlp_x.w1.weight"][3, 2] = np.inf
    message = refused(tmp_path, "t2i", tensors)
    assert "2 tensors with" in message and "final_layer.linear.bias" in message
    assert "patch_blocks.1.mlp_x.w1.weight" in message


def test_a_value_that_overflows_in_the_cast_is_refused(tmp_path):
    tensors = {k: v.astype(np.float64) for k, v in state_dict("t2i").items()}
    tensors["final_layer.linear.bias"][0] = 1e300
    assert "final_layer.linear.bias" in refused(tmp_path, "t2i", tensors)


@pytest.mark.parametrize("file, config, words", [
    ("v1", "v1.5", ["PiD v1 for flux or sd3 latents", "describes PiD v1.5 for flux or qwenimage",
                    "lq_gate_type is 'sigma_aware_per_token_per_dim' in the weights, "
                    "'sigma_aware_per_token' in the config", "pit_lq_inject is False"]),
    ("v1.5", "flux2", ["PiD v1.5 for flux or qwenimage latents (16 channels",
                       "lq_proj.latent_proj.0.weight has shape [8, 16, 3, 3], expected [8, 8, 3, 3]"
                       ]),
    ("v1", "t2i", ["the weights are PiD v1", "describes text-to-image PixelDiT"]),
    ("t2i", "v1", ["the weights are text-to-image PixelDiT", "describes PiD v1", "--fresh-lq"]),
])
def test_the_wrong_pair_is_named(tmp_path, file, config, words):
    message = refused(tmp_path, config, state_dict(file))
    for part in words:
        assert part in message, message


def test_text_to_image_weights_start_a_pid_network(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    card = convert(request(tmp_path, "v1.5", src, allowed=Exceptions(fresh=LQ)))
    assert set(card["fresh"]) == state_dict("v1.5").keys() - state_dict("t2i").keys()
    assert verify(str(src), tmp_path / "out") == len(state_dict("t2i"))
    _, params = load_for_inference(tmp_path / "out")
    assert not np.any(params["lq_proj"]["output_heads"]["kernel"])  # zero_init_lq
    assert np.all(params["lq_proj"]["gate_modules"]["content_proj"]["bias"] == 2)


def test_the_auxiliary_head_may_start_fresh_or_be_dropped(tmp_path):
    head = {k for k in state_dict("v1.5") if k.startswith(AUX_HEAD)}
    bare = {k: v for k, v in state_dict("v1.5").items() if k not in head}
    assert "--fresh-aux-head" in refused(tmp_path, "v1.5", bare)
    src = forge.save(tmp_path / "src.pth", bare)
    card = convert(request(tmp_path, "v1.5", src, allowed=Exceptions(fresh=AUX_HEAD)))
    assert set(card["fresh"]) == head
    src = forge.save(tmp_path / "whole.pth", state_dict("v1.5"))
    without = request(tmp_path, "v1.5", src, dst=tmp_path / "dropped",
                      changes={"lq_aux_rgb_head": "False"}, allowed=Exceptions(dropped=AUX_HEAD))
    assert set(convert(without)["left_out"]["keys"]) == head
    assert verify(str(src), tmp_path / "dropped") == len(bare)


def test_a_stack_is_never_half_fresh(tmp_path):
    tensors = dict(state_dict("v1"))
    del tensors["lq_proj.output_heads.1.weight"]
    message = refused(tmp_path, "v1", tensors, allowed=Exceptions(fresh=LQ))
    assert "lq_proj.output_heads.1.weight is missing" in message


def test_destinations(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    with pytest.raises(UserError, match="out exists; .*--overwrite"):
        convert(request(tmp_path, "t2i", src))
    convert(request(tmp_path, "t2i", src, overwrite=True))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="not made by a conversion"):
        convert(request(tmp_path, "t2i", src, dst=mine, overwrite=True))
    assert names(mine) == ["letter.txt"]
    assert names(tmp_path) == ["mine", "out", "src.pth", "t2i.json"]


def test_an_old_folder_outlives_a_failed_overwrite(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    bad = forge.save(tmp_path / "bad.pth", {
        k: v * np.float32(np.nan) for k, v in state_dict("t2i").items()})
    with pytest.raises(UserError, match="not finite"):
        convert(request(tmp_path, "t2i", bad, overwrite=True))
    assert verify(str(src), tmp_path / "out") == len(state_dict("t2i"))


def test_an_overwrite_takes_nothing_else_along(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    inside = forge.save(tmp_path / "out" / "src.pth", state_dict("t2i"))
    for source in (src, inside):
        with pytest.raises(UserError, match=r"holds what no conversion wrote \(src.pth\)"):
            convert(request(tmp_path, "t2i", source, overwrite=True))
    inside.unlink()
    (tmp_path / "out" / "checkpoints" / "500").mkdir()
    with pytest.raises(UserError, match=r"\(checkpoints/500\)"):
        convert(request(tmp_path, "t2i", src, overwrite=True))


def test_a_destination_behind_a_link(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(request(tmp_path, "t2i", src, dst=tmp_path / "link"))
    convert(request(tmp_path, "t2i", src, dst=tmp_path / "link", overwrite=True))
    assert (tmp_path / "link").is_symlink() and read_card(tmp_path / "real")


def test_parents_of_a_failed_destination_are_not_left(tmp_path):
    bad = forge.save(tmp_path / "bad.pth", {
        k: v * np.float32(np.nan) for k, v in state_dict("t2i").items()})
    with pytest.raises(UserError, match="not finite"):
        convert(request(tmp_path, "t2i", bad, dst=tmp_path / "a" / "b" / "out"))
    assert names(tmp_path) == ["bad.pth", "t2i.json"]


def test_what_stood_there_comes_back_when_the_swap_fails(tmp_path, monkeypatch):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    replace = os.replace

    def fail_once(first, second):
        if str(first).endswith("new"):
            raise OSError("no space")
        replace(first, second)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="no space"):
        convert(request(tmp_path, "t2i", src, overwrite=True))
    assert names(tmp_path) == ["out", "src.pth", "t2i.json"] and read_card(tmp_path / "out")


def test_verify_names_the_first_difference(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    other = {k: v.copy() for k, v in state_dict("t2i").items()}
    other["patch_blocks.1.attn.qkv_x.weight"][5, 7] += 1
    forge.save(tmp_path / "other.pth", other)
    with pytest.raises(UserError, match=r"qkv_x.weight\[5, 7\] is .*; 1 of 1728 values"):
        verify(str(tmp_path / "other.pth"), tmp_path / "out")
    del other["patch_blocks.1.attn.qkv_x.weight"]
    forge.save(tmp_path / "fewer.pth", other)
    with pytest.raises(UserError, match="qkv_x.weight is in .*out and not in the source"):
        verify(str(tmp_path / "fewer.pth"), tmp_path / "out")


def test_export_refusals(tmp_path):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    with pytest.raises(UserError, match="ends in '.npz'"):
        export(tmp_path / "out", tmp_path / "x.npz")
    with pytest.raises(UserError, match="src.pth exists"):
        export(tmp_path / "out", src)
    with pytest.raises(UserError, match="holds no 'ema'"):
        export(tmp_path / "out", tmp_path / "x.pth", which="ema")
    assert not (tmp_path / "x.pth").exists()


@pytest.mark.parametrize("damage", ["cut", "removed", "no index"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path, damage):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))
    convert(request(tmp_path, "t2i", src))
    params = tmp_path / "out" / "checkpoints" / "0" / "params"
    for file in [p for p in params.rglob("*") if p.is_file()]:
        if (damage == "no index") == (file.name in ("_METADATA", "manifest.ocdbt")):
            file.write_bytes(file.read_bytes()[:9]) if damage == "cut" else file.unlink()
    for command in (lambda: export(tmp_path / "out", tmp_path / "x.pth"),
                    lambda: verify(str(src), tmp_path / "out")):
        with pytest.raises(UserError, match="damaged"):
            command()
    assert not (tmp_path / "x.pth").exists()


# ---- memory

def test_leaves_are_written_one_batch_at_a_time(tmp_path, monkeypatch):
    """The whole is never in memory: at most one batch of leaves is alive."""
    monkeypatch.setattr(orbax_io, "BATCH_BYTES", 1000)
    alive, most = [], []

    class Tracked(np.ndarray):
        pass

    def make(value: int):
        gc.collect()
        array = np.full((10, 10), value, np.float32).view(Tracked)
        alive.append(weakref.ref(array))
        most.append(sum(reference() is not None for reference in alive))
        return array

    leaves = {f"block/{i}": LazyTensor(f"block/{i}", np.dtype(np.float32), (10, 10),
                                       functools.partial(make, i)) for i in range(6)}
    orbax_io.write_step(tmp_path / "0", {"params": leaves}, {"card": {"a": 1}})
    assert max(most) <= 2 * (1000 // 400)
    stored = orbax_io.stored_leaves(tmp_path / "0" / "params")
    for i in range(6):
        np.testing.assert_array_equal(stored[f"block/{i}"].read(), np.full((10, 10), i))
    assert json.loads((tmp_path / "0" / "card" / "metadata").read_text()) == {"a": 1}


def test_no_thread_writes_on_after_a_failure(tmp_path):
    def fail():
        raise UserError("the disk went away")

    leaf = LazyTensor("norm/scale", np.dtype(np.float32), (3,), fail)
    before = set(threading.enumerate())
    with pytest.raises(UserError, match="the disk went away"):
        orbax_io.write_step(tmp_path / "0", {"params": {leaf.name: leaf}}, {"config": {}})
    assert set(threading.enumerate()) <= before


def test_writers_that_writers_start_have_ended():
    ended = []

    def write():
        time.sleep(0.2)
        ended.append(threading.current_thread().name)

    def start_another():
        time.sleep(0.2)
        threading.Thread(target=write).start()

    with pytest.raises(ValueError), orbax_io._writers_ended():
        threading.Thread(target=start_another).start()
        raise ValueError
    assert len(ended) == 1


def test_a_failure_while_reading_leaves_nothing(tmp_path, monkeypatch):
    src = forge.save(tmp_path / "src.pth", state_dict("t2i"))

    def fail(self):
        raise UserError("the disk went away")

    wanted = request(tmp_path, "t2i", src)
    before = names(tmp_path)
    monkeypatch.setattr("tools.convert_torch_weights.assembly._assembler",
                        lambda *arguments: functools.partial(fail, None))
    with pytest.raises(UserError, match="the disk went away"):
        convert(wanted)
    assert names(tmp_path) == before
