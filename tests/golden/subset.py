"""Makes the committed subset of a golden folder: `python -m tests.golden.subset SRC/pid`.

Copies the cases that are not listed in LEFT_OUT, only the parameters they use, and an index. In
the families of THINNED it leaves out the largest gradients and outputs, which full runs compare.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.golden import cases

# Cases that repeat a kind which another, smaller case covers; kept out for the 40 MB budget.
LEFT_OUT = {
    "pid": ("A02_t2i_ntk_nonsquare_grads", "A05b_pid_v1pt5_aux_final", "A07b_pid_dinov2_patch16",
            "A10c_t2i_ed4_noshuffle_samedim", "D03c_discriminator"),
    "encoders": ("flux_vae_ldm", "sdxl_vae_diffusers", "flux2_vae_diffusers", "qwen_vae_wan2d",
                 "gemma2_window_ge_len"),
    # The MaskGIT-VQGAN encoder made stage-1 targets of TiTok; nothing here uses it but its check.
    "ditok": ("titok_encoder_nonlegacy", "titok_decoder_legacy", "jit_net_a", "jit_net_b",
              "jit_denoiser_loss", "lpips_alex", "lpips_alex_imagenet", "lpips_vgg_imagenet",
              "ditok_design_reconstruct_cfg1p0", "jit_sample_heun_cfg1", "pixel_encoder_vq"),
    # Every case carries a whole network.
    "pixeldit": ("c2i_forward_base", "c2i_forward_noabspos", "c2i_forward_nonsquare",
                 "c2i_forward_p8", "c2i_loss_pool", "c2i_loss_up", "t2i_forward_base",
                 "t2i_forward_nonsquare", "tiny_c2i_ckpt"),
}
LEFT_OUT_FILES = {
    "ditok": ("titok_tiny_stage1.bin",),
    "pixeldit": ("tiny_c2i_train.ckpt", "tiny_c2i_ema_only.ckpt")}
THINNED = {
    "pid": {"grad/": 5_000, "grad_clipped": 5_000, "param_after": 5_000, "out/": 40_000},
    "ditok": {"grad/": 6_000, "out/": 100_000},
    "pixeldit": {"grads/": 2_000, "params_after": 2_000, "ema_after/": 2_000, "state/": 2_000,
                 "out/euler": 36_000, "out/flowdpm": 36_000, "out/rope": 36_000}}
"""Largest tensors that are kept, in bytes, by the beginning of their names."""
POOL = "params_pool.safetensors"


def main(source: Path) -> None:
    family = cases.family_of(source)
    target = cases.COMMITTED / family
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    index = json.loads((source / "index.json").read_text())
    index["cases"] = [c for c in _entries(index) if c["case"] not in LEFT_OUT.get(family, ())]
    for entry in index["cases"]:
        for file in _files(source, entry):
            _copy_case(source / file, target / file, THINNED.get(family))
    _copy_shared(source, target, index)
    (target / "index.json").write_text(json.dumps(index, indent=1))
    total = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    print(f"{family}: {len(index['cases'])} cases, {total / 1e6:.1f} MB")


def _entries(index: dict) -> list[dict]:
    """The index's cases as a list, also where it holds them by name."""
    held = index["cases"]
    return [{"case": name, **about} for name, about in held.items()] if isinstance(
        held, dict) else held


def _files(source: Path, entry: dict) -> list[str]:
    """A case's own files: those that its entry lists, or those that bear its name."""
    return entry.get("files") or [file.name for file in source.glob(f"{entry['case']}.*")]


def _copy_case(source: Path, target: Path, largest: dict[str, int] | None) -> None:
    """Copies a file, without tensors larger than their kind may be."""
    if largest is None or source.suffix != ".safetensors":
        shutil.copyfile(source, target)
        return
    save_file({name: value for name, value in load_file(source).items()
               if not any(name.startswith(kind) and value.nbytes > size
                          for kind, size in largest.items())}, target)
    target.chmod(0o644)


def _copy_shared(source: Path, target: Path, index: dict) -> None:
    """Everything that no case of the source owns: sub-folders, tables, and the pruned pool."""
    owned = {f.name for f in source.iterdir() if f.stem in _all_cases(source)}
    owned |= set(LEFT_OUT_FILES.get(cases.family_of(source), ()))
    for item in source.iterdir():
        if item.is_dir():
            shutil.copytree(item, target / item.name, copy_function=shutil.copyfile)
        elif item.name == POOL:
            save_file(_used_parameters(source, index), target / POOL)
        elif item.name not in owned and item.name != "index.json":
            shutil.copyfile(item, target / item.name)


def _all_cases(source: Path) -> set[str]:
    return {c["case"] for c in _entries(json.loads((source / "index.json").read_text()))}


def _used_parameters(source: Path, index: dict) -> dict:
    """Pool entries that the JSON of a kept case names, at any depth."""
    pool = load_file(source / POOL)
    used: set[str] = set()
    for entry in index["cases"]:
        _collect_strings(json.loads((source / f"{entry['case']}.json").read_text()), used)
    return {name: value for name, value in pool.items() if name in used}


def _collect_strings(node, found: set[str]) -> None:
    if isinstance(node, str):
        found.add(node)
    elif isinstance(node, dict):
        for value in node.values():
            _collect_strings(value, found)
    elif isinstance(node, list):
        for value in node:
            _collect_strings(value, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
