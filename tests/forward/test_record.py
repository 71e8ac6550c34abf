"""Records of layers on the whole graph, and what a batch gets of them, by hand."""

from __future__ import annotations

import copy
import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.batch_edges import BatchEdges, EdgeForm
from gnnautoscale.forward.plan import LayerCall
from gnnautoscale.forward.record import EdgeRecord, Recorder, align, keep_edges, weightless_copy
from gnnautoscale.graph import Graph


def star() -> Data:
    """Nodes 1, 2 and 3 point to node 0, which points to node 1; parts are {0, 1} and {2, 3}."""
    return Data(x=torch.ones(4, 2), edge_index=torch.tensor([[1, 2, 3, 0], [0, 0, 0, 1]]))


def record(layer: pyg.MessagePassing, recorder: Recorder, edges: Tensor) -> EdgeRecord:
    known = LayerCall(["node", "own"], [None, "edge_index"], [frozenset()])
    (found,) = recorder.of_call("a layer", layer, known, ((torch.ones(2, 2), edges), {}))
    return found


def test_a_batch_gets_the_weights_of_the_whole_graph() -> None:
    loader = gas.HaloLoader(star(), partition=torch.tensor([0, 0, 1, 1]))
    first, second = loader.in_order()
    found = record(pyg.GCNConv(2, 2), Recorder(loader.graph), first.edge_index)
    edges = found.for_batch(first.edge_index.info, "a layer")
    nodes = first.edge_index.info.n_id[edges.edges]
    # With self-loops node 0 has degree 4, node 1 has degree 2, and nodes 2 and 3 have degree 1.
    scale = torch.tensor([4.0, 2.0, 1.0, 1.0]).pow(-0.5)
    torch.testing.assert_close(edges.constants["edge_weight"], scale[nodes[0]] * scale[nodes[1]])
    assert sorted(map(tuple, nodes.t().tolist())) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    other = found.for_batch(second.edge_index.info, "a layer")
    assert sorted(map(tuple, second.edge_index.info.n_id[other.edges].t().tolist())) == [(2, 2), (3, 3)]


def test_a_closed_record_has_all_edges_into_the_halo_too() -> None:
    """On a path of five nodes, the neighbour of a halo's node that is not at hand is replaced by that node itself."""
    nodes = torch.arange(4)
    edges = torch.stack([nodes, nodes + 1])
    data = Data(x=torch.ones(5, 2), edge_index=torch.cat([edges, edges.flip(0)], dim=1))
    loader = gas.HaloLoader(data, partition=torch.tensor([0, 0, 1, 2, 2]))
    first, _, _ = loader.in_order()
    found = record(pyg.GCNConv(2, 2, add_self_loops=False), Recorder(loader.graph), first.edge_index)
    closed = found.closed.for_batch(first.edge_index.info, "a layer")
    pairs = map(tuple, first.edge_index.info.n_id[closed.edges].t().tolist())
    weights = {pair: float(weight) for pair, weight in zip(pairs, closed.constants["edge_weight"], strict=True)}
    one_end, inner = 0.5**0.5, 0.5
    assert weights == pytest.approx({(1, 0): one_end, (0, 1): one_end, (2, 1): inner, (1, 2): inner, (2, 2): inner})
    assert found.closed is found.closed
    # The weight of the missing edge is that of the edge from node 3.
    assert closed.adjacency("edge_weight").num_targets == first.num_nodes


def test_equal_records_are_one_and_equal_edges_are_shared() -> None:
    loader = gas.HaloLoader(star(), partition=torch.zeros(4, dtype=torch.long))
    recorder, edges = Recorder(loader.graph), next(iter(loader)).edge_index
    gcn, sage = record(pyg.GCNConv(2, 2), recorder, edges), record(pyg.SAGEConv(2, 2), recorder, edges)
    assert record(pyg.GCNConv(2, 5), recorder, edges) is gcn
    assert record(pyg.SAGEConv(2, 5), recorder, edges) is sage
    assert sage.edges is loader.graph.incoming
    weighted = record(pyg.GCNConv(2, 2, add_self_loops=False), recorder, edges)
    assert weighted is not sage
    assert weighted.edges is sage.edges
    assert record(pyg.SAGEConv(2, 2, flow="target_to_source"), recorder, edges).edges is not sage.edges


