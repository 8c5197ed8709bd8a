"""A data set and configs so small that a training run takes seconds."""

import io
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from configs.common import networks
from pid_jax.config import base_config
from pid_jax.data.dataset import DatasetWriter
from pid_jax.data.records import Record

SIZE = 32
NETWORK = {
    "hidden_size": 24, "num_groups": 2, "patch_size": 8, "patch_depth": 2, "pixel_hidden_size": 4,
    "pixel_attn_hidden_size": 16, "pixel_num_groups": 2, "pixel_depth": 1, "txt_embed_dim": 16,
    "txt_max_length": 4, "rope_ref_h": SIZE, "rope_ref_w": SIZE, "repa_encoder_index": -1}


def write_dataset(folder: Path, count: int = 12, size: int = SIZE) -> Path:
    """Packs `count` pictures of smooth colour ramps, each with its own caption."""
    with DatasetWriter(folder) as writer:
        for i in range(count):
            writer.add(Record(key=f"picture-{i:02d}", source="ramps", width=size, height=size,
                              captions={"prompt": f"ramp number {i}", "label": str(i % 3)},
                              image=_ramp(i, size)))
    return folder


def _ramp(seed: int, size: int) -> bytes:
    corners = np.random.default_rng(seed).integers(0, 256, (2, 2, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(corners).resize((size, size), Image.Resampling.BILINEAR).save(buffer, "PNG")
    return buffer.getvalue()


def config(objective: str, data: Path) -> ConfigDict:
    """A run of four steps on `data`; every option that a test needs can be changed."""
    result = base_config()
    result.objective = objective
    result.total_steps = 4
    result.text = ConfigDict({"name": "hashed", "width": 16, "length": 4})
    result.data.path = str(data)
    result.data.batch_size = 4
    result.data.image_size = SIZE
    result.data.threads = 0
    result.mesh.data = 1
    result.flow.shift = 1.0
    result.checkpoint.every = 2
    result.sample.every = 100
    result.sample.steps = 2
    result.sample.count = 2
    result.sample.prompts = ("ramp number 1", "ramp number 2")
    result.log.every = 1
    result.log.tensorboard = False
    if objective == "pixeldit_c2i":
        return _class_conditional(result)
    result.model = ConfigDict(
        networks.pixeldit_t2i(**NETWORK) if objective == "pixeldit_t2i" else networks.pidnet(
            **NETWORK, lq_hidden_dim=8, lq_num_res_blocks=1, train_lq_proj_only=False,
            sr_scale=2, zero_init_lq=False))
    if objective == "pid_teacher":
        result.noising.enabled = result.align.enabled = True
        result.noising.latent_dropout = 0.25
    if objective == "pid_student":
        result.noising.enabled = result.distill.untrained_teacher = True
        result.distill.student_every = 2
        result.distill.discriminator.feature_indices = (0, 1)
        result.distill.discriminator.lr = result.distill.fake_score.lr = 1e-3
        result.optim.lr = 1e-3
    return result


def _class_conditional(config: ConfigDict) -> ConfigDict:
    """Three classes, two averages, two steps of the sampler."""
    config.model = ConfigDict(networks.pixeldit_c2i(
        hidden_size=16, num_groups=2, patch_size=8, patch_depth=2, pixel_depth=1,
        pixel_hidden_size=4, num_classes=3, repa_width=8))
    config.data.caption_fields = ("label",)
    config.ema.decay, config.ema.others = 0.9, (("ema2", "constant", 0.5),)
    config.sample.prompts = ("0", "2")
    return config
