"""Fine-tunes the released text-to-image PixelDiT (1.30B) at 2048 pixels, seven aspect ratios.

Paper: PixelDiT, arXiv 2511.20645. Values: the reference's experiment
`pixeldit_text_to_image_finetune_res_2048` (golden F00).

    python -m pid_jax.main --config=configs/pixeldit_t2i_2k.py --workdir=DIR \
        --config.data.path=PACKED --config.init_from=CONVERTED --config.mesh.fsdp=8

CONVERTED is the released checkpoint after `python -m tools.convert_torch_weights convert`.
Hardware: parameters, AdamW and EMA take 21 GB over the `fsdp` axis; 8 accelerators of 16 GB and
more. Expect: the loss hardly moves (the model is trained); look at `samples/`.
Variants: `:offline` needs no download, `:debug` runs in minutes on a CPU (configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    return variants.apply(reference.text_to_image(), variant)