def test_layers_that_need_features_before_they_propagate_are_refused() -> None:
    class Nearest(pyg.MessagePassing):  # type: ignore[misc]
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            chosen = edge_index[:, : int(x.sum())]
            out: Tensor = self.propagate(chosen, x=x)
            return out

    loader = gas.HaloLoader(star(), partition=torch.zeros(4, dtype=torch.long))
    with pytest.raises(
        UnsupportedModelError, match=r"\('a layer'\) must compute the edges.*from its edges alone.*message"
    ):
        record(Nearest(), Recorder(loader.graph), next(iter(loader)).edge_index)


def test_self_loops_are_never_dropped() -> None:
    edges = torch.tensor([[0] * 50 + [7], [1] * 50 + [7]])
    assert keep_edges(edges, 0.999).tolist()[-1] == 50
    assert keep_edges(edges, 0.0).tolist() == list(range(51))
    assert keep_edges(edges, 0.999, has_loops=False).numel() < 10


def test_recorded_edges_are_found_among_the_layers_own() -> None:
    own = torch.tensor([[2, 0, 1, 0], [1, 2, 0, 1]])  # the second points to the halo
    assert align(own, torch.tensor([[1, 2, 0], [0, 1, 1]]), 1, 2, "a layer").tolist() == [2, 0, 3]
    with pytest.raises(UnsupportedModelError, match=r"a layer weights edges.*but got different edges"):
        align(own, torch.tensor([[1, 2, 2], [0, 1, 1]]), 1, 2, "a layer")


def test_a_weightless_copy_leaves_the_layer_alone() -> None:
    layer = pyg.GATConv(2, 2).train()
    copied = weightless_copy(layer)
    assert all(value.is_meta for value in copied.parameters())
    assert not any(value.is_meta for value in layer.parameters())
    assert layer.training
    assert not copied.training


def test_copies_share_the_edges_of_a_batch() -> None:
    graph = Graph(star())
    loader = gas.HaloLoader(star(), partition=torch.tensor([0, 0, 1, 1]))
    found = EdgeRecord(graph.incoming, {}).for_batch(next(loader.in_order()).edge_index.info, "a layer")
    assert copy.deepcopy([found])[0] is found


# Records that are made again #########################################################################################


