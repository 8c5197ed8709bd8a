"""The PyTorch half of `test_torch_interop.py`; runs under an interpreter that has torch.

    python torch_side.py write FOLDER       weight files of every form, and their raw numbers
    python torch_side.py check FILE FOLDER  torch opens FILE and finds the numbers of FOLDER/raw
    python torch_side.py rank FOLDER RANK RANKS   one process of a sharded checkpoint

Stands alone: it imports nothing of this project, and no numpy.
"""

import collections
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

RANKS = 3


def numbers() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and shapes, the same in every process."""
    torch.manual_seed(0)
    draws = {name: torch.randn(7, 6).to(getattr(torch, name)) for name in (
        "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")}
    others = {"int64": torch.arange(12).reshape(3, 4), "bool": torch.tensor([True, False]),
              "uint8": torch.arange(5, dtype=torch.uint8), "scalar": torch.tensor(2.5),
              "empty": torch.zeros(0, 3), "cube": torch.randn(2, 3, 4)}
    return {f"net.{name}": tensor for name, tensor in {**draws, **others}.items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's numbers in row-major order."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def write_raw(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    for name, tensor in tensors.items():
        (folder / name).write_bytes(raw(tensor))
    (folder / "index.json").write_text(json.dumps({
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()}))


def write_case(folder: Path, name: str, value, tensors: dict[str, torch.Tensor], **options) -> None:
    """One file by torch.save, and what a reader must find in it."""
    (folder / name).mkdir()
    torch.save(value, folder / name / "file.pth", **options)
    write_raw(folder / name / "raw", tensors)


def views() -> dict[str, torch.Tensor]:
    """Tensors that share storages and are not contiguous."""
    base = torch.randn(6, 8)
    return {"base": base, "transposed": base.T, "slice": base[1:5, ::2], "row": base[3],
            "expanded": torch.randn(1, 4).expand(3, 4), "tied": base, "channels_last":
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}


def training_run() -> tuple[dict, dict[str, torch.Tensor]]:
    """A Lightning-like checkpoint: two copies of a network, optimizer, schedule, random state."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    weights = {f"{part}.{key}": value.clone() for part in ("denoiser", "ema_denoiser")
               for key, value in net.state_dict().items()}
    state = optimizer.state_dict()
    run = {"epoch": 3, "global_step": 40, "pytorch-lightning_version": "2.5.0",
           "state_dict": collections.OrderedDict(weights),
           "loops": {"fit_loop": {"state_dict": {}}},
           "optimizer_states": [state], "lr_schedulers": [schedule.state_dict()],
           "rng_state": torch.get_rng_state(), "hyper_parameters": {"folder": Path("runs/a")}}
    moments = {f"optimizer_states.0.state.{i}.{name}": value for i, entry in state["state"].items()
               for name, value in entry.items() if isinstance(value, torch.Tensor)}
    return run, {**{f"state_dict.{k}": v for k, v in weights.items()}, **moments,
                 "rng_state": run["rng_state"]}


def write(folder: Path) -> None:
    tensors, shared = numbers(), views()
    write_case(folder, "zip", tensors, tensors)
    write_case(folder, "legacy", tensors, tensors, _use_new_zipfile_serialization=False)
    write_case(folder, "protocol_4", tensors, tensors, pickle_protocol=4)
    write_case(folder, "views", shared, shared)
    write_case(folder, "views_legacy", shared, shared, _use_new_zipfile_serialization=False)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    write_case(folder, "module", module.state_dict(), module.state_dict())
    parameters = {"a": torch.nn.Parameter(torch.randn(3)), "b": torch.randn(2, requires_grad=True)}
    write_case(folder, "parameters", {"model": parameters},
               {f"model.{name}": value for name, value in parameters.items()})
    write_case(folder, "training_run", *training_run())
    torch.serialization.set_crc32_options(False)
    write_case(folder, "no_checksums", tensors, tensors)
    for ranks in (1, RANKS):
        write_distributed(folder / f"distributed_{ranks}", ranks)


def write_distributed(folder: Path, ranks: int) -> None:
    """A sharded checkpoint by several processes."""
    processes = [subprocess.Popen([sys.executable, __file__, "rank", str(folder), str(rank),
                                   str(ranks)]) for rank in range(ranks)]
    assert [process.wait() for process in processes] == [0] * ranks
    write_raw(folder / "raw", numbers())


def rank(folder: Path, number: int, ranks: int) -> None:
    """Cuts matrices by rows and cubes by columns, unevenly; scalars and vectors are replicated."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    folder.mkdir(exist_ok=True)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=number,
                                         world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 2)])
             if tensor.ndim >= 2 and tensor.numel() and tensor.dtype.itemsize > 1 else tensor
             for name, tensor in numbers().items()}
    dcp.save({**state, "step": 7}, checkpoint_id=folder / "model")
    torch.distributed.destroy_process_group()


def check(file: Path, folder: Path) -> None:
    """torch.load, without running code and mapped, finds exactly the numbers of `folder`/raw."""
    index = json.loads((folder / "raw" / "index.json").read_text())
    for options in ({}, {"mmap": True}):
        found = torch.load(file, weights_only=True, map_location="cpu", **options)
        assert found.keys() == index.keys(), found.keys() ^ index.keys()
        for name, (dtype, shape) in index.items():
            tensor = found[name]
            assert [str(tensor.dtype), list(tensor.shape)] == [f"torch.{dtype}", shape], name
            assert raw(tensor) == (folder / "raw" / name).read_bytes(), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *arguments = sys.argv[1:]
    if command == "write":
        write(Path(arguments[0]))
    elif command == "check":
        check(Path(arguments[0]), Path(arguments[1]))
    else:
        rank(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
