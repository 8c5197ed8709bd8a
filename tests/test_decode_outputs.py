import json
import re

import jax
import numpy as np
import pytest
from PIL import Image

from pid_jax import comparison_page, decode, decode_plan, images, releases
from pid_jax.data import command
from pid_jax.errors import UserError
from tests.drawing import write_photo
from tests.golden.cases import COMMITTED
from tests.test_decode import SMALL, read_json, run  # noqa: F401 - a fixture


def test_a_second_run_draws_only_what_is_missing_or_other(run, decoder, tmp_path, monkeypatch):
    for name in "ab":
        write_photo(tmp_path / "in" / f"{name}.png", SMALL, SMALL, seed=ord(name))
    drawn, draw = [], decode.draw_batch
    monkeypatch.setattr(decode, "draw_batch", lambda *a: (drawn.append(
        [request.name for request in a[3]]), draw(*a)))
    command_line = ["--input", tmp_path / "in", "--batch_size", 1]
    assert run(*command_line) == 0 and drawn == [["a"], ["b"]]
    picture = tmp_path / "out" / "b" / "sigma_0.000.png"
    picture.write_bytes(picture.read_bytes()[:-9])  # as an interrupted copy leaves it
    drawn.clear()
    assert run(*command_line) == 0 and drawn == [["b"]]
    drawn.clear()
    assert run(*command_line) == 0 and drawn == []
    write_photo(tmp_path / "in" / "a.png", SMALL, SMALL, seed=7)
    assert run(*command_line) == 0 and drawn == [["a"]]
    drawn.clear()
    assert run(*command_line, "--seed", 3) == 0 and drawn == [["a"], ["b"]]


