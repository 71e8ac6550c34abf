"""Draws the site's figures from what the library computes: `python docs/figures.py` writes docs/figures/*.svg.

Each figure is drawn twice on a transparent ground, for the site's light and its dark colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import NullFormatter
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.analysis.bounds import error_by_sweep
from gnnautoscale.data.generate import communities
from gnnautoscale.graph.partitioning import connectivity, partition

FOLDER = Path(__file__).parent / "figures"


@dataclass(frozen=True)
class Colours:
    """What to draw with."""

    ink: str
    faint: str
    batch: str
    halo: str
    paper: str
    parts: tuple[str, ...]


THEMES = {
    "light": Colours(
        ink="#333844",
        faint="#c3c8d1",
        batch="#d9641a",
        halo="#1f6fb2",
        paper="#ffffff",
        parts=("#d9641a", "#1f6fb2", "#2c8a4b", "#9350a8", "#b8891b", "#c23b5a", "#198c8c", "#6b6f78"),
    ),
    "dark": Colours(
        ink="#dfe3ec",
        faint="#555c6c",
        batch="#ff9a52",
        halo="#6db4f0",
        paper="#1e2129",
        parts=("#ff9a52", "#6db4f0", "#6fcf8e", "#cf9be0", "#e6c15a", "#f0839c", "#5ccccc", "#a9aebb"),
    ),
}


# What is computed ####################################################################################################


def plane_graph(num_nodes: int = 130, radius: float = 0.145) -> tuple[Data, Tensor]:
    """Random points in a square, joined where they are close: a graph that can be drawn, and the points [N, 2]."""
    points = torch.rand(num_nodes, 2, generator=torch.Generator().manual_seed(4))
    near = (torch.cdist(points, points) < radius).fill_diagonal_(False)
    return Data(x=points, edge_index=near.nonzero().t().contiguous()), points


def sweep_errors(most_layers: int = 5, sweeps: int = 6) -> dict[int, list[float]]:
    """The largest error of the outputs in each sweep with fixed weights from empty histories, by number of layers."""
    data = communities(600, degree=6, num_features=16, num_classes=4)
    loader = gas.HaloLoader(data, num_parts=12)
    errors = {}
    for layers in range(2, most_layers + 1):
        torch.manual_seed(0)
        model = gas.autoscale(GCN(16, 32, num_layers=layers, out_channels=4), data)
        errors[layers] = error_by_sweep(model, loader, sweeps)
    return errors


def halo_sizes(counts: Iterable[int] = (2, 4, 8, 16, 32, 64, 128, 256)) -> dict[str, list[tuple[int, float]]]:
    """Halo nodes per batch node for growing numbers of parts, by the way of cutting."""
    edge_index = communities(4000, degree=10, num_features=1, num_classes=4).edge_index
    ways: dict[str, Literal["metis", "random"]] = {"METIS": "metis", "random": "random"}
    return {
        name: [
            (count, float(connectivity(edge_index, partition(edge_index, 4000, count, method=how)).mean()))
            for count in counts
        ]
        for name, how in ways.items()
    }


# What is drawn #######################################################################################################


def lines(place: npt.NDArray[np.float32], edges: Tensor) -> npt.NDArray[np.float32]:
    """All edges as one broken line, [2, 3 E]: a drawing of one path is small."""
    ends = place[edges.t().numpy()]
    gaps = np.full_like(ends[:, :1], np.nan)
    return np.concatenate([ends, gaps], axis=1).reshape(-1, 2).T


def draw_parts(colours: Colours) -> Figure:
    """A graph cut into parts by METIS; a batch of two parts, its halo, and the edges into it."""
    data, points = plane_graph()
    loader = gas.HaloLoader(data, num_parts=8, batch_size=2)
    batch = list(loader)[1]
    mine, halo = batch.n_id[: batch.batch_size].tolist(), batch.n_id[batch.batch_size :].tolist()
    place = points.numpy()
    once = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.3), layout="constrained")
    left.plot(*lines(place, once), color=colours.faint, lw=0.8, zorder=1)
    left.scatter(*place.T, c=[colours.parts[part] for part in loader.labels.tolist()], s=34, zorder=2)
    left.set_title("A graph in 8 parts")
    into = data.edge_index[:, batch.e_id]
    right.plot(*lines(place, once), color=colours.faint, lw=0.6, alpha=0.6, zorder=1)
    right.plot(*lines(place, into), color=colours.ink, lw=0.9, zorder=2)
    right.scatter(*place.T, c=colours.faint, s=24, zorder=3)
    right.scatter(*place[mine].T, c=colours.batch, s=40, zorder=4, label=f"batch: {len(mine)} nodes")
    right.scatter(*place[halo].T, c=colours.halo, s=40, marker="s", zorder=4, label=f"halo: {len(halo)} nodes")
    right.set_title("A batch of two parts, and its halo")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    for axes in (left, right):
        axes.set_aspect("equal")
        axes.set_axis_off()
    return figure


def draw_flow(colours: Colours) -> Figure:
    """What a batch of the first figure pushes and pulls on its way through three layers."""
    data, _ = plane_graph()
    batch = list(gas.HaloLoader(data, num_parts=8, batch_size=2))[1]
    own, halo = batch.batch_size, batch.num_nodes - batch.batch_size
    figure, axes = plt.subplots(figsize=(8.6, 3.5), layout="constrained")
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 41)

    def box(x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
        shape = FancyBboxPatch((x, y), width, height, "round,pad=0.3,rounding_size=1", fc="none", ec=colour, lw=1.6)
        axes.add_patch(shape)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=colours.ink, fontsize=9.5)

    def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, lw=1.8, color=colour))

    box(0.5, 28, 13, 9, f"features of\n{own} + {halo} nodes", colours.ink)
    for layer in (1, 2, 3):
        x = -10 + 31 * layer
        box(x, 28, 11, 9, f"layer {layer}", colours.ink)
        arrow((x - 6.6 if layer == 1 else x - 5.0, 32.5), (x - 0.6, 32.5), colours.ink)
        if layer == 3:
            continue
        box(x + 3, 2, 20, 9, f"history {layer}\n{data.num_nodes} rows", colours.faint)
        box(x + 16.2, 28, 9, 9, f"{own} own\n{halo} pulled", colours.ink)
        arrow((x + 11.6, 32.5), (x + 15.7, 32.5), colours.ink)
        arrow((x + 6, 27.3), (x + 6, 11.8), colours.batch)
        axes.text(x + 7, 22, f"push {own} rows", ha="left", va="center", color=colours.batch, fontsize=9.5)
        arrow((x + 20.5, 11.8), (x + 20.5, 27.3), colours.halo)
        axes.text(x + 19.5, 17, f"pull {halo} rows", ha="right", va="center", color=colours.halo, fontsize=9.5)
    words = f"outputs of the\nbatch's {own} nodes"
    axes.text(88.5, 23.5, words, ha="center", va="center", color=colours.ink, fontsize=9.5)
    return figure


def draw_sweeps(colours: Colours) -> Figure:
    """How errors vanish with fixed weights."""
    figure, axes = plt.subplots(figsize=(6.4, 3.5), layout="constrained")
    floor = 1e-4  # where exact outputs are drawn
    for place, (layers, errors) in enumerate(sweep_errors().items()):
        shown = np.maximum(errors, floor)
        style: dict[str, Any] = {"color": colours.parts[place], "marker": "osD^"[place], "label": f"{layers} layers"}
        axes.plot(range(1, len(errors) + 1), shown, **style)
    axes.set_yscale("log")
    axes.set_yticks([1e-4, 1e-3, 1e-2, 1e-1], ["exact", "0.001", "0.01", "0.1"])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sweeps over all batches, with fixed weights")
    axes.set_ylabel("largest error of an output")
    axes.legend(frameon=False)
    return figure


def draw_cuts(colours: Colours) -> Figure:
    """Halos of METIS and of random parts."""
    figure, axes = plt.subplots(figsize=(6.4, 3.5), layout="constrained")
    for (name, sizes), colour, marker in zip(halo_sizes().items(), (colours.batch, colours.halo), "os", strict=True):
        axes.plot(*zip(*sizes, strict=True), color=colour, marker=marker, label=f"{name} parts")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32, 64, 128, 256], ["2", "4", "8", "16", "32", "64", "128", "256"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("number of parts")
    axes.set_ylabel("halo nodes per batch node")
    axes.legend(frameon=False)
    return figure


FIGURES: dict[str, Callable[[Colours], Figure]] = {
    "parts": draw_parts,
    "flow": draw_flow,
    "sweeps": draw_sweeps,
    "cuts": draw_cuts,
}


def save_all(folder: Path) -> list[Path]:
    """Draw every figure in every theme; returns the files."""
    files = []
    for theme, colours in THEMES.items():
        look: dict[Any, Any] = dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours.ink
        )
        look |= {"axes.edgecolor": colours.faint, "axes.spines.top": False, "axes.spines.right": False}
        # Words stay words, in the reader's own font; the same drawing gives the same file.
        look |= {"svg.fonttype": "none", "svg.hashsalt": "gas", "font.family": "sans-serif", "font.size": 11}
        with plt.rc_context(look):
            for name, draw in FIGURES.items():
                path = folder / f"{name}-{theme}.svg"
                figure = draw(colours)
                figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
                plt.close(figure)
                files.append(path)
    return files


if __name__ == "__main__":
    for file in save_all(FOLDER):
        print(file)
