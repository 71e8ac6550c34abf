"""What lower precision of histories costs: errors of rows and of a model's output, and accuracy after training.

Run with ``python benchmarks/precision.py results.json --root data``; it takes half an hour on one core. Missing data
sets are downloaded to the root. ``--tiny`` trains for a few epochs only.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnautoscale import HaloLoader, detach, refresh
from gnnautoscale.attach import autoscale
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.inference import infer_from_histories
from gnnautoscale.data import datasets
from gnnautoscale.data.datasets import Dataset
from gnnautoscale.experiments.reproduce import config
from gnnautoscale.history import codec_for
from gnnautoscale.models import build_model
from gnnautoscale.training import describe_machine, versions
from gnnautoscale.training.loop import FitResult, fit

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
NUM_ROWS = 20_000
# A cell of the paper's Table 1, changed model and training options, and the number of seeds.
TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "GCN, Cora": ("gcn.cora", {}, {}, 10),
    "GCN, CiteSeer": ("gcn.citeseer", {}, {}, 5),
    "GCN, PubMed": ("gcn.pubmed", {}, {}, 3),
    # 40 parts instead of 2 give larger halos.
    "GCNII, 16 layers, Cora": ("gcnii.cora", {"layers": 16}, {"epochs": 300, "num_parts": 40, "batch_size": 20}, 3),
}
# Whose rows and outputs are measured, with seed 0.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "GCN, 2 layers, Cora": ("gcn.cora", {}),
    "GCNII, 64 layers, Cora": ("gcnii.cora", {"mode": "full", "epochs": 150}),
}
Row = dict[str, Any]


class DropFeatures:
    """A model's dropout that draws only for non-zero features: equal in distribution, and faster for sparse features.

    Args:
        model: One of the paper's models.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Holds the features too, so that no other tensor takes their address.
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Drop values; computed inputs get plain dropout."""
        rate = self._model.dropout
        if not self._model.training or x.requires_grad or not x.is_contiguous() or x.is_cuda:
            return F.dropout(x, rate, self._model.training)
        key = x.data_ptr(), x.shape, x.dtype, x._version
        if key not in self._known:
            places = x.view(-1).nonzero().squeeze(1)
            self._known[key] = x, places, x.view(-1)[places]
        _, places, values = self._known[key]
        kept = torch.where(torch.rand(values.shape) < rate, 0.0, values / (1 - rate))
        return torch.zeros_like(x).view(-1).index_copy_(0, places, kept.to(x.dtype)).view_as(x)


class Bench:
    """Measures, and writes every number at once.

    Args:
        path: The JSON file.
        root: Where data sets are.
        device: Where to compute.
        tiny: Whether to use few epochs and one seed.
    """

    def __init__(self, path: Path, root: str, device: str, *, tiny: bool) -> None:
        self._path, self._root, self._device, self._tiny = path, root, device, tiny
        self._start = time.perf_counter()
        self._table1 = config.load_experiment("table1")
        self._loaded: dict[str, Dataset] = {}
        self.rows: list[Row] = []
        self.outputs: list[Row] = []
        self.accuracy: list[Row] = []
        self._content: Row = {"machine": describe_machine(device), "versions": versions(), "tiny": tiny}
        self._content |= {"rows": self.rows, "outputs": self.outputs, "accuracy": self.accuracy}

    def say(self, text: str) -> None:
        """Print a line with the time since the start, and write the numbers so far."""
        seconds = time.perf_counter() - self._start
        self._path.write_text(json.dumps({**self._content, "seconds": round(seconds)}, indent=1) + "\n")
        print(f"{seconds:7.1f} s  {text}", flush=True)

    def dataset(self, name: str) -> Dataset:
        """A data set, loaded once."""
        if name not in self._loaded:
            self._loaded[name] = datasets.load(name, self._root)
        return self._loaded[name]

    def train(self, cell: str, seed: int, history_dtype: str, model: Row, options: Row) -> tuple[nn.Module, FitResult]:
        """Train a cell of Table 1 without refreshing histories.

        Args:
            cell: The cell.
            seed: Determines weights, parts and batches.
            history_dtype: Precision of histories.
            model: Changed model options.
            options: Changed training options.

        Returns:
            The trained model, detached, and the result of :func:`fit`.
        """
        name, dataset = cell.split(".")
        found, data = self._table1.cells[cell], self.dataset(dataset)
        torch.manual_seed(seed)
        built = build_model(name, data.train, data.num_classes, **{**found["model"], **model})
        if self._device == "cpu":
            built._drop = DropFeatures(built)
        options = {**self._table1.train, **found["train"], "evaluate_every": 5, **options}
        options |= {"epochs": 5} if self._tiny else {}
        where = {"device": self._device, "cache_dir": str(Path(self._root) / "partitions")}
        result = fit(built, data, **options, history_dtype=history_dtype, seed=seed, **where)
        return detach(built), result

    def measure_rows(self, title: str, rows: Tensor) -> None:
        """Measure the error of rows after encoding and decoding, relative to their norms."""
        for name, dtype in PRECISIONS.items():
            codec = codec_for(dtype, rows.size(1))
            raw = codec.encode(rows)
            error = (codec.decode(raw, rows.dtype) - rows).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-30)
            row = {"rows": title, "count": rows.size(0), "width": rows.size(1), "precision": name}
            row |= {"bytes": raw.nbytes // rows.size(0), "mean": _short(error.mean()), "worst": _short(error.max())}
            self.rows.append(row)
        self.say(f"rows: {title}")

    def measure_output(self, title: str, model: nn.Module, data: Dataset) -> None:
        """Measure the error of the output from histories, and how many predicted classes change."""
        model.eval()
        with torch.no_grad():
            expected = model(data.train.x.to(self._device), data.train.edge_index.to(self._device)).cpu()
        in_parts, at_once = HaloLoader(data.train, 8), HaloLoader(data.train, 1)
        for name, dtype in PRECISIONS.items():
            row: Row = {"model": title, "precision": name}
            # With one part only the stored rows are rounded; with several, each layer is computed from rounded rows.
            for how, loader in (("once", at_once), ("every_layer", in_parts)):
                autoscale(model, data.train, dtype=dtype)
                refresh(model, loader)
                out = infer_from_histories(model, in_parts)
                detach(model)
                row[how] = _short((out - expected).norm() / expected.norm())
                row[f"{how}_changed_percent"] = _short(100 * (out.argmax(1) != expected.argmax(1)).float().mean())
            self.outputs.append(row)
            self.say(f"output of {title}: {name}")

    def hidden_rows(self, model: nn.Module, data: Dataset) -> Tensor:
        """The rows of all histories of a model, concatenated."""
        autoscale(model, data.train)
        refresh(model, HaloLoader(data.train, 1))
        cpu, nodes = torch.device("cpu"), torch.arange(data.train.num_nodes)
        histories = attached(model).memory.histories.values()
        rows = torch.cat([history.pull(nodes, device=cpu, dtype=torch.float32) for history in histories])
        detach(model)
        return rows

    def measure_accuracy(self, title: str) -> None:
        """Measure test accuracy at the best validation accuracy, with the same seeds in each precision."""
        cell, model, options, seeds = TRAINED[title]
        seeds = 1 if self._tiny else seeds
        found: dict[str, list[FitResult]] = {name: [] for name in PRECISIONS}
        for seed in range(seeds):
            for name in PRECISIONS:
                found[name].append(self.train(cell, seed, name, model, options)[1])
            scores = (f"{name} {results[-1].scores['test']:.1f}" for name, results in found.items())
            self.say(f"{title}, seed {seed}: {', '.join(scores)}")
        for name, results in found.items():
            scores = [result.scores["test"] for result in results]
            apart = [score - base.scores["test"] for score, base in zip(scores, found["float32"], strict=True)]
            row: Row = {"cell": title, "precision": name, "seeds": list(range(seeds)), "epochs": len(results[0].epochs)}
            row |= {"history_bytes": results[0].history_bytes, "test": [round(score, 2) for score in scores]}
            self.accuracy.append(row | _spread("test", scores) | _spread("apart", apart))
        self.say(title)

    def run(self) -> None:
        """Run all measurements, quick ones first."""
        generator = torch.Generator().manual_seed(0)
        for width in (64, 256):
            self.measure_rows(f"Gaussian, {width} wide", torch.randn(NUM_ROWS, width, generator=generator))
        for title, (cell, options) in EXAMPLES.items():
            model, result = self.train(cell, 0, "float32", {}, options)
            data = self.dataset(cell.split(".")[1])
            self.say(f"{title}: test accuracy {result.scores['test']:.1f}")
            rows = self.hidden_rows(model, data)
            self.measure_rows(f"{title}, {rows.size(1)} wide", rows)
            self.measure_output(title, model, data)
        for title in TRAINED:
            self.measure_accuracy(title)

    def tables(self) -> str:
        """The measurements in Markdown."""
        parts = [
            _table(
                ["rows", "", *PRECISIONS],
                [
                    [title, what, *(_number(row[key]) for row in self.rows if row["rows"] == title)]
                    for title in dict.fromkeys(row["rows"] for row in self.rows)
                    for what, key in (("bytes", "bytes"), ("mean error", "mean"), ("worst error", "worst"))
                ],
            ),
            _table(
                ["model", "rounded", "", *PRECISIONS],
                [
                    [title, how, what, *(_number(row[key]) for row in self.outputs if row["model"] == title)]
                    for title in dict.fromkeys(row["model"] for row in self.outputs)
                    for how, first in (("once", "once"), ("at every layer", "every_layer"))
                    for what, key in (("error", first), ("classes changed, %", f"{first}_changed_percent"))
                ],
            ),
            _table(
                ["training", "seeds", *PRECISIONS],
                [
                    line
                    for title in dict.fromkeys(row["cell"] for row in self.accuracy)
                    for line in _accuracy([row for row in self.accuracy if row["cell"] == title])
                ],
            ),
        ]
        return "\n\n".join(parts)


def _accuracy(rows: list[Row]) -> list[list[str]]:
    """Two lines of a table: the scores, and their differences from float32 with the same seeds."""
    scores = [f"{row['test_mean']:.2f} ± {row['test_std']:.2f}" for row in rows]
    # Differences scatter less than scores; this is the standard error of their mean.
    count = len(rows[0]["seeds"])
    apart = [f"{row['apart_mean']:+.2f} ± {row['apart_std'] / count**0.5:.2f}" for row in rows[1:]]
    return [[rows[0]["cell"], str(count), *scores], ["difference from float32", "", "", *apart]]


def _table(head: list[str], lines: list[list[str]]) -> str:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ruler, *lines])


def _number(value: float) -> str:
    return f"{value:.2g}" if isinstance(value, float) else f"{value:,}"


def _short(value: Tensor) -> float:
    return float(f"{float(value):.3g}")


def _spread(name: str, values: Sequence[float]) -> Row:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {f"{name}_mean": round(statistics.fmean(values), 3), f"{name}_std": round(spread, 3)}


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--root", default="data", help="where data sets are")
    parser.add_argument("--device", default="cpu", help="where to compute")
    parser.add_argument("--tiny", action="store_true", help="few epochs and one seed")
    given = parser.parse_args()
    bench = Bench(given.results, given.root, given.device, tiny=given.tiny)
    bench.run()
    print(bench.tables())


if __name__ == "__main__":
    main()