class Powers(pyg.MessagePassing):  # type: ignore[misc]
    """Weighs edges by a power of their weight: the product of an attribute and an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.power = 1.0

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, times: float = 1.0, size: int = 0) -> Any:
        weight = edge_weight.to(x.dtype) ** (self.power * times)
        return self.propagate(edge_index, x=x, weight=weight + size)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.unsqueeze(-1)


class Powered:
    """Records calls of such a layer on a graph with the edge weights 1, 2, 3 and 4."""

    def __init__(self) -> None:
        data = star()
        data.edge_weight = torch.arange(1.0, 5.0)
        self.batch = next(iter(gas.HaloLoader(data, partition=torch.zeros(4, dtype=torch.long))))
        self.recorder, self.layer = Recorder(self.batch.edge_index.info.graph), Powers()
        self.known = self.call()

    @staticmethod
    def call(**options: Any) -> LayerCall:
        return LayerCall(
            ["node", "own", "own"], [None, "edge_index", "edge_weight"], [frozenset({"weight"})], **options
        )

    def record(self, known: LayerCall | None = None, x: Tensor | None = None, **arguments: Any) -> EdgeRecord:
        x = torch.ones(4, 2) if x is None else x
        given = (x, self.batch.edge_index, self.batch.edge_weight), arguments
        (found,) = self.recorder.of_call("a layer", self.layer, known or self.known, given)
        return found


def test_a_call_is_recorded_once() -> None:
    powered = Powered()
    first = powered.record()
    assert first.constants["weight"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert powered.record() is first
    assert powered.record(powered.call()) is first  # another plan
    assert powered.recorder.records == {"a layer": [first]}


def test_another_argument_is_another_record() -> None:
    powered = Powered()
    first, squared = powered.record(times=1.0), powered.record(times=2.0)
    assert squared.constants["weight"].tolist() == [1.0, 4.0, 9.0, 16.0]
    assert squared.edges is first.edges
    assert powered.record(times=1.0) is first
    assert powered.recorder.records == {"a layer": [first]}  # as of the last use


def test_another_attribute_is_another_record_in_the_next_plan() -> None:
    powered = Powered()
    first = powered.record()
    powered.layer.power = 3.0
    assert powered.record(powered.call()).constants["weight"].tolist() == [1.0, 8.0, 27.0, 64.0]
    powered.layer.power = 1.0
    assert powered.record(powered.call()) is first


def test_another_type_is_another_record() -> None:
    powered = Powered()
    double = powered.record(x=torch.ones(4, 2, dtype=torch.float64), times=0.5)
    single = powered.record(times=0.5)
    assert torch.equal(double.constants["weight"], torch.arange(1, 5, dtype=torch.float64).sqrt())
    assert single.constants["weight"].dtype == torch.float32


def test_the_number_of_nodes_is_that_of_the_graph() -> None:
    """A call in a batch is recorded for the whole graph, and all batches share the record."""
    powered = Powered()
    known = powered.call(sizes=frozenset({1}))
    first = powered.record(known, times=1.0, size=2)
    assert first.constants["weight"].tolist() == [5.0, 6.0, 7.0, 8.0]
    assert powered.record(known, times=1.0, size=3) is first
    assert powered.record(times=1.0, size=3).constants["weight"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_few_records_of_a_call_are_kept() -> None:
    """A number that changes in every step must not fill the memory."""
    powered = Powered()
    made = [ref(powered.record(times=0.5 * number)) for number in range(1, 11)]
    gc.collect()
    assert [record() is not None for record in made] == [False] * 6 + [True] * 4
    assert powered.record(times=5.0) is made[-1]()


def test_edges_that_were_not_prepared_say_so() -> None:
    with pytest.raises(RuntimeError, match="prepared for layers that fuse only"):
        _ = BatchEdges({}, EdgeForm(1, 0, 0, 0)).edges


@pytest.mark.parametrize("parts", [[0, 0, 1, 1], [1, 0, 0, 1]])
def test_batches_of_another_loader_get_their_edges_from_the_same_record(parts: list[int]) -> None:
    """A record has the order of rows of the loader that came first."""
    data = star()
    first, other = (gas.HaloLoader(data, partition=torch.tensor(labels)) for labels in ([1, 0, 1, 0], parts))
    found = record(pyg.GCNConv(2, 2), Recorder(first.graph), first.any_batch().edge_index)
    own = record(pyg.GCNConv(2, 2), Recorder(other.graph), other.any_batch().edge_index)
    assert found.edges.order is not own.edges.order
    for batch in other:
        info = batch.edge_index.info
        got, expected = found.for_batch(info, "a layer"), own.for_batch(info, "a layer")
        assert found.for_batch(info, "a layer") is got  # made once
        assert torch.equal(got.edges, expected.edges)
        assert torch.equal(got.constants["edge_weight"], expected.constants["edge_weight"])
        for one, wanted in zip(
            got.adjacency("edge_weight").tensors().values(),
            expected.adjacency("edge_weight").tensors().values(),
            strict=True,
        ):
            assert torch.equal(one, wanted)
