"""Batches of heterogeneous graphs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.errors import InputError
from gnnautoscale.graph import TypedGraph, typed_batch
from support.typed import GRAPH, KINDS, RELATIONS, typed_graph


@pytest.mark.parametrize("options", [{"partition": "metis"}, {"partition": "random", "batch_size": 2, "shuffle": True}])
def test_batches_have_own_nodes_their_halo_and_every_edge_into_them(options: dict[str, Any]) -> None:
    loader = gas.HaloLoader(GRAPH, 5, **options)
    seen: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for batch in loader:
        assert set(batch.x_dict) == set(KINDS)
        halo = {kind: set(batch[kind].n_id[batch[kind].batch_size :].tolist()) for kind in KINDS}
        found = {kind: set[int]() for kind in KINDS}
        for kind in KINDS:
            own = batch[kind].n_id[: batch[kind].batch_size].tolist()
            seen[kind] += own
            assert torch.equal(batch[kind].x, GRAPH[kind].x[batch[kind].n_id])
        for kind in RELATIONS:
            (source, target), (first, _, last) = batch[kind].edge_index, kind
            whole = GRAPH[kind].edge_index
            ends = torch.stack([batch[first].n_id[source], batch[last].n_id[target]])
            assert torch.equal(ends, whole[:, batch[kind].e_id])
            own_targets = batch[last].n_id[: batch[last].batch_size]
            assert int(torch.isin(whole[1], own_targets).sum()) == source.numel()
            found[first] |= set(ends[0].tolist()) - set(batch[first].n_id[: batch[first].batch_size].tolist())
        assert halo == found
        weight = GRAPH["paper", "cites", "paper"].edge_weight
        cites = batch["paper", "cites", "paper"]
        assert torch.equal(cites.edge_weight, weight[cites.e_id])
    assert {kind: sorted(nodes) for kind, nodes in seen.items()} == {
        kind: list(range(GRAPH[kind].num_nodes)) for kind in KINDS
    }


def test_types_may_be_empty_or_without_features() -> None:
    data = HeteroData()
    data["a"].x, data["b"].num_nodes, data["none"].num_nodes = torch.eye(4), 3, 0
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    data["none", "to", "a"].edge_index = torch.empty(2, 0, dtype=torch.long)
    batches = list(gas.HaloLoader(data, partition=parts()))
    assert [batch["a"].n_id.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [batch["b"].n_id.tolist() for batch in batches] == [[0], [1, 2]]
    assert [batch["none"].num_nodes for batch in batches] == [0, 0]
    assert [batch["a", "to", "b"].edge_index.tolist() for batch in batches] == [[[0, 1], [0, 0]], [[0, 1], [0, 1]]]
    assert "x" not in batches[0]["b"]


def parts() -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([0, 0, 1, 1]), "b": torch.tensor([0, 1, 1]), "none": torch.empty(0, dtype=torch.long)}


def test_batches_of_chosen_nodes_come_in_their_order() -> None:
    loader = gas.HaloLoader(GRAPH, 3)
    batch = loader.batch_for({"paper": torch.tensor([7, 2]), "author": torch.tensor([4])})
    assert batch["paper"].n_id[:2].tolist() == [7, 2]
    assert [batch[kind].batch_size for kind in KINDS] == [1, 2, 0, 0]


def test_an_epoch_takes_the_data_as_it_is() -> None:
    data = typed_graph()
    loader = gas.HaloLoader(data, 3)
    list(loader)
    data["paper"].x = data["paper"].x + 1
    assert torch.equal(next(iter(loader))["paper"].x, data["paper"].x[next(iter(loader))["paper"].n_id])
    fresh = gas.HaloLoader(data, 3, keep=False)
    batches = iter(fresh)
    next(batches)
    data["venue"].x += 1
    with pytest.raises(InputError, match="x of 'venue', whose values were changed"):
        list(batches)


def test_batches_can_be_pickled_and_copied() -> None:
    batch = next(iter(gas.HaloLoader(GRAPH, 3)))
    loaded = pickle.loads(pickle.dumps(batch))  # noqa: S301
    assert torch.equal(loaded["paper"].n_id, batch["paper"].n_id)
    assert type(loaded["paper", "cites", "paper"].edge_index) is torch.Tensor
    copied = copy.deepcopy(batch)
    assert copied["paper", "cites", "paper"].edge_index.info is batch["paper", "cites", "paper"].edge_index.info


def changed(change: Callable[[HeteroData], None]) -> HeteroData:
    data = typed_graph()
    change(data)
    return data


def set_edges(edges: Any) -> Callable[[HeteroData], None]:
    def change(data: HeteroData) -> None:
        data["paper", "cites", "paper"].edge_index = edges

    return change


def set_rows(name: str, rows: Any) -> Callable[[HeteroData], None]:
    def change(data: HeteroData) -> None:
        data["venue"][name] = rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_edges(torch.tensor([[0], [40]])), r"\('paper', 'cites', 'paper'\).*40"),
        (set_edges(torch.tensor([[0.0], [1.0]])), "int64"),
        (set_edges(torch.tensor([0, 1])), r"\[2, num_edges\]"),
        (set_rows("x", torch.full((5, 2), torch.nan)), "x of 'venue' must be finite"),
        (set_rows("y", torch.zeros(4)), "y of 'venue' must have one row for each of its 5 nodes"),
        (lambda data: data.__delitem__("term"), "'term'"),
    ],
)
def test_graphs_that_are_none_are_refused(change: Callable[[HeteroData], None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TypedGraph.of(changed(change))


def same_batches(one: HeteroData, other: HeteroData) -> None:
    """Compare all tensors of two batches, and what is known about their edges."""
    for kind, store in (*one.node_items(), *one.edge_items()):
        for name, value in store.items():
            got = other[kind][name]
            assert torch.equal(value.cpu(), got.cpu()) if isinstance(value, torch.Tensor) else value == got
    infos = [batch[RELATIONS[0]].edge_index.info.typed for batch in (one, other)]
    for kind in KINDS:
        rows = [info.nodes[kind].rows.cpu() for info in infos]
        assert torch.equal(*rows)
        assert torch.equal(*(info.nodes[kind].n_id for info in infos))
    for kind in RELATIONS:
        of = [info.edges[kind] for info in infos]
        assert torch.equal(*(info.found.source.cpu() for info in of))
        assert torch.equal(*(info.edges.on(info.device).ptr.cpu() for info in of))
        assert torch.equal(*(info.e_id for info in of))


def test_what_is_known_about_edges_of_a_type_is_that_of_a_plain_graph() -> None:
    loader = gas.HaloLoader(GRAPH, 5, partition="random", batch_size=2)
    for batch in loader:
        for kind in RELATIONS:
            info: Any = batch[kind].edge_index.info
            table, (source, target) = info.table, batch[kind].edge_index.plain
            whole = table.cut(info.own).on(torch.device("cpu"))
            assert torch.equal(info.edges.on(torch.device("cpu")).ptr, whole.ptr)
            assert torch.equal(info.edges.on(torch.device("cpu")).take(table.edge).long(), batch[kind].e_id)
            assert torch.equal(info.e_id, batch[kind].e_id)
            assert torch.equal(info.edges.on(torch.device("cpu")).target, target)
            assert torch.equal(info.found.source.long(), source)
            assert max(whole.ptr.diff().tolist(), default=0) <= info.edges.longest <= table.longest


def test_edges_of_all_types_are_grouped_by_source_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    kept: list[Any] = []
    plain = typed_batch.SortedByType.pointers

    def pointers(self: Any, sizes: list[int]) -> Any:
        kept.append(self)
        return plain(self, sizes)

    monkeypatch.setattr(typed_batch.SortedByType, "pointers", pointers)
    batch = next(iter(gas.HaloLoader(GRAPH, 5, partition="random", batch_size=2)))
    for kind, (order, source) in zip(RELATIONS, kept[0].by_source(), strict=True):
        own = batch[kind].edge_index.plain[0]
        assert torch.equal(order, own.argsort(stable=True))
        assert torch.equal(source.long(), own[order])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "shuffle": True}, {"bidirectional": True}, {"keep": False}])
def test_a_gpu_assembles_the_same_batches(options: dict[str, Any]) -> None:
    data = typed_graph(2)
    data["author"].x = data["author"].x.float()
    host, device = (gas.HaloLoader(data, 5, partition="random", device=where, **options) for where in ("cpu", "cuda"))
    for _ in range(3):  # kept halos, too
        for one, other in zip(host, device, strict=True):
            assert other["paper"].x.is_cuda
            assert other[RELATIONS[0]].edge_index.is_cuda
            same_batches(one, other)
            for kind in RELATIONS:
                order, source = other[kind].edge_index.info.found.by_source
                own = one[kind].edge_index.plain[0]
                assert torch.equal(own[order.cpu()], source.long().cpu())
