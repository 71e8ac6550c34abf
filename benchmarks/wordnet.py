"""What costs GAS accuracy on WordNet in long training.

Models and settings are those of `gas reproduce wordnet`. GAS also trains with more drawings of batches; with all
histories recomputed before every step, so that nothing is stale and only gradients stop at the batch's border; and on
the loss of the same or of random batches with gradients through the whole graph; and with exact steps, of which an
epoch has one, from the first epoch on or only at last. A batch of all 200 parts is full batch. Times per step are
meaningful only if a run has the machine to itself.

    python benchmarks/wordnet.py --models gcn gcnii --ways full --epochs 4000 --device cuda
    python benchmarks/wordnet.py --models gcn gcnii --ways gas "gas, nothing stale" --epochs 400 --device cuda
    python benchmarks/wordnet.py --models gcn --ways gas "gas, whole gradients" --epochs 40 --max-features 300
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor

import gnnautoscale as gas
from gnnautoscale.data.datasets import Dataset, from_file
from gnnautoscale.experiments.reproduce import load_experiment
from gnnautoscale.models import build_model

# Each is "gas" with these changes.
CHANGES: dict[str, dict[str, Any]] = {
    "gas, 16 drawings": {"drawings": 16},
    "gas, nothing stale": {"refresh_every": 1, "storage": "device"},
    "gas, then exact": {},
    "exact": {"mode": "exact", "drawings": None},
    "gas, whole gradients": {},
    "gas, whole gradients, random parts": {"partition": "random"},
}
SPLITS = ("train", "val", "test")


def train_through_all(model: torch.nn.Module, data: Data, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train on the loss of GAS's batches with gradients through the whole graph; returns the best epoch's scores."""
    loader = gas.HaloLoader(
        data,
        options["num_parts"],
        partition=options["partition"],
        batch_size=options["batch_size"],
        shuffle=True,
        drawings=options["drawings"],
        seed=seed,
        cache_dir=options["cache_dir"],
    )
    # On a CPU, PyG's layers are faster with this than with an edge_index.
    adjacency = to_torch_csr_tensor(data.edge_index.flip(0), size=(data.num_nodes, data.num_nodes))
    data, adjacency = data.to(options["device"]), adjacency.to(options["device"])
    model.to(options["device"])
    optimizer = torch.optim.Adam(model.parameters(), options["lr"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options["epochs"])
    best: dict[str, Any] = {"scores": {"val": -1.0}}
    for epoch in range(1, options["epochs"] + 1):
        model.train()
        for batch in loader:
            own = batch.n_id[: batch.batch_size].to(data.x.device)
            nodes = own[data.train_mask[own]]
            optimizer.zero_grad()
            F.cross_entropy(model(data.x, adjacency)[nodes], data.y[nodes]).backward()
            optimizer.step()
        schedule.step()
        if epoch % options["evaluate_every"] == 0:
            model.eval()
            with torch.no_grad():
                right = (model(data.x, adjacency).argmax(dim=1) == data.y).float()
            scores = {split: 100 * float(right[data[f"{split}_mask"]].mean()) for split in SPLITS}
            if scores["val"] > best["scores"]["val"]:
                best = {"scores": scores, "best_epoch": epoch, "steps": options["epochs"] * len(loader)}
    return best


def train(dataset: Dataset, work: Mapping[str, Any], way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; returns the best epoch's scores and the time of a step."""
    options = {
        **work["train"],
        **CHANGES.get(way, {}),
        "epochs": args.epochs,
        "evaluate_every": max(1, args.epochs // 20),
        "device": args.device,
        "cache_dir": args.cache_dir,
    }
    if way == "gas, then exact":
        options["exact_epochs"] = args.exact_epochs
    if args.batch_size is not None:
        options["batch_size"] = args.batch_size
    torch.manual_seed(args.seed)
    model = build_model(work["model"], dataset.train, dataset.num_classes, **work["options"])
    if "whole gradients" in way:
        return train_through_all(model, dataset.train, options, args.seed)
    result = gas.fit(model, dataset, **options, seed=args.seed).to_dict()
    return {
        **{name: result[name] for name in ("scores", "best_epoch", "steps", "peak_memory", "how")},
        "milliseconds": 1e3 * result["seconds"]["train"] / result["steps"],
    }


def main() -> None:
    """Print a line of JSON for each model and way to train it."""
    works = {(run.cell.split(".")[0], run.variant): run.work for run in load_experiment("wordnet").jobs(seeds=1)}
    models, variants = (list(dict.fromkeys(names)) for names in zip(*works, strict=True))
    ways = [*variants, *CHANGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--exact-epochs", type=int, default=0, help='the last ones of "gas, then exact"')
    parser.add_argument("--batch-size", type=int, help="parts per batch, instead of the configuration's")
    parser.add_argument("--max-features", type=int, help="fewer than the configuration's, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="data", help="where data sets are kept")
    parser.add_argument("--cache-dir", help="where partitions are kept")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for model in args.models:
        for way in args.ways:
            work = works[model, "gas" if way in CHANGES else way]
            data = dict(work["data"])
            file = Path(args.root) / data.pop("file")
            if args.max_features is not None:
                data["max_features"] = args.max_features
            names = ("epochs", "batch_size", "max_features", "seed")
            settings = {"model": model, "way": way, **{name: getattr(args, name) for name in names}}
            print(json.dumps({**settings, **train(from_file(file, **data), work, way, args)}), flush=True)


if __name__ == "__main__":
    main()
