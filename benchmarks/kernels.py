"""Time the kernels on a GPU: rows over the bus against plain copies, and SpMM against PyTorch.

Run with ``PYTHONPATH=src python benchmarks/kernels.py [results.json]`` on a machine with a GPU.
"""

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gnnautoscale.kernels import Adjacency, gather_rows, merge_rows, scatter_rows, spmm

NUM_ROWS, WIDTH = 1_000_000, 256
REPEATS, WARMUP = 30, 5
SLEEP = 2_000_000  # cycles, about a millisecond

# Batches like those of the design notes: (batch nodes, halo nodes, edges inside, edges from the halo).
SHAPES = {
    "4,000 of 24,000": (4_000, 20_000, 240_000, 1_200_000),
    "16,000 of 48,000": (16_000, 32_000, 400_000, 413_000),
}


def median_ms(call: Callable[[], object]) -> float:
    """The median time of a call on the GPU, in milliseconds."""
    for _ in range(WARMUP):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP)  # hides launch times: the whole call is queued before it starts
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Table:
    """Prints each measurement and keeps it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, ms: float, **more: float) -> None:
        """Add a measurement, with numbers derived from it."""
        self.rows.append({"name": name, "ms": ms, **more})
        print(f"{name:<64}{ms:9.3f} ms" + "".join(f"   {value:7.2f} {key}" for key, value in more.items()), flush=True)


def bus(table: Table) -> None:
    """Measure gathers from and scatters to pinned host memory."""
    host = torch.ones(64 * 2**20, pin_memory=True)  # 256 MB
    device = torch.empty_like(host, device="cuda")
    gigabytes = host.nbytes / 1e9
    ms = median_ms(lambda: device.copy_(host, non_blocking=True))
    copy = gigabytes / ms * 1e3
    table.add("host to device, 256 MB", ms, **{"GB/s": copy})
    ms = median_ms(lambda: host.copy_(device, non_blocking=True))
    back = gigabytes / ms * 1e3
    table.add("device to host, 256 MB", ms, **{"GB/s": back})

    index = torch.randperm(NUM_ROWS, device="cuda")[:100_000]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        history = torch.ones(NUM_ROWS, WIDTH, dtype=dtype).pin_memory()
        out = torch.empty(index.numel(), WIDTH, dtype=dtype, device="cuda")
        for programs in (4, 8, 16, 32):
            ms = median_ms(lambda out=out, history=history, p=programs: gather_rows(history, index, out, programs=p))
            rate = out.nbytes / ms / 1e6
            table.add(
                f"gather 100,000 x {WIDTH} {name}, {programs} programs", ms, **{"GB/s": rate, "x copy": rate / copy}
            )
        for count in (4_000, 100_000):
            rows, where = out[:count], index[:count]
            ms = median_ms(lambda rows=rows, history=history: history[: rows.size(0)].copy_(rows, non_blocking=True))
            table.add(
                f"contiguous copy of {count:,} x {WIDTH} {name} to the host", ms, **{"GB/s": rows.nbytes / ms / 1e6}
            )
            for programs in (4, 8, 16):
                ms = median_ms(
                    lambda rows=rows, where=where, history=history, p=programs: scatter_rows(
                        rows, where, history, programs=p
                    )
                )
                rate = rows.nbytes / ms / 1e6
                name_programs = f"scatter {count:,} x {WIDTH} {name}, {programs} programs"
                table.add(name_programs, ms, **{"GB/s": rate, "x copy": rate / back})
        del history

    rows, staged = torch.empty(4_000, WIDTH, device="cuda"), torch.empty(2, 20_000, WIDTH, device="cuda")
    where = torch.randint(-4_000, 4_000, (2, 20_000), device="cuda", dtype=torch.int32)
    side, merged = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.empty(24_000, WIDTH, device="cuda")
    ms = median_ms(lambda: merge_rows(rows, staged, rows, where, side, merged))
    table.add(f"merge 4,000 + 20,000 x {WIDTH} float32", ms, **{"GB/s": 2 * merged.nbytes / ms / 1e6})


def batch(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Targets and sources of random edges into the nodes of a batch, sorted by target."""
    nodes, halo, inside, outside = shape
    target = torch.cat([torch.randint(nodes, (inside,)), torch.randint(nodes, (outside,))])
    each = torch.arange(outside) * halo // outside  # every halo node has equally many edges
    source = torch.cat([torch.randint(nodes, (inside,)), nodes + each])
    target, order = target.sort(stable=True)
    return target.cuda(), source[order].cuda()


def products(table: Table) -> None:
    """Measure forward and backward of SpMM, and of PyTorch's equivalents."""
    for title, shape in SHAPES.items():
        nodes, sources = shape[0], shape[0] + shape[1]
        target, source = batch(shape)
        weight = torch.rand(target.numel(), device="cuda")
        plain = Adjacency.build(target, source, nodes, sources)
        weighted = Adjacency.build(target, source, nodes, sources, weight)
        title = f"{title}, {target.numel() / 1e6:.2f} M edges"
        float32, bfloat16 = torch.float32, torch.bfloat16
        cases: list[tuple[str, Callable[[Tensor], Tensor], torch.dtype]] = [
            ("sum", lambda x, a=plain: spmm(a, x), float32),
            ("sum bf16", lambda x, a=plain: spmm(a, x), bfloat16),
            ("weighted sum", lambda x, a=weighted: spmm(a, x), float32),
            ("mean", lambda x, a=plain: spmm(a, x, "mean"), float32),
            ("max", lambda x, a=plain: spmm(a, x, "max"), float32),
            ("weighted max bf16", lambda x, a=weighted: spmm(a, x, "max"), bfloat16),
        ]
        matrix = torch.sparse_csr_tensor(
            plain.ptr, plain.col, torch.ones_like(weight), (nodes, sources), check_invariants=False
        )
        cases.append(("torch.sparse.mm", lambda x, m=matrix: torch.sparse.mm(m, x), float32))
        cases.append(
            (
                "index_add",
                lambda x, s=source, t=target, n=nodes: x.new_zeros(n, WIDTH).index_add(0, t, x.index_select(0, s)),
                float32,
            )
        )
        for name, product, dtype in cases:
            x = torch.randn(sources, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
            grad = torch.randn(nodes, WIDTH, device="cuda", dtype=dtype)

            def step(x: Tensor = x, grad: Tensor = grad, product: Callable[[Tensor], Tensor] = product) -> None:
                torch.autograd.grad(product(x), x, grad)

            def forward(x: Tensor = x, product: Callable[[Tensor], Tensor] = product) -> None:
                with torch.no_grad():
                    product(x)

            table.add(f"{title}: {name}", median_ms(step), **{"ms forward": median_ms(forward)})


def main() -> None:
    """Print a table, and write it to the path on the command line."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse ")
    table = Table()
    bus(table)
    products(table)
    if len(sys.argv) > 1:
        properties = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(sys.argv[1]).write_text(json.dumps({**properties, "results": table.rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
