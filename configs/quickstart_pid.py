"""A tiny PiD teacher on real photographs: decodes 4x smaller pictures' latents.

Paper: PiD, arXiv 2605.23902. Codec and text encoder need no download (block DCT, hashed words).

    python -m pid_jax.data.photos --dst runs/photos
    python -m pid_jax.main --config=configs/quickstart_pid.py --workdir=runs/pid

Hardware: two CPU cores, 2 GB of memory, minutes. A longer run: `--config.total_steps=3000`.
Expect: `samples/step_*.png` (bicubic | PiD | truth) become recognisable photographs, and
`plots/training.png` a falling loss.
"""

from ml_collections import ConfigDict

from configs.common import networks, quickstart


def get_config(variant: str = "") -> ConfigDict:
    """The config; it has no variants."""
    config = quickstart.quickstart()
    config.objective = "pid_teacher"
    config.model = ConfigDict(networks.pidnet(
        **networks.TINY, lq_hidden_dim=64, lq_num_res_blocks=2, zero_init_lq=False,
        train_lq_proj_only=False))
    config.optim.lr = 1e-3
    config.noising.enabled = True
    config.align.enabled = True
    config.sample.guidance = 1.0
    return config
