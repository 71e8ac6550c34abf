"""What ``gas bench`` measures, on generated graphs: one module for each question.

Steps, epochs, transfers and storage through the library's own training loop; and what a user runs (an own loop,
inference, start-up, memory), each next to plain PyG in the same run.
"""

from gnnautoscale.experiments.bench.graphs import PRODUCTS, BenchGraph, make_data, make_loader
from gnnautoscale.experiments.bench.host_memory import bench_memory
from gnnautoscale.experiments.bench.inference import bench_infer
from gnnautoscale.experiments.bench.measuring import Numbers, free_memory
from gnnautoscale.experiments.bench.own_loop import LOOPS, bench_loop
from gnnautoscale.experiments.bench.start_up import bench_start
from gnnautoscale.experiments.bench.steps import (
    COLUMNS,
    MEDIA,
    bench_epoch,
    bench_io,
    bench_step,
    bench_storage,
    draw_steps,
    step_table,
    time_epochs,
    with_computation,
)

__all__ = [
    "COLUMNS",
    "LOOPS",
    "MEDIA",
    "PRODUCTS",
    "BenchGraph",
    "Numbers",
    "bench_epoch",
    "bench_infer",
    "bench_io",
    "bench_loop",
    "bench_memory",
    "bench_start",
    "bench_step",
    "bench_storage",
    "draw_steps",
    "free_memory",
    "make_data",
    "make_loader",
    "step_table",
    "time_epochs",
    "with_computation",
]
