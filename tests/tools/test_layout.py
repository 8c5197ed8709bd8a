"""Prefixes are peeled off in any nesting; parts are told apart; doubles are refused."""

import numpy as np
import pytest

from pid_jax.errors import UserError
from tests.tools import forge
from tools.convert_torch_weights.layout import read_layout, split_name
from tools.convert_torch_weights.readers import open_source

NAME = "patch_blocks.0.attn.qkv_x.weight"


@pytest.mark.parametrize("prefix, part", [
    ("", "net"), ("net.", "net"), ("net_ema.", "ema"), ("core.", "net"), ("module.", "net"),
    ("module.net.", "net"), ("net._orig_mod.", "net"), ("_orig_mod.net.", "net"),
    ("model.module.net_ema._orig_mod.", "ema"), ("state_dict.denoiser.", "net"),
    ("state_dict.ema_denoiser.", "ema"), ("model.state_dict.module.core.", "net"),
    ("fake_score.", "fake_score"), ("module.discriminator.", "discriminator"),
    ("state_dict._repa_projector.", "projector"), ("optimizer_states.", "other"),
])
def test_prefixes(prefix, part):
    assert split_name(prefix + NAME) == (part, prefix, NAME)


def test_inserted_words_inside_a_name():
    inserted = "net.patch_blocks.0._orig_mod.attn._fsdp_wrapped_module.qkv_x.weight"
    assert split_name(inserted) == ("net", "net.", NAME)


def test_a_name_is_never_peeled_away():
    assert split_name("model") == ("net", "", "model")
    assert split_name("net.module") == ("net", "net.", "module")


def source(tmp_path, *names):
    return open_source(forge.save(tmp_path / "x.pth", {n: np.zeros(2, np.float32) for n in names}))


def test_the_average_is_preferred(tmp_path):
    layout = read_layout(source(tmp_path, "net.a.b", "net_ema.a.b", "net_ema.c.d"))
    assert layout.choose(None)[0] == "ema" and len(layout.choose(None)[1]) == 2
    assert layout.choose("net")[0] == "net" and list(layout.choose("net")[1]) == ["a.b"]
    assert layout.prefixes == {"net.": 1, "net_ema.": 2}


def test_a_part_that_is_not_there(tmp_path):
    layout = read_layout(source(tmp_path, "net.a.b"))
    with pytest.raises(UserError, match=r"x.pth holds no ema weights; it holds net \(1 tensor\)"):
        layout.choose("ema")


def test_doubles_are_refused(tmp_path):
    with pytest.raises(UserError, match="'net.a.b' and 'module.a.b'"):
        read_layout(source(tmp_path, "net.a.b", "module.a.b"))


@pytest.mark.parametrize("seed", range(24))
def test_any_nesting_in_a_file(tmp_path, seed):
    """Wrappers as dicts and as prefixes in any order, in every form of file."""
    rng = np.random.default_rng(seed)
    words = [str(word) for word in rng.choice(["state_dict", "model", "module", "net", "core",
                                               "denoiser", "_orig_mod"], rng.integers(0, 4))]
    own = str(rng.choice(["net", "net_ema", "ema_denoiser", "_repa_projector"]))
    words.insert(int(rng.integers(len(words) + 1)), own)
    dicts = int(rng.integers(len(words) + 1))  # the outer ones; the rest stand in the name
    name = ".".join([*words[dicts:], NAME])
    program = b"}(" + forge.text(name) + forge.tensor() + b"u"
    for word in reversed(words[:dicts]):
        program = b"}(" + forge.text(word) + program + b"u"
    path = tmp_path / f"x{rng.choice(['.pth', '.pt', '.bin', '.ckpt'])}"
    four = np.arange(4, dtype=np.float32).tobytes()
    if seed % 2:
        forge.torch_zip(path, b"\x80\x02" + program + b".", {"data/0": four})
    else:
        path.write_bytes(forge.legacy(b"\x80\x02" + program + b".", b"\x80\x02]X\x01\0\0\x000a.",
                                      (4).to_bytes(8, "little") + four))
    layout = read_layout(open_source(path))
    part = {"net_ema": "ema", "ema_denoiser": "ema", "_repa_projector": "projector"}.get(own, "net")
    assert {key: list(tensors) for key, tensors in layout.parts.items()} == {part: [NAME]}
    np.testing.assert_array_equal(layout.parts[part][NAME].read(), np.arange(4))
    assert list(layout.prefixes) == ["".join(f"{word}." for word in words)]
