"""Draws the site's figures, from the library's own results: `python docs/figures.py` writes docs/figures/*.svg.

Each figure is drawn twice on a transparent background, in the site's light and dark colours.
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
from gnnautoscale.graph import connectivity, partition

FOLDER = Path(__file__).parent / "figures"


@dataclass(frozen=True)
class Colours:
    """The colours of a theme."""

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
    """Halo nodes per batch node for growing numbers of parts, by partition."""
    edge_index = communities(4000, degree=10, num_features=1, num_classes=4).edge_index
    methods: dict[str, Literal["metis", "random"]] = {"METIS": "metis", "random": "random"}
    return {
        name: [
            (count, float(connectivity(edge_index, partition(edge_index, 4000, count, method=method)).mean()))
            for count in counts
        ]
        for name, method in methods.items()
    }


# What is drawn #######################################################################################################


def lines(place: npt.NDArray[np.float32], edges: Tensor) -> npt.NDArray[np.float32]:
    """All edges as one broken line, [2, 3 E], which makes a small file."""
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


class Board:
    """A wide drawing of boxes and arrows, 100 units wide.

    Args:
        colours: What to draw with.
        height: Height of the figure in inches.
        top: Height of the drawing in units.
    """

    def __init__(self, colours: Colours, *, height: float, top: float) -> None:
        self._ink = colours.ink
        self.figure, self.axes = plt.subplots(figsize=(8.6, height), layout="constrained")
        self.axes.set_axis_off()
        self.axes.set_xlim(0, 100)
        self.axes.set_ylim(0, top)

    def box(
        self, x: float, y: float, width: float, height: float, text: str, colour: str, *, size: float = 9.5
    ) -> None:
        """A box with words in it."""
        shape = FancyBboxPatch((x, y), width, height, "round,pad=0.3,rounding_size=1", fc="none", ec=colour, lw=1.6)
        self.axes.add_patch(shape)
        middle = x + width / 2, y + height / 2
        self.axes.text(*middle, text, ha="center", va="center", color=self._ink, fontsize=size)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str, *, thin: bool = False) -> None:
        """An arrow from one point to another."""
        style: dict[str, Any] = {"mutation_scale": 9, "lw": 1.1} if thin else {"mutation_scale": 13, "lw": 1.8}
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", color=colour, **style))


def draw_flow(colours: Colours) -> Figure:
    """What the batch of the first figure pushes and pulls in three layers."""
    data, _ = plane_graph()
    batch = list(gas.HaloLoader(data, num_parts=8, batch_size=2))[1]
    own, halo = batch.batch_size, batch.num_nodes - batch.batch_size
    board = Board(colours, height=3.5, top=41)
    box, arrow, axes = board.box, board.arrow, board.axes
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
    return board.figure


def draw_walk(colours: Colours) -> Figure:
    """One `gas train` call on its way through the packages, the lowest at the bottom."""
    board = Board(colours, height=5.6, top=84)
    lanes = ("cli", "training", "tasks", "attach", "forward", "transfer", "history", "graph")
    level = {name: 10.0 * place + 2 for place, name in enumerate(reversed(lanes))}
    for name in lanes:
        y = level[name]
        board.axes.plot([9, 100], [y - 1.8, y - 1.8], color=colours.faint, lw=0.6, zorder=0)
        board.axes.text(0, y + 3.2, name, ha="left", va="center", color=colours.ink, fontsize=9.5, family="monospace")
    for x, width, title in ((9.5, 23.5, "once"), (34.5, 45, "every step"), (81, 19, "every epoch")):
        board.axes.text(x + width / 2, 83, title, ha="center", va="center", color=colours.ink, fontsize=10)
        board.axes.plot([x + width + 0.6] * 2, [0, 81], color=colours.faint, lw=0.8, ls=(0, (4, 3)), zorder=0)
    width = 10.6
    calls = [  # where each call is, left to right, and its name; colours mark rows that are pushed and pulled
        ("cli", 10, "train", colours.ink),
        ("training", 13, "fit", colours.ink),
        ("graph", 15, "HaloLoader", colours.ink),
        ("attach", 21.5, "autoscale", colours.ink),
        ("graph", 35, "batch,\nhalo", colours.ink),
        ("training", 37, "Feed,\nSteps", colours.ink),
        ("attach", 42.5, "model(batch)", colours.ink),
        ("forward", 47.5, "Session", colours.ink),
        ("forward", 61, "StepExchange", colours.ink),
        ("transfer", 60, "exchange", colours.ink),
        ("history", 54, "push", colours.batch),
        ("history", 66.5, "pull", colours.halo),
        ("tasks", 61, "loss", colours.ink),
        ("training", 68, "backward,\noptimizer", colours.ink),
        ("attach", 82, "infer", colours.ink),
        ("forward", 86, "Sweep-\nExchange", colours.ink),
        ("tasks", 88.5, "score", colours.ink),
    ]
    place = {}
    for number, (lane, x, text, colour) in enumerate(calls, start=1):
        board.box(x, level[lane], width, 6.2, text, colour, size=8.5)
        corner = x + width, level[lane] + 6.9
        board.axes.text(*corner, str(number), ha="right", va="bottom", color=colours.ink, fontsize=7.5)
        place[number] = x, level[lane]

    def joined(start: int, end: int, colour: str, begin: float = 0.5, stop: float = 0.5) -> None:
        """An arrow between two boxes, from and to a share of their width."""
        (x, y), (other_x, other_y) = place[start], place[end]
        down = other_y < y
        tail = (x + begin * width, y - 0.4 if down else y + 6.6)
        head = (other_x + stop * width, other_y + 6.6 if down else other_y - 0.4)
        board.arrow(tail, head, colour, thin=True)

    for start, end, begin, stop in (
        (1, 2, 0.5, 0.22),
        (2, 3, 0.4, 0.21),
        (2, 4, 0.7, 0.25),
        (5, 6, 0.4, 0.21),
        (6, 7, 0.5, 0.2),
        (7, 8, 0.5, 0.2),
        (9, 10, 0.5, 0.59),
        (8, 13, 0.7, 0.15),
        (13, 14, 0.6, 0.2),
        (15, 16, 0.5, 0.2),
        (16, 17, 0.72, 0.48),
    ):
        joined(start, end, colours.ink, begin, stop)
    (x, y), (other_x, _) = place[8], place[9]
    board.arrow((x + width + 0.4, y + 3.1), (other_x - 0.4, y + 3.1), colours.ink, thin=True)
    joined(10, 11, colours.batch, 0.25, 0.6)
    joined(12, 10, colours.halo, 0.4, 0.8)
    return board.figure


def draw_sweeps(colours: Colours) -> Figure:
    """Errors that vanish with fixed weights."""
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
    "walk": draw_walk,
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
        # Text stays text, in the reader's own font, and the same drawing gives the same file.
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
