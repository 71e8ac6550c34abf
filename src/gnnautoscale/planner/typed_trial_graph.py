"""Small heterogeneous graphs that models are tried on, and a model's arguments for them."""

from __future__ import annotations

from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors, tensors_in
from gnnautoscale.forward import Arguments, TypedMemory, has_rows
from gnnautoscale.graph import BatchTensor, EdgeType, HaloLoader, TypedInfo, untagged
from gnnautoscale.planner.trial_graph import disturb
from gnnautoscale.planner.understudy import Understudy

# The smallest number of nodes of a type in each trial graph. Types and edges have different numbers, which tell rows
# apart.
SIZES = (11, 41)
_PARTS = 3


class TypedTrialGraph:
    """A small graph with the types, attributes and arguments of a real batch, as a whole and in parts."""

    def __init__(
        self, info: TypedInfo, call: BoundArguments, device: torch.device, size: int, dtype: torch.dtype | None
    ) -> None:
        self.device, self._info, self._call, self._dtype = device, info, call, dtype
        generator = torch.Generator().manual_seed(size)
        data = HeteroData()
        counts = {kind: size + 3 * number for number, kind in enumerate(info.nodes)}
        for kind, count in counts.items():
            data[kind].num_nodes = count
        parts = {kind: torch.arange(count) * _PARTS // count for kind, count in counts.items()}
        used = set(counts.values())
        for number, relation in enumerate(info.edges):
            data[relation].edge_index = _edges(counts[relation[0]], counts[relation[2]], used, generator)
            if size != SIZES[0] and number % 2:  # a part without edges of this type
                into = parts[relation[2]][data[relation].edge_index[1]]
                data[relation].edge_index = data[relation].edge_index[:, into != number % _PARTS]
            count = data[relation].edge_index.size(1)
            for name, value in info.edges[relation].graph.edge_attributes.items():
                data[relation][name] = self._sample(value, count)
        self._names: dict[int, tuple[str, str]] = {}
        for parameter, value in call.arguments.items():
            self._add(data, parameter, value, None)
        self.whole = next(
            iter(HaloLoader(data, partition={kind: torch.zeros_like(part) for kind, part in parts.items()}))
        )
        self.parts = HaloLoader(data, partition=parts, bidirectional=True)
        self.memory = TypedMemory(self.parts.graph, "device", None)

    @property
    def relations(self) -> list[EdgeType]:
        """The types of edges."""
        return list(self._info.edges)

    def _add(self, data: HeteroData, name: str, value: Any, kind: str | None) -> None:
        """Add rows like those among the arguments; a dictionary by type says whose they are, or else their number."""
        if isinstance(value, HeteroData):
            for other, store in value.node_items():
                for each, rows in store.items():
                    if isinstance(rows, Tensor) and not isinstance(rows, BatchTensor):
                        self._add(data, each, rows, other)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._add(data, name, item, key if isinstance(key, str) and key in self._info.nodes else kind)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._add(data, name, item, kind)
        elif isinstance(value, Tensor) and not isinstance(value, BatchTensor):
            named = [kind] if kind is not None else list(self._info.nodes)
            fitting = [each for each in named if has_rows(value, self._info.nodes[each].num_rows)]
            if fitting:
                place = f"{name} {len(self._names)}" if kind is None or name in data[fitting[0]] else name
                data[fitting[0]][place] = self._sample(value, data[fitting[0]].num_nodes)
                self._names[id(value)] = fitting[0], place

    def _sample(self, value: Tensor, count: int) -> Tensor:
        """Rows like the given ones, ``[count, ...]``, in host memory."""
        value = value.detach().cpu()
        shape = (count, *value.shape[1:])
        if not value.is_floating_point():
            return value[torch.arange(count) % value.size(0)] if value.size(0) else value.new_zeros(shape)
        if not value.size(0):
            return torch.randn(shape).to(self._dtype or value.dtype)
        flat = value.reshape(value.size(0), -1)
        own: Tensor = flat.gather(0, torch.randint(value.size(0), (count, flat.size(1)))).view(shape)
        own = own * (0.5 + torch.rand(shape).to(own)) + 0.1 * torch.randn(shape).to(own)
        return own.to(self._dtype or own.dtype)

    def arguments(self, batch: HeteroData) -> Arguments:
        """The call's arguments, taken from a batch of the trial graph."""
        batch = batch.clone().to(str(self.device))

        def recast(value: Any) -> Any:
            if isinstance(value, BatchTensor):
                kind = self._info.kind_of[value.info]
                found = batch[kind][value.attribute]
                # A node may index a table of the real graph's size, which can be smaller than the trial graph.
                return found % self._info.graph.numbers_below(kind) if value.attribute == "n_id" else found
            if isinstance(value, Tensor):
                name = self._names.get(id(value))
                if name is not None:
                    return batch[name[0]][name[1]]
                return disturb(value.detach()).to(self._dtype or value.dtype) if value.is_floating_point() else value
            if isinstance(value, HeteroData):
                for kind in self._info.graph.counts:
                    batch[kind].n_id = batch[kind].n_id % self._info.graph.numbers_below(kind)
                return batch
            if isinstance(value, (tuple, list)):
                return type(value)(recast(item) for item in value)
            if isinstance(value, dict):
                return {key: recast(item) for key, item in value.items()}
            return value

        return recast(self._call.args), recast(self._call.kwargs)

    def run_plain(self, actor: Understudy) -> list[Tensor]:
        """What the model computes of the whole graph without hooks."""
        args, kwargs = map_tensors(untagged, self.arguments(self.whole))
        with torch.no_grad():
            return [value.detach().clone() for value in tensors_in(actor.run_plain((args, kwargs), self.device))]


def _edges(sources: int, targets: int, used: set[int], generator: torch.Generator) -> Tensor:
    """Random edges sorted by target, ``[2, num_edges]``, of which there are a number that nothing else has.

    No node has two self-loops.
    """
    near = torch.arange(targets) * sources // targets
    count = targets + max(targets // 3, 4)
    while count + targets in used or count in used:
        count += 1
    used.add(count + targets)
    target = torch.cat([torch.arange(targets), torch.randint(targets, (count,), generator=generator)])
    step = torch.randint(-3, 4, target.shape, generator=generator)
    edges = torch.stack([(near[target] + step) % sources, target])
    ordered: Tensor = edges[:, edges[1].argsort(stable=True)]
    # Of several self-loops of a node layers keep one, on a GPU any of them.
    loops = (ordered[0] == ordered[1]).nonzero().squeeze(1)
    further = loops[1:][ordered[1, loops[1:]] == ordered[1, loops[:-1]]]
    ordered[0, further] = (ordered[0, further] + 1) % sources
    return ordered
