"""Which way to train: full batch, exact steps, GAS, GAS and then exact steps, or neighbour sampling.

    python benchmarks/modes.py --device cuda --output modes.json

A GCN of three layers, 128 wide, on WordNet, CLUSTER, PubMed and Coauthor-Physics, with the same number of steps in
every way: test accuracy at the best validation accuracy, seconds of training until then, and the most GPU memory.
Histories and features are in host memory, as for a graph that does not fit; full batch has everything on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data.datasets import from_file

BATCHES = 8
WIDTH = 128


@dataclass(frozen=True)
class Setting:
    """Parts of a graph, steps of training, the learning rate and dropout."""

    parts: int
    steps: int
    lr: float
    dropout: float


SETTINGS = {
    "wordnet": Setting(240, 1200, 0.005, 0.3),
    "cluster": Setting(80, 400, 0.005, 0.0),
    "pubmed": Setting(40, 400, 0.01, 0.5),
    "coauthor-physics": Setting(40, 400, 0.01, 0.5),
}
WAYS = ("full", "exact", "gas", "gas, then exact", "sage")


@cache
def load(name: str, root: Path, split: int) -> gas.Dataset:
    """One of the graphs."""
    if name == "wordnet":
        return from_file(root / "WordNet3/raw/wordnet3.npz", undirected=True, max_features=1000)
    if name == "cluster":
        return gas.load(name, str(root), seed=0, graphs=1000)
    return gas.load(name, str(root), split=split)


def train(name: str, way: str, root: Path, seed: int, device: str) -> dict[str, Any]:
    """Train once."""
    setting, dataset = SETTINGS[name], load(name, root, seed if name == "coauthor-physics" else 0)
    at_last = setting.steps // 10
    epochs: dict[str, Any] = {"epochs": setting.steps}
    if way in ("gas", "sage"):
        epochs = {"epochs": setting.steps // BATCHES}
    if way == "gas, then exact":
        epochs = {"epochs": (setting.steps - at_last) // BATCHES + at_last, "exact_epochs": at_last}
    torch.manual_seed(seed)
    x = dataset.train.x
    model = GCN(x.size(1), WIDTH, num_layers=3, out_channels=dataset.num_classes, dropout=setting.dropout)
    result = gas.fit(
        model,
        dataset,
        mode={"gas, then exact": "gas"}.get(way, way),
        num_parts=setting.parts,
        batch_size=setting.parts // BATCHES,
        drawings=None if way in ("exact", "full", "sage") else 4,
        fan_out=[10, 10, 10] if way == "sage" else None,
        storage="device" if way == "full" else "host",
        lr=setting.lr,
        evaluate_every=max(1, epochs["epochs"] // 25),
        device=device,
        seed=seed,
        **epochs,
    )
    spent = sum(epoch.seconds for epoch in result.epochs[: result.best_epoch])
    return {"test": result.scores["test"], "seconds": spent, "steps": result.steps, "how": result.how}


def measured(name: str, way: str, root: Path, seeds: int, device: str) -> dict[str, Any]:
    """The mean of all seeds, and the most GPU memory of a step."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    runs = [train(name, way, root, seed, device) for seed in range(seeds)]
    tests = [run["test"] for run in runs]
    return {
        "graph": name,
        "way": way,
        "test": statistics.mean(tests),
        "deviation": statistics.stdev(tests) if seeds > 1 else None,
        "seconds": statistics.mean(run["seconds"] for run in runs),
        "GPU": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "runs": runs,
    }


def main() -> None:
    """Print a line of JSON for each graph and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("data"), help="where data sets are kept")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.graphs:
        for way in given.ways:
            found.append(measured(name, way, given.root, given.seeds, given.device))
            print(json.dumps({key: value for key, value in found[-1].items() if key != "runs"}), flush=True)
            if given.output:
                given.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
