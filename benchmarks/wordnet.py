"""Tells apart what costs GAS accuracy on WordNet where everything is trained for long.

Models and settings are those of `gas reproduce wordnet`, with as many epochs as asked for. GAS is trained in three more
ways: with more drawings of its batches, with batches four times as large, and with all histories recomputed before
every step, so that nothing is stale and only gradients stop at the border of a batch. Time per step means something
where a run has the machine to itself.

    python benchmarks/wordnet.py --models gcn gcnii --ways full --epochs 4000 --device cuda
    python benchmarks/wordnet.py --models gcn gcnii --ways gas "gas, nothing stale" --epochs 400 --device cuda
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gnnautoscale.reproduce import load
from gnnautoscale.reproduce.work import perform

# Each is "gas" with these changes.
CHANGES: dict[str, dict[str, Any]] = {
    "gas, 16 drawings": {"drawings": 16},
    "gas, larger batches": {"batch_size": 40},
    "gas, nothing stale": {"refresh_every": 1, "storage": "device"},
}


def main() -> None:
    """Print a line of JSON for each model and way to train it."""
    works = {(run.cell.split(".")[0], run.variant): run.work for run in load("wordnet").runs(seeds=1)}
    models, ways = (list(dict.fromkeys(names)) for names in zip(*works, strict=True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--ways", nargs="+", choices=[*ways, *CHANGES], default=[*ways, *CHANGES])
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="data", help="where data sets are kept")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for model in args.models:
        for way in args.ways:
            work = works[model, "gas" if way in CHANGES else way]
            evaluate_every = max(1, args.epochs // 20)
            train = {**work["train"], **CHANGES.get(way, {}), "epochs": args.epochs, "evaluate_every": evaluate_every}
            result = perform({**work, "train": train, "seed": args.seed}, root=args.root, device=args.device)
            line = {
                "model": model,
                "way": way,
                "epochs": args.epochs,
                "seed": args.seed,
                **{name: result[name] for name in ("scores", "best_epoch", "steps", "peak_memory", "how")},
                "milliseconds": 1e3 * result["seconds"]["train"] / result["steps"],
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
