"""What a run would take of machines that are not here; nothing is run, only compiled.

    python -m pid_jax.parallel.aot --config=configs/pixeldit_t2i_2k.py:offline \
        --topology=v5e:4x4 --mesh=1x4x4 --config.data.batch_size=4

Compiles the training step (`--program=train`), the whole drawing of pictures (`--program=sample`)
or the making of a fresh state (`--program=init`) for a named TPU topology, or for H100s where the
CUDA plugin is installed, and prints memory per chip, FLOPs, collectives and estimated cycles.
`--fit` searches the mesh and the remat policy.
Needs libtpu (`pip install libtpu`). Exit status: 0 it fits, 1 it does not, 2 bad input.
"""

import json
import re
import sys

from absl import flags

from pid_jax import command_line, config_flag
from pid_jax.config_flag import CONFIG
from pid_jax.errors import RunFailed, UserError
from pid_jax.files import atomic_write

flags.adopt_module_key_flags(config_flag)
TOPOLOGY = flags.DEFINE_string("topology", None, "v5e:8x8, v5p:2x2x4, v5e:1, h100:8, ...")
MESH = flags.DEFINE_string("mesh", None, "data x fsdp x sequence, as 1x4x4; default config.mesh")
PROGRAM = flags.DEFINE_enum("program", "train", ("train", "sample", "init"), "what to compile")
HEIGHT = flags.DEFINE_integer("height", None, "pixels; default config.data.image_size")
WIDTH = flags.DEFINE_integer("width", None, "pixels; default config.data.image_size")
TILE = flags.DEFINE_integer("tile", 0, "of --program=sample: draw by tiles of this side in pixels")
FIT = flags.DEFINE_integer("fit", 0, "search meshes and remat policies until so many fit")
JSON = flags.DEFINE_string("json", None, "file that also receives the numbers")


def main() -> None:
    """Compiles and reports what the flags describe."""
    if CONFIG.value is None or TOPOLOGY.value is None:
        raise UserError("--config and --topology are needed, for example "
                        "--config=configs/pixeldit_t2i_2k.py:offline --topology=v5e:4x4")
    # This command stands above the packages it reports on; only its name lies here.
    from pid_jax.ahead_of_time import fit, programs, report, topology
    from pid_jax.config import check_config
    from pid_jax.parallel.mesh import make_mesh

    topology.prepare()
    config = CONFIG.value
    check_config(config)
    size = HEIGHT.value or config.data.image_size, WIDTH.value or config.data.image_size
    machine = topology.open_topology(TOPOLOGY.value)
    work = programs.model_flops(config, PROGRAM.value, *size)
    if FIT.value and TILE.value:
        raise UserError("--tile and --fit do not go together; choose the mesh with --mesh")
    if FIT.value:
        reports = fit.search(config, machine, PROGRAM.value, *size, work, FIT.value)
        print("\n".join(fit.one_line(found) for found in reports))
    else:
        mesh = make_mesh(mesh_sizes(MESH.value, config.mesh), config.data.batch_size,
                         config.optim.accumulate, machine.devices)
        reports = [report.compile_report(config, machine, mesh, PROGRAM.value, *size, work,
                                         TILE.value)]
        print(report.table(reports[0]))
    write_json(reports)
    if not any(found.fits for found in reports):
        raise RunFailed("nothing that was compiled fits the memory of these chips; divide over "
                        "more chips, or set config.model.remat to full")


def mesh_sizes(text: str | None, default) -> dict[str, int]:
    """The mesh that `--mesh` names, or the config's."""
    if text is None:
        return default
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise UserError(f"--mesh is {text!r}; expected data x fsdp x sequence, as 1x4x4")
    return dict(zip(("data", "fsdp", "sequence"), map(int, text.split("x"))))


def write_json(reports: list) -> None:
    """Writes the numbers to the file of `--json`, when one is named."""
    if JSON.value:
        with atomic_write(JSON.value) as file:
            json.dump([found.to_json() for found in reports], file, indent=2)


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv))
