"""Makes the committed subset of a golden folder: `python -m tests.golden.subset SRC/pid`.

Copies the cases that are not listed in LEFT_OUT, only the parameters they use, and an index.
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
}
POOL = "params_pool.safetensors"


def main(source: Path) -> None:
    family = cases.family_of(source)
    target = cases.COMMITTED / family
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    index = json.loads((source / "index.json").read_text())
    index["cases"] = [c for c in index["cases"] if c["case"] not in LEFT_OUT.get(family, ())]
    for entry in index["cases"]:
        for file in _files(source, entry):
            shutil.copyfile(source / file, target / file)
    _copy_shared(source, target, index)
    (target / "index.json").write_text(json.dumps(index, indent=1))
    total = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    print(f"{family}: {len(index['cases'])} cases, {total / 1e6:.1f} MB")


def _files(source: Path, entry: dict) -> list[str]:
    """A case's own files: those that its entry lists, or those that bear its name."""
    return entry.get("files") or [file.name for file in source.glob(f"{entry['case']}.*")]


def _copy_shared(source: Path, target: Path, index: dict) -> None:
    """Everything that no case of the source owns: sub-folders, tables, and the pruned pool."""
    owned = {f.name for f in source.iterdir() if f.stem in _all_cases(source)}
    for item in source.iterdir():
        if item.is_dir():
            shutil.copytree(item, target / item.name, copy_function=shutil.copyfile)
        elif item.name == POOL:
            save_file(_used_parameters(source, index), target / POOL)
        elif item.name not in owned and item.name != "index.json":
            shutil.copyfile(item, target / item.name)


def _all_cases(source: Path) -> set[str]:
    return {c["case"] for c in json.loads((source / "index.json").read_text())["cases"]}


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
