"""Time attention forward and backward: the kernels against a row per edge, by parts and by layer.

Run with ``PYTHONPATH=src python benchmarks/attention.py --device cuda``. The error is relative to a row per edge in
double precision, over results and gradients; it is left out with ``--no-errors``, for machines with little memory.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.utils import scatter, softmax  # type: ignore[import-untyped]

from gnnautoscale.forward.lazy import LazyEdges
from gnnautoscale.kernels import Adjacency, additive_scores, edge_dots, weighted_sum

Run = Callable[..., Tensor]
SLEEP = 2_000_000  # cycles, about a millisecond


class Batch:
    """Random edges, and rows for both ends."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options, self.device = options, torch.device(options.device)
        edges, targets, sources = options.edges, options.targets, options.sources
        self.target = torch.randint(targets, (edges,)).sort().values.to(self.device)
        self.source = torch.randint(sources, (edges,)).to(self.device)
        if options.hub:
            self.target[: options.hub] = 0
            self.target = self.target.sort().values
        self.edge_index = torch.stack([self.source, self.target])
        self.adjacency = Adjacency.build(self.target, self.source, targets, sources)
        self.adjacency.tensors(edge_values=True)
        self.dtype = getattr(torch, options.dtype)

    def randn(self, *shape: int) -> Tensor:
        """Random values that need a gradient."""
        return torch.randn(*shape, device=self.device).to(self.dtype).requires_grad_()


def cases(batch: Batch) -> dict[str, tuple[Run, Run, list[Tensor]]]:
    """What to time: by the kernels, by a row per edge, and the inputs."""
    o, t, s = batch.options, batch.target, batch.source
    targets, sources = batch.randn(o.targets, o.heads, o.width), batch.randn(o.sources, o.heads, o.width)
    weight, factor = batch.randn(o.edges, o.heads), batch.randn(o.heads, o.width)
    lazy = LazyEdges.of(batch.edge_index, batch.adjacency, 1, short=True)

    def by_rows(w: Tensor, x: Tensor) -> Tensor:
        out: Tensor = scatter(w.unsqueeze(-1) * x.index_select(0, s), t, 0, o.targets)
        return out

    return {
        "weighted sum": (lambda w, x: weighted_sum(batch.adjacency, w, x), by_rows, [weight, sources]),
        "dots": (
            lambda a, b: edge_dots(batch.adjacency, a, b),
            lambda a, b: (a.index_select(0, t) * b.index_select(0, s)).sum(-1),
            [targets, sources],
        ),
        "additive scores": (
            lambda a, b, f: additive_scores(batch.adjacency, a, b, f, 0.2),
            lambda a, b, f: (F.leaky_relu(a.index_select(0, t) + b.index_select(0, s), 0.2) * f).sum(-1),
            [targets, sources, factor],
        ),
        "softmax": (
            lambda w: softmax(w, lazy[1], num_nodes=o.targets),
            lambda w: softmax(w, t, num_nodes=o.targets),
            [weight],
        ),
        **{name: layer_case(batch, lazy, layer) for name, layer in layers(o).items()},
    }


def layers(o: argparse.Namespace) -> dict[str, Callable[[], torch.nn.Module]]:
    """Layers whose input is as wide as their output."""
    width = o.heads * o.width
    return {
        "GATConv": lambda: pyg.GATConv(width, o.width, o.heads, add_self_loops=False),
        "GATv2Conv": lambda: pyg.GATv2Conv(width, o.width, o.heads, add_self_loops=False),
        "TransformerConv": lambda: pyg.TransformerConv(width, o.width, o.heads, root_weight=False),
    }


def layer_case(batch: Batch, lazy: Tensor, make: Callable[[], torch.nn.Module]) -> tuple[Run, Run, list[Tensor]]:
    """A layer's output at the targets, with a row for each source and the layer's weights as inputs."""
    o = batch.options
    layer = make().to(batch.device, batch.dtype)
    names = [name for name, _ in layer.named_parameters()]
    given = [batch.randn(o.sources, o.heads * o.width), *layer.parameters()]

    def run(edge_index: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        replaced = dict(zip(names, weights, strict=True))
        out: Tensor = torch.func.functional_call(layer, replaced, (x, edge_index))
        return out[: o.targets]

    return lambda *args: run(lazy, *args), lambda *args: run(batch.edge_index, *args), given


@cache
def gradient(shape: torch.Size, device: torch.device) -> Tensor:
    """What comes back to a result."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def step(run: Run, given: list[Tensor]) -> list[Tensor]:
    """Result and gradients."""
    out = run(*given)
    found = torch.autograd.grad(out, given, gradient(out.shape, out.device).to(out.dtype), allow_unused=True)
    return [out.detach(), *(value for value in found if value is not None)]


def timed(run: Run, given: list[Tensor], repeats: int) -> tuple[float, float]:
    """Median milliseconds of a step, and on a GPU its peak of memory in GB, beyond the inputs."""
    on_gpu, times = given[0].is_cuda, []
    for _ in range(2):
        step(run, given)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP)  # hides launch times: the whole step is queued before it starts
            start.record()
            step(run, given)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            step(run, given)
            times.append(1e3 * (time.perf_counter() - begin))
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if on_gpu else float("nan")
    return statistics.median(times), peak


def error(run: Run, plain: Run, given: list[Tensor]) -> float:
    """The largest error of the result and of all gradients, relative to their norms.

    Of a gradient that cancels out, such as that of a bias before a softmax, only the rounding is left.
    """
    wide = [value.detach().double().requires_grad_() for value in given]
    found, exact = step(run, given), step(plain, wide)
    least = 1e-3 * max(float(value.norm()) for value in exact)
    pairs = zip(found, exact, strict=True)
    return max(float((got.double() - value).norm()) / max(float(value.norm()), least) for got, value in pairs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    for name, default in (("targets", 16_000), ("sources", 48_000), ("edges", 813_000), ("heads", 4), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hub", type=int, default=0, help="edges of one target beyond its share")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-errors", action="store_true")
    options = parser.parse_args()
    batch = Batch(options)
    print(f"{'forward and backward':<20}{'kernels':>14}{'':>12}{'row per edge':>14}{'':>12}{'error':>12}")
    for name, (run, plain, given) in cases(batch).items():
        ours, theirs = timed(run, given, options.repeats), timed(plain, given, options.repeats)
        found = float("nan") if options.no_errors else error(run, plain, given)
        columns = "".join(f"{ms:11.2f} ms{peak:9.2f} GB" for ms, peak in (ours, theirs))
        print(f"{name:<20}{columns}{found:12.1e}", flush=True)


if __name__ == "__main__":
    main()
