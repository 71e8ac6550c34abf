"""The command ``gas demo``: GAS beside full batch and naive histories, on CLUSTER."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from typing import Annotated, Any

import typer

from gnnautoscale.cli.display import Json, megabytes, print_json, print_table, say, score_text
from gnnautoscale.errors import InputError

_BATCHES = 10
_MODES = {"gas": "GAS", "full": "full batch", "history": "naive history"}


def demo(
    graphs: Annotated[int, typer.Option(help="Number of training graphs of CLUSTER.")] = 80,
    epochs: Annotated[int, typer.Option(help="Number of epochs with histories.")] = 25,
    json: Json = False,
) -> None:
    """Train a 4-layer GIN on CLUSTER with GAS, in full batch and with naive histories, and compare them."""
    if graphs < 1 or epochs < 1:
        raise InputError("graphs and epochs must be at least 1", got=f"{graphs} and {epochs}", fix="Increase them.")
    results = {mode: _train(mode, graphs, epochs, quiet=json) for mode in _MODES}
    if json:
        print_json([{"mode": mode, **result} for mode, result in results.items()])
        return
    print_table(
        "4-layer GIN on CLUSTER",
        ["", "test accuracy", "train accuracy", "steps", "train seconds", "peak memory"],
        [
            [
                _MODES[mode],
                score_text(result["scores"]["test"]),
                score_text(result["scores"]["train"]),
                str(result["steps"]),
                f"{result['seconds']['train']:.1f}",
                megabytes(result["peak_memory"]),
            ]
            for mode, result in results.items()
        ],
    )
    say("more about these runs: gas report runs -o report.html")


def _train(mode: str, graphs: int, epochs: int, *, quiet: bool) -> dict[str, Any]:
    """Train in one mode, in a process of its own so that its memory can be measured; all modes take as many steps."""
    batch_size = max(1, graphs // _BATCHES)
    if mode == "full":  # one step per epoch
        epochs *= -(-graphs // batch_size)
    flags = f"--data=cluster --graphs={graphs} --num-parts={graphs} --batch-size={batch_size} --mode={mode}"
    flags += " --model=gin --layers=4 --hidden=32 --no-track-running-stats"  # as in the paper
    flags += f" --epochs={epochs} --lr=0.005 --schedule=cosine --evaluate-every={max(1, epochs // 5)}"
    flags += " --evaluate-parts=1 --json" + " --quiet" * quiet
    command = [sys.executable, "-m", "gnnautoscale", "train", *flags.split()]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    result: dict[str, Any] = json_format.loads(output)["runs"][0]
    return result
