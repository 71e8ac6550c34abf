"""The small graphs that models are tried on, and a model's arguments for them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import BoundArguments
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.forward import ArgumentKind, Arguments, GraphMemory, has_rows
from gnnautoscale.graph import BatchInfo, BatchTensor, Graph, HaloLoader

# The largest trial has as many nodes as the user's graph, within these bounds.
_LARGE, _LARGEST = 257, 1031


@dataclass(frozen=True)
class TrialSetup:
    """What a trial graph is like.

    Attributes:
        num_nodes: Its number of nodes.
        num_chords: Its number of edges, or of pairs of edges, besides those of a ring.
        reach: The longest chord, in steps along the ring. Short ones keep many edges out of most halos.
        features: Where features come from: the batch's own values, shuffled; noise; or own values, scaled up.
        lopsided: Whether edges into the first part have only one value in attributes of whole numbers, as in a batch
            that lacks some relations.
    """

    num_nodes: int
    num_chords: int
    reach: int
    features: Literal["own", "noise", "large"]
    lopsided: bool = False


def graph_form(graph: Graph) -> tuple[bool, int]:
    """What trials depend on in a graph: whether it is symmetric, and the size of the largest trial."""
    return graph.is_symmetric, min(max(_LARGE, graph.num_nodes), _LARGEST)


def setups_for(graph: Graph) -> list[TrialSetup]:
    """Trial graphs as different from each other as possible, so that what one does not show another does.

    The first one decides where histories are, since features like the user's are what the model was made for.
    """
    size = graph_form(graph)[1]
    dense = TrialSetup(97, 1000, 16, "noise", lopsided=True)
    return [TrialSetup(13, 7, 5, "own"), dense, TrialSetup(size, size // 2, size // 2, "large")]


class TrialGraph:
    """A trial graph, as a whole and in parts, with features and edge attributes like those of a real batch.

    Features are of type ``dtype`` where the batch's are floating-point numbers; ``None`` keeps theirs. Tensors that
    the graph does not name belong to nodes or edges if their number of rows says so, and ``by_size`` allows it. Those
    that belong to neither are ``disturbed`` if all their entries are equal, since a zero would hide a deviation.
    """

    def __init__(
        self,
        info: BatchInfo,
        arguments: BoundArguments,
        device: torch.device,
        setup: TrialSetup,
        dtype: torch.dtype | None,
        *,
        by_size: bool = True,
        disturbed: bool = False,
    ) -> None:
        self.info, self.call, self.device, self.dtype, self.num_nodes = info, arguments, device, dtype, setup.num_nodes
        self._setup, self._by_size, self._disturbed = setup, by_size, disturbed
        edge_index = _edges(setup, symmetric=info.graph.is_symmetric).clone()
        parts = _parts(setup.num_nodes)
        self._in_first_part = parts[edge_index[1]] == 0
        data = _emptied(arguments)
        data.edge_index, data.num_nodes = edge_index, setup.num_nodes
        for name, value in info.graph.edge_attributes.items():
            data[name] = self._sample(value, edge_index.size(1), edge_level=True)
        self._names: dict[int, str] = {}
        for parameter, value in arguments.arguments.items():
            for leaf in _leaves(value):
                if isinstance(leaf, Data):
                    self._add_batch(data, leaf)
                elif not isinstance(leaf, BatchTensor):
                    self._add(data, f"{parameter} {len(self._names)}", leaf)
        self.whole = HaloLoader(data, partition=torch.zeros(setup.num_nodes, dtype=torch.long))
        # Bidirectional, because the real loader may be; if a layer needs that and it is not, the layer says so later.
        self.parts = HaloLoader(data, partition=parts, bidirectional=True)
        self.memory = GraphMemory(self.parts.graph, setup.num_nodes, "device", None)

    def _add_batch(self, data: Data, batch: Data) -> None:
        for name, value in batch:
            if isinstance(value, BatchTensor) or name in ("e_id", "batch_size", "num_nodes"):
                continue
            if not isinstance(value, Tensor) or not self._add(data, name, value):
                data[name] = value

    def _add(self, data: Data, name: str, value: Tensor) -> bool:
        """Add rows like the given ones to the trial graph, if they belong to nodes or edges."""
        kinds = kinds_of(value, self.info.num_rows, self.info.num_edges)
        if "edge" in kinds and ("node" not in kinds or "edge" in name):
            kind = "edge"
        else:
            kind = "node" if "node" in kinds else "other"
        known = name.split(" ")[0] in self.info.graph.features
        if kind == "other" or not (self._by_size or known):
            return False
        num_rows = self.num_nodes if kind == "node" else data.edge_index.size(1)
        data[name] = self._sample(value, num_rows, edge_level=kind == "edge").cpu()
        self._names[id(value)] = name
        return True

    def arguments(self, batch: Data) -> Arguments:
        """The call's arguments, taken from a batch of the trial graph."""
        # A copy, because the model may write into its inputs.
        batch = batch.clone().to(str(self.device))
        counts = {"num_nodes": batch.num_nodes, "batch_size": batch.batch_size, "num_edges": batch.edge_index.size(1)}

        def recast(value: Any) -> Any:
            if isinstance(value, BatchTensor):
                # A node may index a table of the real graph's size, which can be smaller than the trial graph.
                own = batch.n_id % self.info.graph.num_nodes if value.attribute == "n_id" else batch[value.attribute]
                return own if value.is_original and not value.requires_grad else own.clone().detach().mul(1)
            if isinstance(value, Tensor):
                name = self._names.get(id(value))
                if name is None and value.is_floating_point():
                    other = disturb(value.detach()) if self._disturbed else value
                    return other.to(self.dtype or other.dtype)
                if name is None:
                    return value
                found = batch[name]
                return found.plain if isinstance(found, BatchTensor) else found
            if isinstance(value, Data):
                return batch
            if isinstance(value, (tuple, list)):
                return type(value)(recast(item) for item in value)
            if isinstance(value, dict):
                return {name: recast(item) for name, item in value.items()}
            return value

        named = {name: counts.get(name) for name, value in self.call.arguments.items() if isinstance(value, int)}
        known = {name: count for name, count in named.items() if count is not None}
        call = BoundArguments(self.call.signature, OrderedDict(self.call.arguments | known))
        return recast(call.args), recast(call.kwargs)

    def _sample(self, value: Tensor, num_rows: int, *, edge_level: bool) -> Tensor:
        """Rows like the given ones, ``[num_rows, ...]``."""
        value, setup = value.detach(), self._setup
        shape = (num_rows, *value.shape[1:])
        if not value.size(0):  # zeros would hide what an edge's weight or features do
            return (torch.rand(shape) + 0.5).to(value) if value.is_floating_point() else value.new_zeros(shape)
        if not value.is_floating_point():
            rows = value[torch.arange(num_rows, device=value.device) % value.size(0)]
            if edge_level and setup.lopsided:
                rows = torch.where(_widened(self._in_first_part.to(rows.device), rows), rows[:1], rows)
            return rows
        # Each column is shuffled by itself, which gives more different rows.
        flat = value.reshape(value.size(0), -1)
        own: Tensor = flat.gather(0, torch.randint(value.size(0), (num_rows, flat.size(1))).to(flat.device)).view(shape)
        whole_numbers = (flat == flat.round()).all(0).view(shape[1:])
        constant = (flat == flat[:1]).all(0).view(shape[1:])
        own = torch.where(whole_numbers, own, own * (0.5 + 0.5 * torch.rand(shape).to(own)))
        if setup.features == "noise":
            noise = torch.rand(shape) + 0.5 if edge_level else torch.randn(shape)
            own = torch.where(whole_numbers & ~constant, own, noise.to(own))
        elif setup.features == "large" and not edge_level:
            own = 100 * own
        return own.to(self.dtype or own.dtype)


