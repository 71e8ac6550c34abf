"""What compensation gives back of the accuracy that the border of a batch costs, and what a step costs.

Each way trains the same model for the same number of steps with the same batches: full batch, exact steps (each over
all batches), GAS, and GAS with each compensation. It prints a line of JSON for each run.

    python benchmarks/compensation.py --graphs data/wordnet3.npz --models gcn gin --steps 3200 --seeds 3 --device cuda
    python benchmarks/compensation.py --graphs pubmed amazon-computers --steps 400 --num-parts 40 --batch-size 5

Graphs are names of data sets or files; --random-split replaces the splits of small ones by 60, 20 and 20 % of the
nodes. Where there is no METIS, --cache-dir may hold the partitions that another machine has made. Times per step are
meaningful only if a run has the machine to itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import gnnautoscale as gas
from gnnautoscale.data.datasets import Dataset, from_file, load
from gnnautoscale.models import build_model

WAYS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "exact": {"mode": "exact"},
    "gas": {},
    "gradient": {"compensate": "gradient"},
    "momentum": {"compensate": "momentum"},
}
MODELS = ("gcn", "gat", "gcnii", "appnp", "gin", "graphsage", "pna")


def dataset_of(name: str, args: argparse.Namespace) -> Dataset:
    """Load a data set by its name or file."""
    if Path(name).suffix:
        dataset = from_file(name, undirected=True, max_features=args.max_features)
    else:
        dataset = load(name, root=args.root)
    if args.random_split:
        data = dataset.train
        place = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(0))
        data.train_mask, data.val_mask, data.test_mask = place < 0.6, (place >= 0.6) & (place < 0.8), place >= 0.8
        dataset = Dataset.of(data)
    return dataset


def train(name: str, model_name: str, way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; returns the best epoch's scores and the time of a step."""
    dataset = dataset_of(name, args)
    at_once = way in ("full", "exact")
    epochs = max(1, args.steps // (1 if at_once else -(-args.num_parts // args.batch_size)))
    torch.manual_seed(seed)
    sizes = {"hidden": args.hidden, "layers": args.layers, "dropout": args.dropout}
    model = build_model(model_name, dataset.train, dataset.num_classes, **sizes)
    result = gas.fit(
        model,
        dataset,
        num_parts=args.num_parts,
        batch_size=args.batch_size,
        drawings=args.drawings,
        epochs=epochs,
        evaluate_every=max(1, epochs // 20),
        lr=args.lr,
        grad_norm=args.grad_norm,
        seed=seed,
        device=args.device,
        cache_dir=args.cache_dir,
        diagnose_every="never",
        **WAYS[way],
    ).to_dict()
    return {
        **{key: result[key] for key in ("scores", "best_epoch", "steps", "peak_memory", "history_bytes", "how")},
        "last_loss": result["epochs"][-1]["loss"],
        "milliseconds": 1e3 * result["seconds"]["train"] / result["steps"],
    }


def main() -> None:
    """Print a line of JSON for each graph, model, way and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gcn"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--num-parts", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=30, help="parts per batch")
    parser.add_argument("--drawings", type=int, help="how often parts are drawn into batches; by default every epoch")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--grad-norm", type=float)
    parser.add_argument("--max-features", type=int, default=1000)
    parser.add_argument("--random-split", action="store_true")
    parser.add_argument("--root", default="data", help="where data sets are kept")
    parser.add_argument("--cache-dir", help="where partitions are kept")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name in args.graphs:
        for model in args.models:
            for way in args.ways:
                for seed in range(args.seeds):
                    run = {"graph": Path(name).stem, "model": model, "way": way, "seed": seed}
                    print(json.dumps({**run, **train(name, model, way, seed, args)}), flush=True)


if __name__ == "__main__":
    main()
