"""The demonstration: GAS beside full batch and beside naive histories, on CLUSTER."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gnnautoscale.cli.display import megabytes, percent, print_table

GRAPHS = 80
EPOCHS = 25
_STEPS = 10
_MODES = {"gas": "GAS", "full": "full batch", "history": "naive history"}


def compare(graphs: int, epochs: int, *, quiet: bool) -> list[dict[str, Any]]:
    """Train in all three modes with as many steps each; every mode in a process of its own, to measure its memory."""
    rows = []
    for mode in _MODES:
        batch_size = max(1, graphs // _STEPS)
        # Full batch takes one step per epoch where the others take several.
        passes = epochs * -(-graphs // batch_size) if mode == "full" else epochs
        flags: dict[str, Any] = {
            "data": "cluster",
            "graphs": graphs,
            "model": "gin",
            "layers": 4,
            "hidden": 32,
            "mode": mode,
            "num-parts": graphs,
            "batch-size": batch_size,
            "epochs": passes,
            "evaluate-every": max(1, passes // 5),
            "evaluate-parts": 1,
            "lr": 0.005,
            "schedule": "cosine",
        }
        # The paper's batch norm keeps no averages: see the experiment on CLUSTER.
        command = [sys.executable, "-m", "gnnautoscale.cli", "train", "--json", "--no-track-running-stats"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        if quiet:
            command.append("--quiet")
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
        rows.append({"mode": mode, **json.loads(output)["runs"][0]})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    print_table(
        "4-layer GIN on CLUSTER",
        ["", "test accuracy", "train accuracy", "steps", "train seconds", "peak memory"],
        [
            [
                _MODES[row["mode"]],
                percent(row["scores"]["test"]),
                percent(row["scores"]["train"]),
                str(row["steps"]),
                f"{row['seconds']['train']:.1f}",
                megabytes(row["peak_memory"]),
            ]
            for row in rows
        ],
    )
