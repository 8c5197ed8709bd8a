"""Fine-tunes the released text-to-image PixelDiT (1.30B) at 2048 to 3840 pixels.

Paper: PixelDiT, arXiv 2511.20645. Values: the reference's experiment
`pixeldit_text_to_image_finetune_res_2048_to_3840` (golden F00): NTK-aware positions, a time shift
that grows with the picture, two micro-batches an update, image tokens over two devices.

    python -m pid_jax.main --config=configs/pixeldit_t2i_2kto4k.py --workdir=DIR \
        --config.data.path=PACKED --config.init_from=CONVERTED --config.mesh.fsdp=8

CONVERTED is the released checkpoint after `python -m tools.convert_torch_weights convert`.
Hardware: 65,536 tokens at 4096 pixels; 16 accelerators (fsdp 8 x sequence 2) of 32 GB and more.
Expect: the loss hardly moves (the model is trained); look at `samples/`.
Variants: `:offline` needs no download, `:debug` runs in minutes on a CPU (configs/README.md).
"""

from ml_collections import ConfigDict

from configs.common import reference, variants


def get_config(variant: str = "") -> ConfigDict:
    """The config; variants: "offline", "debug"."""
    config = reference.text_to_image()
    config.model.rope_mode = "ntk_aware"
    config.data.buckets = "multi"
    config.data.image_size = 3840
    config.data.batch_size = 16
    config.optim.accumulate = 2
    config.flow.dynamic_shift = True
    config.mesh.sequence = 2
    config.sample.image_size = 4096
    return variants.apply(config, variant)
