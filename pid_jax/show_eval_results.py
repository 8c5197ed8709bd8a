"""Prints the evaluations of a run.

    python -m pid_jax.show_eval_results --output-dir runs/ditok
    python -m pid_jax.show_eval_results --output-dir runs/ditok --top-k 3 --metric psnr
    python -m pid_jax.show_eval_results --output-dir runs/ditok --trend --export table.csv

Reads what training and `pid_jax.evaluate_tokens` wrote to evaluation_history/. Exit status: 0
done, 2 bad input.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pid_jax.data import command
from pid_jax.errors import UserError
from pid_jax.evaluation import history as history_lib
from pid_jax.evaluation.history import Evaluation
from pid_jax.files import atomic_write


def main(arguments: Sequence[str]) -> None:
    """Parses the command line and prints."""
    options = parse(arguments)
    history = history_lib.read_history(options.output_dir)
    shown = history
    if options.top_k:
        shown = history_lib.best(history, options.metric or "psnr", options.top_k)
    for line in table(shown):
        command.show(line)
    if options.trend:
        for name in history_lib.metric_names(history):
            command.show(trend_line(name, history_lib.trend(history, name)))
    if options.export:
        with atomic_write(options.export) as file:
            file.write(history_lib.to_csv(history))
        command.show(f"{options.export}: {len(history)} rows")


def table(history: Sequence[Evaluation]) -> Iterator[str]:
    """Lines of a table: a header, a row for each evaluation, and what could not be measured."""
    names = history_lib.metric_names(history)
    widths = [max(10, len(name)) for name in names]
    yield "    step" + "".join(f"  {name:>{width}}" for name, width in zip(names, widths))
    for evaluation in history:
        cells = (f"{evaluation.metrics[name]:.4f}" if name in evaluation.metrics else "-"
                 for name in names)
        yield f"{evaluation.step:>8}" + "".join(
            f"  {cell:>{width}}" for cell, width in zip(cells, widths))
    missing = {name: reason for evaluation in history
               for name, reason in evaluation.unavailable.items()}
    for name, reason in missing.items():
        yield f"{name}: unavailable, {reason}"


def trend_line(name: str, trend: history_lib.Trend) -> str:
    """One metric's first and last value and its change."""
    percent = "" if trend.percent is None else f" ({trend.percent:+.2f} %)"
    word = "better" if trend.improved else "not better"
    return (f"{name}: {trend.first[1]:.4f} at step {trend.first[0]} -> {trend.last[1]:.4f} at step "
            f"{trend.last[0]}, {trend.change:+.4f}{percent}, {word}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = command.Parser(prog="python -m pid_jax.show_eval_results", description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER",
                        help="workdir of the run, or its evaluation_history")
    parser.add_argument("--top-k", type=command.count, metavar="N",
                        help="only the best N evaluations by --metric")
    parser.add_argument("--metric", help="of --top-k; default: psnr")
    parser.add_argument("--trend", action="store_true", help="first against last, every metric")
    parser.add_argument("--export", type=Path, metavar="FILE.csv", help="write all as CSV")
    options = parser.parse_args(arguments)
    if options.metric and not options.top_k:
        raise UserError("--metric belongs to --top-k: say how many evaluations to show")
    return options


if __name__ == "__main__":
    sys.exit(command.run(main, sys.argv[1:]))
