"""Classes of nodes: Weisfeiler-Lehman colours, groups of equal rows, and how the two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked
from gnnautoscale.errors import InputError
from gnnautoscale.graph import Graph


@checked(num_nodes={"least": 1}, rounds={"least": 0, "fix": "Or leave it out."})
def wl_colours(
    edge_index: Tensor, num_nodes: int, *, colours: Tensor | None = None, rounds: int | None = None
) -> Tensor:
    """Refine colours by Weisfeiler-Lehman: two nodes stay alike if they were alike and so are their in-neighbours.

    This is exact: neighbours' colours are compared one by one and never hashed. Parallel edges count separately.

    Args:
        edge_index: Sources and targets, ``[2, num_edges]``. Colours flow from source to target.
        num_nodes: Number of nodes.
        colours: Initial colours, integers ``[num_nodes]``; by default all nodes are alike.
        rounds: Number of rounds; by default until no colour splits any more.

    Returns:
        The colour of each node, ``[num_nodes]``, numbered from 0 in order of first appearance.

    Example:
        >>> path = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
        >>> wl_colours(path, 5)
        tensor([0, 1, 2, 1, 0])
        >>> wl_colours(path, 5, rounds=1)
        tensor([0, 1, 1, 1, 0])
    """
    Graph(Data(edge_index=edge_index, num_nodes=num_nodes))  # checks the edges
    incoming: list[list[int]] = [[] for _ in range(num_nodes)]
    for source, target in edge_index.t().tolist():
        incoming[target].append(source)
    now = _numbered([0] * num_nodes if colours is None else _checked(colours, num_nodes))
    for _ in range(num_nodes if rounds is None else rounds):
        refined = _numbered(
            (now[node], *sorted(now[neighbour] for neighbour in neighbours)) for node, neighbours in enumerate(incoming)
        )
        if max(refined) == max(now):  # as many colours as before: none was split
            break
        now = refined
    return torch.tensor(now)


@checked(tolerance={"least": 0})
def row_classes(rows: Tensor, tolerance: float = 0.0) -> Tensor:
    """Group equal rows, up to a tolerance in each column.

    In a sorted column, a gap above the tolerance starts a new group. Rows are in one class if they are in the same
    group in every column.

    Args:
        rows: Features or outputs, ``[num_nodes, num_columns]``.
        tolerance: The largest gap between values that count as equal.

    Returns:
        The class of each row, ``[num_nodes]``, numbered from 0 in order of first appearance.

    Example:
        >>> row_classes(torch.tensor([[0.5, 1.0], [0.0, 1.0], [0.5001, 1.0]]), tolerance=0.01)
        tensor([0, 1, 0])
    """
    if rows.dim() != 2 or not rows.numel() or not bool(torch.isfinite(rows).all()):
        got = f"shape {list(rows.shape)}, or NaN or infinity"
        raise InputError("rows must be finite, [num_nodes, num_columns]", got=got, fix="Check features and model.")
    ordered, order = rows.sort(dim=0)
    group = F.pad((ordered.diff(dim=0) > tolerance).long().cumsum(0), (0, 0, 1, 0))
    groups = torch.empty_like(order).scatter_(0, order, group)
    return torch.tensor(_numbered(map(tuple, groups.tolist())))


@dataclass(frozen=True)
class Comparison:
    """How classes of nodes differ from Weisfeiler-Lehman colours.

    Attributes:
        colours: Number of colours.
        classes: Number of classes.
        torn: Number of colours whose nodes are in several classes: the classes tell too much apart.
        merged: Number of colours that share a class with another colour: the classes tell too little apart.
    """

    colours: int
    classes: int
    torn: int
    merged: int

    @property
    def same(self) -> bool:
        """Whether classes and colours agree."""
        return not self.torn and not self.merged


@checked()
def compare_classes(classes: Tensor, colours: Tensor) -> Comparison:
    """Compare the class of each node with its Weisfeiler-Lehman colour, both ``[num_nodes]``, however numbered.

    Example:
        >>> compare_classes(torch.tensor([0, 1, 2, 2]), torch.tensor([5, 5, 3, 4]))
        Comparison(colours=3, classes=3, torn=1, merged=2)
    """
    pairs = set(zip(_checked(colours, colours.numel()), _checked(classes, colours.numel()), strict=True))
    classes_of, colours_of = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    torn = sum(count > 1 for count in classes_of.values())
    merged = {colour for colour, label in pairs if colours_of[label] > 1}
    return Comparison(len(classes_of), len(colours_of), torn, len(merged))


@checked(out={"dims": 2}, exact={"dims": 2}, colours={"dims": 1, "integers": True})
def nearest_colours(out: Tensor, exact: Tensor, colours: Tensor) -> Tensor:
    """The map of Theorem 2: give each output ``[num_nodes, channels]`` the colour of the nearest exact output.

    Time and memory grow with the square of the number of nodes.

    Example:
        >>> nearest_colours(torch.tensor([[0.1], [0.8]]), torch.tensor([[0.0], [1.0]]), torch.tensor([4, 7]))
        tensor([4, 7])
    """
    if out.size(1) != exact.size(1) or exact.size(0) != colours.numel() or not colours.numel():
        got = f"{tuple(out.shape)}, {tuple(exact.shape)} and {tuple(colours.shape)}"
        raise InputError(
            "out and exact must be as wide, and each row of exact have a colour",
            got=got,
            fix="Pass outputs of one model.",
        )
    return colours[torch.cdist(out, exact, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)]


def _numbered(labels: Iterable[Hashable]) -> list[int]:
    """The same classes, numbered in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]


def _checked(colours: Tensor, num_nodes: int) -> list[int]:
    if colours.dtype not in (torch.int32, torch.int64) or colours.shape != (num_nodes,) or not num_nodes:
        raise InputError(
            f"colours must be integers, one for each of the {num_nodes or 'at least one'} nodes",
            got=f"{colours.dtype} of shape {list(colours.shape)}",
            fix="Use row_classes(x) to get them from features.",
        )
    return colours.tolist()