def test_processes_share_the_pictures(run, tmp_path, monkeypatch):
    for number in range(5):
        write_photo(tmp_path / "in" / f"{number}.png", SMALL, SMALL)
    drawn = []
    monkeypatch.setattr(decode, "draw_batch",
                        lambda *a: drawn.extend(request.name for request in a[3]))
    monkeypatch.setattr(decode.multihost, "is_writer", lambda: False)
    monkeypatch.setattr(decode.multihost, "barrier", lambda name: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index, share in ((0, ["0", "2", "4"]), (1, ["1", "3"])):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        assert run("--input", tmp_path / "in", "--batch_size", 2) == 0 and drawn == share
        drawn.clear()


def test_a_manifest_brings_prompt_sigma_and_seed_and_the_tree_of_the_reference(run, tmp_path):
    write_photo(tmp_path / "in" / "cat.png", SMALL, SMALL)
    lines = [{"image": "in/cat.png", "prompt": "<b>a cat</b>", "sigma": [0, 0.25], "seed": 5},
             {"image": "in/cat.png", "id": "other"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("--input", tmp_path / "list.jsonl", "--tree", "reference", "--codec") == 0
    out = tmp_path / "out"
    tag, = (folder for folder in out.iterdir() if folder.name.startswith("dct_"))
    assert re.fullmatch(r"dct_pid\d*_3_cfg2.75_steps2_ema", tag.name)
    note = read_json(tag / "sigma_0.250" / "00000000_cat.json")
    assert (note["prompt"], note["seed"], note["sigma"]) == ("<b>a cat</b>", 5, 0.25)
    for place in ("vae_decode/sigma_0.250/00000000_cat.png", "LQ_input/other.png",
                  "input/other.png", f"{tag.name}/sigma_0.000/other.png"):
        assert (out / place).is_file(), place
    page = (out / "compare.html").read_text()
    assert "&lt;b&gt;a cat&lt;/b&gt;" in page and "<b>a cat" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page.replace(
        "http-equiv", "")


def test_a_page_names_what_it_has_no_room_for(tmp_path, monkeypatch):
    write_photo(tmp_path / "a.png", 8, 8)
    rows = [comparison_page.Comparison(f"row {k}", "", {"x": tmp_path / "a.png"}) for k in range(3)]
    monkeypatch.setattr(comparison_page, "MOST_BYTES", 2500)
    shown = comparison_page.write(tmp_path / "page.html", "t", rows)
    assert 0 < shown < 3 and "Not shown here: " in (tmp_path / "page.html").read_text()


def test_fix_batches_frames_and_flags(decoder, tmp_path):
    """Requests of the reference's .pt, and of an SDXL capture in its sampler's scale."""
    path = COMMITTED / "encoders" / "fix_batches" / "fix_batch_0000.pt"
    first, = decode.latent_requests(decoder, [path], decode.Wishes())
    assert first.latent.shape[-1] == 16 and first.sigma == 0 and first.small is not None
    assert first.prompt and first.source.endswith("fix_batch_0000.pt[0]")
    noised = np.random.default_rng(0).standard_normal((2, 2, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", latent=noised, sigma=[3.0], frame="euler", caption="text")
    item, = decode.latent_requests(decoder, [tmp_path / "x.npz"], decode.Wishes())
    assert item.sigma == pytest.approx(0.75) and item.prompt == "text"
    np.testing.assert_allclose(item.latent, noised / 4, rtol=1e-6)
    with pytest.raises(UserError, match="have one file name"):
        list(decode.latent_requests(decoder, [tmp_path / "x.npz"],
                                    decode.Wishes(sigmas=(9000.0, 10000.0))))
    with pytest.raises(UserError, match="no noise level of the frame 'flow'"):
        list(decode.latent_requests(decoder, [tmp_path / "x.npz"], decode.Wishes(frame="flow")))


def test_a_truth_of_any_size_is_padded_and_cut(run, tmp_path):
    write_photo(tmp_path / "a.png", 29, 31)
    assert run("--input", tmp_path / "a.png", "--ground_truth") == 0
    assert Image.open(tmp_path / "out" / "a" / "sigma_0.000.png").size == (31, 29)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "a" / "truth.png")),
                                  np.asarray(Image.open(tmp_path / "a.png")))


def test_the_plan_compiles_and_loads_nothing(pid_checkpoint, tmp_path, capsys, monkeypatch):
    write_photo(tmp_path / "a.png", SMALL, SMALL)
    monkeypatch.setattr(decode_plan.PixelDecoder, "from_checkpoint", None)
    assert command.run(decode.main, ["--checkpoint", str(pid_checkpoint), "--input",
                                     str(tmp_path / "a.png"), "--plan", "--steps", "1",
                                     "--guidance", "1"]) == 0
    printed = capsys.readouterr().out
    assert "32 x 32 (height x width), batch 1, 1 steps, 1 tile\n" in printed
    assert re.search(r"peak +\d+\.\d+ GiB", printed) and "TFLOP" in printed


def test_the_registry_lists_every_release(capsys):
    with pytest.raises(SystemExit) as end:
        command.run(decode.main, ["--list"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and len(releases.RELEASES) == 10
    for release in releases.RELEASES:
        assert release.file in printed and release.config in printed
    assert releases.find("z-image", "2k").family == "flux"
    assert releases.find("klein", "2kto4k_v1pt5").family == "flux2"
    assert releases.find("2512", "2kto4k_v1pt5").experiment.startswith("PiD_v1pt5_res2kto4k_sr4x")
    assert releases.find("siglip", "2k").scale == 8
    for backbone, kind, words in (("sdxl", "2k", "there is 2kto4k"), ("fluxx", "2k", "'flux'"),
                                  ("flux", "8k", "unknown checkpoint type")):
        with pytest.raises(UserError, match=words):
            releases.find(backbone, kind)


def test_the_configs_of_the_registry_exist():
    root = COMMITTED.parents[2]
    for release in releases.RELEASES:
        text = (root / release.config).read_text()
        assert release.experiment in text


def broken_bytes(rng: np.random.Generator, kind: int) -> bytes:
    """Garbage, an empty file, or a cut one."""
    whole = images.to_uint8(np.zeros((64,), np.float32)).tobytes() * 3
    return (b"", rng.bytes(50), b"PK\x03\x04" + rng.bytes(40), whole)[kind % 4]


def malformed(rng: np.random.Generator, number: int, folder) -> list[str]:
    """Arguments that no decode can follow."""
    photo, good = folder / "a.png", folder / "good.npy"
    file = folder / f"bad{number}"
    kind, level = number % 10, rng.choice(["-0.1", "1.5", "nan", "x", "0,,1", "0.1,0.10001"])
    if kind == 0:
        return ["--input", photo, f"--degrade_sigmas={level}"]
    if kind == 1:
        file = file.with_suffix(rng.choice([".npy", ".npz", ".safetensors", ".pt", ".txt"]))
        file.write_bytes(broken_bytes(rng, int(rng.integers(4))))
        return ["--latents", file]
    if kind == 2:
        shape = [(2, 2), (3,), (2, 2, 15), (2, 2, 2, 2, 16), (0, 2, 16), ()][rng.integers(6)]
        np.save(file.with_suffix(".npy"), np.zeros(shape, np.float32))
        return ["--latents", file.with_suffix(".npy")]
    if kind == 3:
        line = rng.choice(['{"image": 3}', "[]", "nonsense", '{"image": "a.png", "seed": "x"}', "",
                           '{"image": "a.png", "sigma": []}', '{"image": "a.png", "wrong": 1}',
                           '{"image": "a.png"}\n[]', '{"image": "none.png"}',
                           '{"image": "a.png", "sigma": [2]}', '{"image": "a\\u0000b"}'])
        file.with_suffix(".jsonl").write_text(line)
        return ["--input", file.with_suffix(".jsonl")]
    if kind == 4:
        return ["--input", photo, "--size", rng.choice(["0x4", "axb", "64", "-1x2", "999x999"])]
    if kind == 5:
        flags = [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--guidance", "inf"],
                 ["--tile", "9"], ["--tile", "0"], ["--tile", "-8"], ["--batch_size", "0"],
                 ["--frame", "polar"], ["--tree", "oak"], ["--layout", "mixed"], ["--unknown"]]
        return ["--input", photo, *flags[rng.integers(len(flags))]]
    if kind == 6:
        arrays = [{"latent": np.zeros((2, 2, 16)), "sigma": np.zeros(3)},
                  {"latent": np.zeros((2, 2, 16)), "sigma": 7.0},
                  {"latent": np.zeros((2, 2, 16)), "prompt": 3},
                  {"latent": np.zeros((2, 2, 16)), "frame": "polar"},
                  {"latent": np.zeros((2, 2, 16)), "noise": np.zeros((1, 3, 3, 3))},
                  {"latent": np.zeros((2, 2, 16)), "caption_embs": np.zeros((1, 4, 99))},
                  {"latent": np.full((2, 2, 16), np.inf)}, {"x": np.zeros(3), "y": np.zeros(3)}]
        np.savez(file.with_suffix(".npz"), **arrays[rng.integers(len(arrays))])
        return ["--latents", file.with_suffix(".npz")]
    if kind == 7:
        return [["--input", folder / "missing.png"], ["--latents", folder / "missing.npy"],
                ["--input", photo, "--latents", good], [], ["--latents", good, "--ground_truth"],
                ["--input", photo, "--frame", "vp"]][rng.integers(6)]
    if kind == 8:
        file.with_suffix(".png").write_bytes(broken_bytes(rng, int(rng.integers(4))))
        return ["--input", file.with_suffix(".png")]
    file.with_suffix(".json").write_text(rng.choice(["[", "3", '{"sigma": "high"}',
                                                     '{"sigma": [1, [2]]}', '{"prompt": 1}']))
    np.save(file.with_suffix(".npy"), np.zeros((2, 2, 16), np.float32))
    return ["--latents", file.with_suffix(".npy")]


def test_a_hundred_malformed_requests_are_a_sentence_each(run, tmp_path, capsys):
    write_photo(tmp_path / "a.png", SMALL, SMALL)
    np.save(tmp_path / "good.npy", np.ones((2, 2, 16), np.float32))
    rng = np.random.default_rng(8)
    for number in range(100):
        arguments = malformed(rng, number, tmp_path)
        status = run(*arguments)
        printed = [line for line in capsys.readouterr().err.splitlines()
                   if not line.startswith("warning: ")]
        assert status == 2 and len(printed) == 1 and printed[0].startswith("error: "), (
            arguments, status, printed)
        assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*.part")), arguments
