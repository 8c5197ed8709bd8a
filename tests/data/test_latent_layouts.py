import numpy as np
import pytest

from pid_jax.data import latent_files, latent_layouts
from pid_jax.encoders import pipeline_latents
from pid_jax.errors import UserError
from pid_jax.models.spatial import space_to_channels

LATENT = np.random.default_rng(0).standard_normal((2, 4, 6, 16)).astype(np.float32)


def bring(latents, layout="auto", channels=16, family="flux", **options):
    return latent_layouts.bring(latents, channels, family, layout, "x.npy", **options)


def packed(latents):
    """As the pipelines of flux and qwenimage have them: [B, tokens, (channel, row, column)]."""
    return np.asarray(space_to_channels(latents, 2)).reshape(len(latents), -1, 64)


def test_packed_latents_are_found_and_unpacked():
    np.testing.assert_array_equal(bring(packed(LATENT), picture=(32, 48)), LATENT)
    np.testing.assert_array_equal(bring(packed(LATENT)[0], picture=(32, 48)), LATENT[:1])
    square = LATENT[:, :, :4]
    np.testing.assert_array_equal(bring(packed(square), "packed", family="qwenimage"), square)
    with pytest.raises(UserError, match="6 packed tokens, which are no square"):
        bring(packed(LATENT))
    with pytest.raises(UserError, match="come in no packed form"):
        bring(packed(square), "packed", family="sd3")


def test_flux2_comes_packed_raw_or_ready():
    ready = np.random.default_rng(1).standard_normal((1, 2, 2, 128)).astype(np.float32)
    tokens = ready.reshape(1, 4, 128)
    for latents in (ready, np.moveaxis(ready, -1, 1), tokens, tokens[0]):
        np.testing.assert_array_equal(bring(latents, channels=128, family="flux2"), ready)
    mean, var = np.full(128, 0.5, np.float32), np.full(128, 4.0, np.float32)
    raw = np.asarray(pipeline_latents.channels_to_space(ready * np.sqrt(4.0001) + 0.5, 2))
    for latents in (raw, np.moveaxis(raw, -1, 1)):
        np.testing.assert_allclose(bring(latents, channels=128, family="flux2",
                                         statistics=lambda: (mean, var)), ready, atol=1e-5)
    with pytest.raises(UserError, match="do not fold"):
        bring(raw[:, :3], channels=128, family="flux2", statistics=lambda: (mean, var))
    with pytest.raises(UserError, match="no raw layout"):
        bring(LATENT, "raw")


@pytest.mark.parametrize("frame, sigma, clean, noise", [
    ("flow", 0.25, 0.75, 0.25), ("vp", 0.6, 0.8, 0.6), ("euler", 3.0, 1.0, 3.0),
    ("flow", 1.0, 0.0, 1.0), ("euler", 0.0, 1.0, 0.0)])
def test_frames_keep_the_ratio_of_picture_and_noise(frame, sigma, clean, noise):
    x, n = np.random.default_rng(2).standard_normal((2, 5)).astype(np.float32)
    flow, level = pipeline_latents.reframe(clean * x + noise * n, sigma, frame, "flow")
    np.testing.assert_allclose(flow, (1 - level) * x + level * n, atol=1e-6)
    vp, level = pipeline_latents.reframe(clean * x + noise * n, sigma, frame, "vp")
    np.testing.assert_allclose(vp, np.sqrt(1 - level**2) * x + level * n, atol=1e-6)


def test_what_lies_beside_a_latent_is_read(tmp_path):
    from safetensors.numpy import save_file
    save_file({"LQ_latent": LATENT, "degrade_sigma": np.float32([0.1, 0.2])},
              tmp_path / "a.safetensors", {"caption": "from the metadata", "frame": "vp"})
    found = latent_files.read(tmp_path / "a.safetensors", 16, "flux")
    assert found.prompts == ["from the metadata"] * 2 and found.frame == "vp"
    assert found.sigma == pytest.approx([0.1, 0.2])
    np.save(tmp_path / "b.npy", LATENT)
    (tmp_path / "b.json").write_text('{"prompt": ["one", "two"], "sigma": 0.5}')
    found = latent_files.read(tmp_path / "b.npy", 16, "flux")
    assert found.prompts == ["one", "two"] and found.sigma == [0.5, 0.5]
