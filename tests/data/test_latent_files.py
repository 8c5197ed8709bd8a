import numpy as np
import pytest
from safetensors.numpy import save_file

from pid_jax.data import latent_files, manifests
from pid_jax.errors import UserError

LATENT = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)  # [B, h, w, C]


def read(path, layout="auto"):
    return latent_files.read(path, channels=5, family="made_up", layout=layout)


def test_every_format_and_layout_gives_the_same_latents(tmp_path):
    first = np.moveaxis(LATENT, -1, 1)
    np.save(tmp_path / "a.npy", LATENT)
    np.save(tmp_path / "b.npy", first.astype(np.float16))
    np.savez_compressed(tmp_path / "c.npz", other=np.zeros(3), latent=first)
    save_file({"anything": np.ascontiguousarray(first)}, tmp_path / "d.safetensors")
    for file in sorted(tmp_path.iterdir()):
        found = read(file)
        np.testing.assert_array_equal(found.latents, LATENT)
        assert found.latents.dtype == np.float32
        assert found.sigma is None and found.prompts is None


def test_a_single_latent_becomes_a_batch(tmp_path):
    np.save(tmp_path / "a.npy", LATENT[0])
    np.testing.assert_array_equal(read(tmp_path / "a.npy").latents, LATENT[:1])


def test_bfloat16_is_read(tmp_path):
    import ml_dtypes
    from safetensors.flax import save_file as save_flax
    save_flax({"latent": LATENT.astype(ml_dtypes.bfloat16)}, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(read(tmp_path / "a.safetensors").latents, LATENT)


def test_sigma_and_prompt_come_along(tmp_path):
    np.savez(tmp_path / "a.npz", latent=LATENT, sigma=[0.25, 0.5], prompt="a cat")
    found = read(tmp_path / "a.npz")
    assert found.sigma == [0.25, 0.5] and found.prompts == ["a cat", "a cat"]


def test_the_layout_can_be_forced(tmp_path):
    square = np.random.default_rng(0).normal(size=(5, 4, 5)).astype(np.float32)
    np.save(tmp_path / "a.npy", square)
    np.testing.assert_array_equal(read(tmp_path / "a.npy").latents[0], square)
    np.testing.assert_array_equal(read(tmp_path / "a.npy", "channels_first").latents[0],
                                  np.moveaxis(square, 0, -1))


@pytest.mark.parametrize("arrays, words", [
    ({"latent": LATENT[..., :4]}, "'made_up' latents with 5 channels"),
    ({"latent": LATENT[0, 0]}, "'made_up' latents with 5 channels"),
    ({"latent": np.array(["text"])}, "'made_up' latents"),
    ({"a": LATENT, "b": LATENT}, "call the latent one of latent"),
    ({"latent": LATENT.astype("V4")}, "latent is .V4, which are no numbers"),
    ({"latent": LATENT, "noise": np.array(["a", "b"])}, "noise in .* is <U1; expected numbers"),
    ({"latent": LATENT, "step_noise": np.zeros((1, 2), "c8")}, "complex64; expected numbers"),
    ({"latent": LATENT, "sigma": np.zeros(3)}, "one for each of the 2"),
    ({"latent": LATENT, "prompt": np.zeros(2)}, "one text"),
    ({"latent": np.array([{"a": 1}], dtype=object)}, "cannot be read"),
])
def test_files_that_do_not_fit_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_files_are_refused(tmp_path, name, damage):
    path = tmp_path / name
    if damage is None:  # a good file, cut
        writers = {".npy": np.save, ".npz": lambda p, a: np.savez(p, latent=a),
                   ".safetensors": lambda p, a: save_file({"latent": a}, p)}
        writers[path.suffix](path, LATENT)
        damage = path.read_bytes()[:150]
    path.write_bytes(damage)
    with pytest.raises(UserError, match="cannot be read"):
        read(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no latent file"):
        read(tmp_path / "a.npy")
    with pytest.raises(UserError, match="expected one of .npy"):
        read(tmp_path / "a.pt")


def test_latents_of_a_known_family_are_called_by_name(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1, 128, 8, 6), np.float32))
    with pytest.raises(UserError, match="128-channel flux2 latents.*reads 'flux' latents with 16"):
        latent_files.read(tmp_path / "a.npy", 16, "flux")


def test_whatever_a_damaged_archive_or_header_raises_is_a_sentence(tmp_path):
    def refused(name: str, data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read(tmp_path / name)

    for header in (b"{'shape': (2, (, }", b"'''", b"(" * 3000):
        refused("a.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    np.savez_compressed(tmp_path / "b.npz", latent=LATENT)
    whole = bytearray((tmp_path / "b.npz").read_bytes())
    encrypted = whole.copy()
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[whole.find(mark) + at] |= 1
    refused("c.npz", bytes(encrypted))
    whole[60:64] = b"\xff" * 4
    refused("b.npz", bytes(whole))


def test_a_manifest_keeps_line_separators_of_texts_and_refuses_huge_numbers(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes('{"image": "a.png", "prompt": "a\u2028b"}\r\n{"image": "b.png"}\n'.encode())
    assert [entry.prompt for entry in manifests.read(path, "image")] == ["a\u2028b", None]
    path.write_text('{"image": "a.png", "sigma": 1' + "0" * 400 + "}")
    with pytest.raises(UserError, match="line 1: sigma is too large"):
        manifests.read(path, "image")
