"""The command: `python -m tools.convert_torch_weights SUB-COMMAND` (see --help)."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pid_jax.errors import UserError
from tools.convert_torch_weights import encoder_command, fix_batch
from tools.convert_torch_weights.convert import DTYPES, Request, convert
from tools.convert_torch_weights.export import export
from tools.convert_torch_weights.inspection import inspect
from tools.convert_torch_weights.layout import counted
from tools.convert_torch_weights.mappings import convertible_networks
from tools.convert_torch_weights.matching import AUX_HEAD, LQ, Exceptions
from tools.convert_torch_weights.plain import rewrite
from tools.convert_torch_weights.training_layout import export_training
from tools.convert_torch_weights.verify import verify


class _Parser(argparse.ArgumentParser):
    """Mistakes on the command line become the same one sentence as all bad input."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str]) -> int:
    """Runs one sub-command.

    Returns 0 when it is done, 2 for bad input, 1 when a disk fails, 130 when it is interrupted.
    """
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was made", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tools.convert_torch_weights",
                     description="PyTorch weights in and out of this project; see docs/convert.md.")
    commands = parser.add_subparsers(
        required=True, metavar="{convert,inspect,verify,export,tensors,encoder,fix-batch}")
    _add_convert(commands.add_parser("convert", help="PyTorch weights to a checkpoint folder"))
    _add_inspect(commands.add_parser("inspect", help="what is in a weight file or checkpoint"))
    _add_verify(commands.add_parser("verify", help="compare a source with a converted folder"))
    _add_export(commands.add_parser("export", help="a checkpoint back to a PyTorch file"))
    _add_tensors(commands.add_parser("tensors", help="a PyTorch file as plain .safetensors"))
    encoder_command.add(commands.add_parser("encoder", help=encoder_command.HELP))
    fix_batch.add(commands.add_parser("fix-batch", help=fix_batch.HELP))
    return parser


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_convert)
    parser.add_argument("--src", required=True, help="weight file or folder")
    parser.add_argument("--dst", required=True, type=Path, help="folder to make")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=convertible_networks(),
                      help="network; options from the shapes")
    what.add_argument("--config", help="config file (.py) or a run's config.json")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", type=_change,
                        help="change a key of the config; without a dot, an option of the model")
    parser.add_argument("--which", help="ema, net or another part; default: ema where there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the source")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")
    parser.add_argument("--training-state", action="store_true",
                        help="also the average and the optimizer, to go on training from "
                             "(config.resume)")
    parser.add_argument("--fresh-lq", action="store_true",
                        help="text-to-image weights start a PiD network: draw its LQ branch")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--fresh-aux-head", action="store_true",
                      help="the source lacks the auxiliary RGB head: draw it")
    head.add_argument("--drop-aux-head", action="store_true",
                      help="make a network without the source's auxiliary RGB head")


def _change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _convert(arguments: argparse.Namespace) -> None:
    changes, allowed = _exceptions(arguments)
    started = time.monotonic()
    card = convert(Request(
        arguments.src, arguments.dst, arguments.model, arguments.config,
        dict(arguments.set) | changes, arguments.which, arguments.dtype, arguments.overwrite,
        allowed, arguments.training_state))
    seconds = time.monotonic() - started
    print(f"{arguments.dst}: {card['what']}, {card['parameters']:,} parameters in "
          f"{card['dtype']}, from the {card['weights']} weights of {card['source']['name']} "
          f"({card['source']['format']}), {seconds:.1f} s")
    _report_exceptions(card)
    print(f"weights: {card['licence']['weights']}")


def _exceptions(arguments: argparse.Namespace) -> tuple[dict[str, str], Exceptions]:
    """What the flags for fresh and dropped parameters mean: changes of the config, and keys."""
    fresh, dropped, changes = (), (), {}
    if arguments.fresh_lq:
        fresh += LQ
    if arguments.fresh_aux_head:
        fresh, changes = fresh + AUX_HEAD, {"lq_aux_rgb_head": "True"}
    if arguments.drop_aux_head:
        dropped, changes = AUX_HEAD, {"lq_aux_rgb_head": "False"}
    return changes, Exceptions(fresh, dropped)


def _report_exceptions(card: dict) -> None:
    for part, count in card["left_out"]["parts"].items():
        print(f"left out: part {part}, {counted(count)}")
    for key in card["left_out"]["keys"]:
        print(f"left out: {key}")
    for key in card["fresh"]:
        print(f"fresh: {key}")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=lambda arguments: print(
        "\n".join(inspect(arguments.src, arguments.all))))
    parser.add_argument("src", help="weight file or folder, or a checkpoint of this project")
    parser.add_argument("--all", action="store_true", help="one line for each tensor")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_verify)
    parser.add_argument("src", help="weight file or folder")
    parser.add_argument("folder", type=Path, help="what convert made of it")
    parser.add_argument("--which", help="part of the source; default: the one converted")


def _verify(arguments: argparse.Namespace) -> None:
    count = verify(arguments.src, arguments.folder, arguments.which)
    print(f"{arguments.src} and {arguments.folder} are equal bit by bit, {counted(count)}")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_export)
    parser.add_argument("folder", type=Path, help="converted folder, workdir or checkpoint")
    parser.add_argument("--dst", required=True, type=Path, help=".safetensors or .pth file to make")
    parser.add_argument("--prefix", default="", help='put before every name, such as "net."')
    parser.add_argument("--which", help="params or ema; default: ema where there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    parser.add_argument("--training-layout", action="store_true",
                        help="make --dst a folder with checkpoint-STEP.pt and ema-STEP.pt, as "
                        "DiTok's and JiT's trainings write them")


def _export(arguments: argparse.Namespace) -> None:
    if arguments.training_layout:
        for path in export_training(arguments.folder, arguments.dst, arguments.overwrite):
            print(f"{path}: {path.stat().st_size:,} bytes")
        return
    count = export(arguments.folder, arguments.dst, arguments.prefix, arguments.which,
                   arguments.overwrite)
    print(f"{arguments.dst}: {counted(count)}, {arguments.dst.stat().st_size:,} bytes")


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_tensors)
    parser.add_argument("--src", required=True, help="weight file, such as FID's Inception")
    parser.add_argument("--dst", required=True, type=Path, help=".safetensors file to make")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def _tensors(arguments: argparse.Namespace) -> None:
    count = rewrite(arguments.src, arguments.dst, arguments.overwrite)
    print(f"{arguments.dst}: {counted(count)}, {arguments.dst.stat().st_size:,} bytes")
