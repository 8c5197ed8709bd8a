"""DiTok stage 2 on TiTok-B64: a diffusion decoder for its 64 tokens.

Convert the released tokenizer, then train on it (docs/ditok.md):

    python -m tools.convert_torch_weights convert --src model.safetensors \
        --model titok --dst titok_b64
    python -m pid_jax.main --config=configs/ditok_b64_stage2.py --workdir=runs/ditok_b64 \
        --config.init_from=titok_b64

Hardware: accelerators. `--config=configs/ditok_b64_stage2.py:debug` takes 25 steps of
a tiny network on two CPU cores. The design is this project's; nobody has run the full training.
"""

from ml_collections import ConfigDict

from configs.common import jit


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return jit.stage2(variant, tokens=64, encoder="base", decoder="base")
