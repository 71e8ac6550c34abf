"""Rows of a batch: from which attributes, in which dimension, and in an object of which class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]

from conftest import undirected_graph
from gnnautoscale.errors import InputError
from gnnautoscale.graph.assemble import without_tensors
from gnnautoscale.graph.loader import HaloLoader
from gnnautoscale.graph.subgraphs import Subgraphs


class Molecule(Data):  # type: ignore[misc]
    """A graph with a property, a method, and nodes in a second dimension."""

    @property
    def doubled(self) -> Any:
        return self.x * 2

    def describe(self) -> str:
        return f"{self.name} of {self.num_nodes}"

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key == "whole":
            return None  # PyG's way to say that it is no row of anything
        return 1 if key in ("series", "val_mask") else super().__cat_dim__(key, value, *args, **kwargs)


def molecule() -> Molecule:
    given = undirected_graph().to_dict()
    nodes = torch.arange(40)
    return Molecule(name="ring", **given, series=torch.stack([nodes, -nodes]), val_mask=(nodes < 9)[None], whole=nodes)


def test_batches_are_of_the_class_of_the_graph() -> None:
    data = molecule()
    batches = [*HaloLoader(data, 3), *HaloLoader(data, 3, num_workers=1).in_order()]
    for batch in [*batches, HaloLoader(data, 3).batch_for(torch.tensor([4])), Subgraphs(data).induced(torch.arange(5))]:
        n_id = batch.n_id.as_subclass(Tensor)
        assert type(batch) is Molecule
        assert batch.describe() == f"ring of {n_id.numel()}"
        assert torch.equal(batch.doubled, data.x[n_id] * 2)
    assert data.num_nodes == 40
    assert "n_id" not in data


def test_a_constructor_with_arguments_is_not_called() -> None:
    class Named(Data):  # type: ignore[misc]
        def __init__(self, name: str, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.name = name.upper()

    for batch in HaloLoader(Named("ring", **undirected_graph().to_dict()), 3):
        assert (type(batch), batch.name) == (Named, "RING")


def test_nodes_may_lie_in_another_dimension() -> None:
    data = molecule()
    for batch in HaloLoader(data, 3):
        n_id = batch.n_id.as_subclass(Tensor)
        assert torch.equal(batch.series, torch.stack([n_id, -n_id]))
        assert torch.equal(batch.val_mask, (n_id < 9)[None])
        assert batch.whole is data.whole


def test_labels_are_counted_in_their_own_dimension() -> None:
    data = molecule()
    data.val_mask = data.val_mask.t()
    with pytest.raises(InputError, match=r"val_mask must have one row for each of the 40 nodes.*\(40, 1\)"):
        HaloLoader(data, 3)


def test_classes_whose_attributes_would_hide_those_of_batches_are_refused() -> None:
    class Hides(Data):  # type: ignore[misc]
        @property
        def batch_size(self) -> int:
            return 7

    with pytest.raises(InputError, match=r"n_id, e_id and batch_size.*but got Hides.batch_size"):
        HaloLoader(Hides.from_dict(undirected_graph().to_dict()), 3)


# Graphs made of several ##############################################################################################


@pytest.mark.parametrize("kind", [Data, Molecule])
def test_a_graph_made_of_several(kind: type[Data]) -> None:
    graphs = [undirected_graph(12, 20), undirected_graph(9, 12, seed=1), undirected_graph(17, 20, seed=2)]
    if kind is Molecule:
        graphs = [Molecule(name="some", **graph.to_dict()) for graph in graphs]
    data = Batch.from_data_list(graphs, follow_batch=["edge_type"])
    seen = []
    for batch in HaloLoader(data, 4, partition="random"):
        nodes = batch.n_id.as_subclass(Tensor)
        assert type(batch) is kind
        assert batch.batch_size < batch.num_nodes == nodes.numel()
        assert torch.equal(batch.batch, data.batch[nodes])
        assert torch.equal(batch.x, data.x[nodes])
        # Where graphs begin says nothing about nodes in another order.
        assert not {"ptr", "edge_type_ptr"} & set(batch.keys())
        assert not hasattr(batch, "_slice_dict")
        seen.append(nodes[: batch.batch_size])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(38))
    # The graph itself is as it was.
    assert torch.equal(data[1].x, graphs[1].x)
    assert data.ptr.tolist() == [0, 12, 21, 38]


def test_as_many_graphs_as_nodes() -> None:
    """One entry more in ``ptr`` than graphs, and here as many as nodes."""
    pair = Data(x=torch.rand(2, 3), edge_index=torch.tensor([[0], [1]]))
    single = Data(x=torch.rand(1, 3), edge_index=torch.empty(2, 0, dtype=torch.long))
    data = Batch.from_data_list([pair, single, single])
    assert data.ptr.numel() == data.num_nodes == 4
    for batch in HaloLoader(data, 2, partition="random"):
        assert "ptr" not in batch
        assert torch.equal(batch.batch, data.batch[batch.n_id])


# Targets of link prediction ##########################################################################################


@pytest.mark.parametrize("count", [7, "nodes", "edges"])
def test_link_targets_stay_as_they_are_however_many(count: int | str) -> None:
    data = undirected_graph()
    number = {"nodes": data.num_nodes, "edges": data.num_edges}.get(str(count), 7)
    data.edge_label_index = torch.randint(40, (2, number))
    data.edge_label = torch.rand(number)
    loader = HaloLoader(data, 3)
    assert not {"edge_label", "edge_label_index"} & (loader.graph.edge_attributes.keys() | loader.graph.features.keys())
    for batch in loader:
        assert batch.edge_label_index is data.edge_label_index
        assert batch.edge_label is data.edge_label


def test_labels_of_the_edges_themselves_are_rows_of_edges() -> None:
    data = undirected_graph()
    data.edge_label = torch.rand(data.num_edges)
    for batch in HaloLoader(data, 3):
        assert torch.equal(batch.edge_label, data.edge_label[batch.e_id])


# Bare batches ########################################################################################################


def test_a_batch_without_its_tensors() -> None:
    batch = next(iter(HaloLoader(molecule(), 3)))
    bare = without_tensors(batch)
    assert type(bare) is Molecule
    assert {name: bare[name] for name in bare.keys()} == {  # noqa: SIM118
        "name": "ring",
        "num_nodes": batch.num_nodes,
        "batch_size": batch.batch_size,
    }
    assert "x" in batch


def test_tensors_of_inference_mode_may_be_passed_on() -> None:
    data = undirected_graph()
    with torch.inference_mode():
        data.scale, data.x = torch.tensor([2.0]), data.x * 2
    loader = HaloLoader(data, 3)
    for _ in range(2):
        for batch in loader:
            assert batch.scale is data.scale
            assert torch.equal(batch.x, data.x[batch.n_id])
