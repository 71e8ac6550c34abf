"""Runs random models in batches and compares them with the whole graph: each must be exact, or refused.

    python benchmarks/random_models.py --minutes 60
    python benchmarks/random_models.py --first 1000 --seeds 500
    python benchmarks/random_models.py --first 1017 --seeds 1 --show    # one of them in detail
    python benchmarks/random_models.py --typed    # on heterogeneous graphs

Prints how often each outcome came, the distinct refusals with their number, and every seed that was wrong, that was
refused although all its parts are known to be exact, or that ended in another error.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.random_models import Recipe
from support.random_typed_models import TypedRecipe


def without_names(message: str) -> str:
    """A message without the names, numbers and layers that differ from model to model."""
    message = re.sub(r"^(evaluation|one part|training): ", "", message)
    message = re.sub(r"\w+ \('[^']*'\)", "LAYER", message)
    return re.sub(r"'[^']*'", "'...'", re.sub(r"\d+", "#", message))


def main() -> None:
    """Run the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--seeds", type=int, help="How many seeds; by default as many as fit into the minutes.")
    parser.add_argument("--minutes", type=float, default=10.0, help="How long at most.")
    parser.add_argument("--typed", action="store_true", help="Models on heterogeneous graphs.")
    parser.add_argument("--show", action="store_true", help="Print every model and its outcome.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = itertools.count(given.first) if given.seeds is None else range(given.first, given.first + given.seeds)
    end = time.monotonic() + 60 * given.minutes
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    bad = []
    for seed in seeds:
        if time.monotonic() > end:
            break
        recipe = (TypedRecipe if given.typed else Recipe).draw(seed)
        found = recipe.outcome()
        counts[found.kind] += 1
        if found.kind == "refused":
            refusals[without_names(found.detail)] += 1
        needless = found.kind == "refused" and recipe.is_harmless
        if needless or not found.held:
            bad.append(seed)
        if given.show or bad[-1:] == [seed]:
            print(f"{seed} {'needlessly ' if needless else ''}{found.kind}: {found.detail}\n    {recipe}", flush=True)
    print(f"\n{counts.total()} models: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    for message, count in refusals.most_common():
        print(f"{count:5} refused: {message}")
    print(f"wrong, needlessly refused, or another error: {bad or 'none'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