def kinds_of(value: Tensor, num_nodes: int, num_edges: int) -> set[ArgumentKind]:
    """What a tensor's rows may belong to, judged by their number: nodes, edges or something else."""
    kinds: set[ArgumentKind] = {"other"}
    kinds |= {"node"} if has_rows(value, num_nodes) else set()
    return kinds | ({"edge"} if has_rows(value, num_edges) else set())


def disturb(value: Tensor) -> Tensor:
    """Values that are all equal, made different by the same small numbers every time; others as they are."""
    if not value.numel() or not bool((value == value.flatten()[0]).all()):
        return value
    noise = 0.3 + 0.3 * torch.rand(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    disturbed: Tensor = value + noise.to(value)
    return disturbed


@lru_cache(maxsize=64)
def _edges(setup: TrialSetup, *, symmetric: bool) -> Tensor:
    """A ring with chords and self-loops, sorted by target, as some aggregations require; ``[2, num_edges]``.

    Halo nodes have neighbours beyond the halo and some of them a self-loop, so their degrees in a batch are wrong.
    """
    num_nodes, generator = setup.num_nodes, torch.Generator().manual_seed(setup.num_nodes)
    nodes = torch.arange(num_nodes)
    source = torch.randint(num_nodes, (setup.num_chords,), generator=generator)
    step = torch.randint(2, setup.reach + 1, source.shape, generator=generator)
    pairs = torch.cat([torch.stack([nodes, nodes + 1]), torch.stack([source, source + step])], dim=1) % num_nodes
    pairs = torch.cat([pairs, pairs.flip(0)], dim=1) if symmetric else pairs
    last_of_part = (_parts(num_nodes) != _parts(num_nodes).roll(-1)).nonzero().squeeze(1)
    pairs = torch.unique(torch.cat([pairs, last_of_part.expand(2, -1)], dim=1), dim=1)
    ordered: Tensor = pairs[:, pairs[1].argsort(stable=True)]
    return ordered


def _parts(num_nodes: int) -> Tensor:
    """Three contiguous parts, ``[num_nodes]``; the one in the middle is larger."""
    nodes = torch.arange(num_nodes)
    return (nodes >= 3 * num_nodes // 10 + 1).long() + (nodes >= 7 * num_nodes // 10).long()


def _emptied(arguments: BoundArguments) -> Data:
    """A graph without attributes, of the class of the batch among the arguments."""
    batch = next((leaf for leaf in _leaves([*arguments.arguments.values()]) if isinstance(leaf, Data)), None)
    data = Data() if batch is None else copy.copy(batch)
    for name in list(data.keys()):
        del data[name]
    return data


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, Data)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _widened(flags: Tensor, rows: Tensor) -> Tensor:
    """Flags, ``[num_rows]``, with as many dimensions as the rows."""
    return flags.view(-1, *(1 for _ in rows.shape[1:]))
