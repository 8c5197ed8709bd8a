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
