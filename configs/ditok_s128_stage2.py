"""DiTok stage 2 on TiTok-S128: a diffusion decoder for its 128 tokens.

Convert the released tokenizer, then train on it (docs/ditok.md):

    python -m tools.convert_torch_weights convert --src model.safetensors \
        --model titok --dst titok_s128
    python -m pid_jax.main --config=configs/ditok_s128_stage2.py --workdir=runs/ditok_s128 \
        --config.init_from=titok_s128

Hardware: accelerators. `--config=configs/ditok_s128_stage2.py:debug` takes 25 steps of
a tiny network on two CPU cores. The design is this project's; nobody has run the full training.
"""

from ml_collections import ConfigDict

from configs.common import jit


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return jit.stage2(variant, tokens=128, encoder="small", decoder="base")
