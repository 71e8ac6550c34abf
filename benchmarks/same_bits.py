"""Trains a fixed list of models and prints a checksum of each run, to see whether a change of the code changes a bit.

A checksum covers the weights, the losses and the scores of every epoch. It belongs to a processor and a version of
PyTorch: compare two versions of the code on one machine.

    python benchmarks/same_bits.py --root data --output before.json    # with the old code
    python benchmarks/same_bits.py --root data --compare before.json   # with the new code
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import struct
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import gnnautoscale as gas
from gnnautoscale.models import build_model

MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"hidden": 16},
    "gat": {"hidden": 8, "heads": 4},
    "appnp": {"hidden": 16},
    "gcnii": {"hidden": 16, "layers": 4},
    "gin": {"hidden": 16},
}
EPOCHS = 3


def runs() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Every run of the list: data set, model and options of ``fit``."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for data in ("cora", "pubmed"):
        for model in MODELS:
            for mode in ("full", "gas", "history"):
                found[f"{data} {model} {mode}"] = data, model, {"mode": mode}
        found |= {
            f"{data} gcn host": (data, "gcn", {"storage": "host"}),
            f"{data} gcn host bfloat16": (data, "gcn", {"storage": "host", "history_dtype": "bfloat16"}),
            f"{data} gcn disk": (data, "gcn", {"storage": "disk"}),
            f"{data} gcnii disk int8": (data, "gcnii", {"storage": "disk", "history_dtype": "int8"}),
            f"{data} gin penalty": (data, "gin", {"lipschitz": 0.05}),
            f"{data} gat penalty, edge dropout": (data, "gat", {"lipschitz": 0.05, "edge_dropout": 0.2}),
            f"{data} gcn drawings": (data, "gcn", {"drawings": 2}),
            f"{data} gin refreshed": (data, "gin", {"refresh_every": "epoch"}),
            f"{data} gcn refreshed every 2 steps": (data, "gcn", {"refresh_every": 2, "evaluation": "histories"}),
            f"{data} gcn cosine, not kept": (data, "gcn", {"schedule": "cosine", "keep_batches": False}),
            f"{data} gcn cluster": (data, "gcn", {"mode": "cluster"}),
            f"{data} gcn sage": (data, "gcn", {"mode": "sage", "fan_out": [5, 5]}),
            f"{data} gcn resumed": (data, "gcn", {"resume": "after an epoch"}),
            f"{data} appnp resumed": (data, "appnp", {"resume": "after an epoch", "storage": "disk"}),
        }
    return found


def checksum(dataset: gas.Dataset, model: str, options: dict[str, Any], cache: Path) -> str:
    """Train, and digest what came out."""
    folder = Path(mkdtemp())
    options = {"num_parts": 8, "batch_size": 2, "grad_norm": 1.0, "cache_dir": str(cache), "epochs": EPOCHS} | options
    options["device"] = "cpu"
    if options.get("storage") == "disk":
        options["history_dir"] = str(folder / "histories")
    resume = options.pop("resume", None)
    trained, result = train(dataset, model, {**options, "epochs": 1 if resume else EPOCHS}, folder, resume=False)
    if resume:
        trained, result = train(dataset, model, options, folder, resume=True)
    digest = hashlib.sha256()
    for name, weight in sorted(trained.state_dict().items()):
        digest.update(name.encode() + weight.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for epoch in result.epochs:
        scores = [epoch.scores[split] for split in sorted(epoch.scores)]
        digest.update(struct.pack(f"<{1 + len(scores)}d", epoch.loss, *scores))
    shutil.rmtree(folder)
    return digest.hexdigest()[:24]


def train(
    dataset: gas.Dataset, model: str, options: dict[str, Any], folder: Path, *, resume: bool
) -> tuple[torch.nn.Module, gas.FitResult]:
    """Train a new model, from its beginning or from a checkpoint."""
    torch.manual_seed(0)
    built = build_model(model, dataset.train, dataset.num_classes, **MODELS[model])
    if options.get("mode") not in ("cluster", "sage"):
        options = {**options, "checkpoint_dir": str(folder / "checkpoints")}
    if resume:
        options["resume"] = str(folder / "checkpoints")
    result = gas.fit(built, dataset, **options)
    if hasattr(built, "_autoscaler"):
        gas.detach(built)
    return built, result


def main() -> None:
    """Run the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data", help="Where the data sets are.")
    parser.add_argument("--output", type=Path, help="Where to write the checksums.")
    parser.add_argument("--compare", type=Path, help="Checksums to compare with.")
    parser.add_argument("--only", default="", help="Only runs whose name holds this.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    wanted = json.loads(given.compare.read_text()) if given.compare else {}
    datasets = {name: gas.load(name, given.root) for name in ("cora", "pubmed")}
    cache, found, differ = Path(mkdtemp()), {}, []
    for name, (data, model, options) in runs().items():
        if given.only not in name:
            continue
        found[name] = checksum(datasets[data], model, options, cache)
        if wanted and found[name] != wanted.get(name):
            differ.append(name)
        print(f"{found[name]} {name}{'  DIFFERS' if name in differ else ''}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1))
    print(f"{len(found) - len(differ)} of {len(found)} runs as before" if wanted else f"{len(found)} runs")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
