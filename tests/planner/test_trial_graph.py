"""Trial graphs: their sizes, edges and features, and the arguments of calls on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, directed_ring, odd_graph, undirected_graph
from gnnautoscale.graph import BatchTensor, Graph
from gnnautoscale.planner.trial_graph import TrialGraph, TrialSetup, disturb, graph_form, kinds_of, setups_for

OWN, LARGE = TrialSetup(13, 7, 5, "own"), TrialSetup(13, 7, 5, "large")
SETUPS = setups_for(Graph.of(undirected_graph()))


def forward(x: Tensor, edge_index: Tensor, *others: Any, **options: Any) -> None:
    """What models are called like."""


def tried(
    data: Data,
    setup: TrialSetup = OWN,
    dtype: torch.dtype | None = None,
    *,
    call: Callable[[Data], Any] = lambda batch: (batch.x, batch.edge_index),
    model: Callable[..., Any] = forward,
    **options: Any,
) -> TrialGraph:
    batch = next(iter(gas.HaloLoader(data, 2)))
    given = call(batch)
    bound = (
        inspect.signature(model).bind(*given) if isinstance(given, tuple) else inspect.signature(model).bind(**given)
    )
    return TrialGraph(batch.edge_index.info, bound, torch.device("cpu"), setup, dtype, **options)


def whole_arguments(trial: TrialGraph) -> tuple[Any, ...]:
    """The positional arguments of a call on the whole of a trial graph."""
    return trial.arguments(next(iter(trial.whole)))[0]


# Edges ###############################################################################################################


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("make", [undirected_graph, odd_graph])
def test_a_trial_graph_is_symmetric_if_the_graph_is(setup: TrialSetup, make: Callable[[], Data]) -> None:
    data = make()
    trial = tried(data, setup)
    graph = trial.whole.graph
    assert graph.num_nodes == setup.num_nodes
    assert graph.is_symmetric is (make is undirected_graph)
    source, target = graph.edge_index
    assert torch.equal(target, target.sort().values)
    assert source[source == target].tolist() == [int((trial.parts.labels == part).nonzero().max()) for part in range(3)]
    assert torch.unique(graph.edge_index, dim=1).size(1) == source.numel() > setup.num_nodes


@pytest.mark.parametrize("setup", SETUPS)
def test_three_parts_whose_halos_have_other_neighbours(setup: TrialSetup) -> None:
    trial = tried(undirected_graph(), setup)
    infos = [batch.edge_index.info for batch in trial.parts]
    assert len(infos) == 3
    assert len({info.batch_size for info in infos}) > 1
    assert sum(info.batch_size for info in infos) == setup.num_nodes
    for info in infos:
        _, source, _ = trial.parts.graph.incoming.into(info.halo)
        assert not torch.isin(source, info.nodes).all()
    (all_of_it,) = trial.whole
    assert all_of_it.batch_size == setup.num_nodes


@pytest.mark.parametrize(("num_nodes", "largest"), [(40, 257), (600, 600), (5000, 1031)])
def test_the_largest_trial_is_as_large_as_the_graph_within_bounds(num_nodes: int, largest: int) -> None:
    for data in (undirected_graph(num_nodes), directed_ring(num_nodes)):
        graph = Graph.of(data)
        assert graph_form(graph) == (graph.is_symmetric, largest)
        sizes = [setup.num_nodes for setup in setups_for(graph)]
        assert sizes == sorted({13, 97, largest})
        assert [setup.features for setup in setups_for(graph)] == ["own", "noise", "large"]


def test_graphs_are_the_same_every_time() -> None:
    first, second = (tried(undirected_graph(), SETUPS[1]).whole.graph.edge_index for _ in range(2))
    assert torch.equal(first, second)


# Features ############################################################################################################


def with_columns() -> Data:
    """Positive, negative, tiny, huge, whole-numbered and constant columns."""
    data = undirected_graph()
    noise = torch.rand(data.num_nodes)
    whole = (10 * noise).round()
    columns = [1 + noise, -1 - noise, 1e-6 * (1 + noise), 1e4 * (1 + noise), whole, torch.full((data.num_nodes,), 0.5)]
    data.x = torch.stack(columns, dim=1)
    return data


def test_own_features_keep_sign_size_and_whole_numbers() -> None:
    data = with_columns()
    x = whole_arguments(tried(data, TrialSetup(257, 150, 9, "own")))[0]
    assert x.shape == (257, 6)
    assert (x[:, 0] > 0.4).all()
    assert (x[:, 1] < -0.4).all()
    assert torch.equal(x[:, 4], x[:, 4].round())
    assert torch.isin(x[:, 4], data.x[:, 4]).all()
    for column, own in zip(x.t(), data.x.t(), strict=True):
        assert column.abs().max() <= own.abs().max()
        assert column.abs().max() >= 0.5 * own.abs().max()
    assert torch.unique(x, dim=0).size(0) == 257  # more different rows than the data has


def test_noise_spares_whole_numbers() -> None:
    data = with_columns()
    x = whole_arguments(tried(data, TrialSetup(257, 150, 9, "noise")))[0]
    noise = x[:, [0, 1, 2, 3, 5]]
    assert (noise < 0).any(0).all()
    assert (noise > 1).any(0).all()
    assert torch.isin(x[:, 4], data.x[:, 4]).all()


def test_large_features_are_a_hundred_times_as_large() -> None:
    data = with_columns()
    torch.manual_seed(3)
    own = whole_arguments(tried(data, OWN))[0]
    torch.manual_seed(3)
    large = whole_arguments(tried(data, LARGE))[0]
    torch.testing.assert_close(large, 100 * own)


def test_integers_are_the_batch_s_own_in_order() -> None:
    data = undirected_graph()
    batch = next(iter(gas.HaloLoader(data, 2)))
    trial = tried(data, call=lambda batch: (batch.y, batch.edge_index))
    assert torch.equal(whole_arguments(trial)[0], batch.y[torch.arange(13) % batch.num_nodes])


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_features_have_the_wanted_type(dtype: torch.dtype | None) -> None:
    call = lambda batch: (batch.x, batch.edge_index, batch.edge_weight, batch.edge_type, torch.ones(2))  # noqa: E731
    x, edge_index, weight, kind, other = whole_arguments(tried(undirected_graph(), OWN, dtype, call=call))
    assert {value.dtype for value in (x, weight, other)} == {dtype or torch.float32}
    assert edge_index.dtype == kind.dtype == torch.long


def test_edges_into_the_first_part_lack_relations_if_lopsided() -> None:
    data = undirected_graph()
    for lopsided in (False, True):
        trial = tried(data, TrialSetup(37, 400, 9, "own", lopsided=lopsided))
        first, second, _ = trial.parts
        assert (torch.unique(first.edge_type.plain).numel() == 1) is lopsided
        assert torch.unique(second.edge_type.plain).numel() == 3


def test_positive_edge_weights_stay_positive() -> None:
    for setup in SETUPS:
        batch = next(iter(tried(undirected_graph(), setup).whole))
        assert (batch.edge_weight.plain > 0).all()
        assert (batch.edge_attr.plain > 0).all()


# Arguments ###########################################################################################################


def test_arguments_have_the_form_of_the_call() -> None:
    """Rows of nodes and edges in nested containers, and what belongs to neither."""
    weight, flag = torch.ones(3), object()

    def call(batch: Data) -> tuple[Any, ...]:
        nested = {"rows": [batch.x, (batch.y, 4)], "flag": flag}
        return batch.x, batch.edge_index, batch.edge_attr.plain, weight, nested, None, "text"

    trial = tried(undirected_graph(), call=call)
    for batch in (*trial.parts, *trial.whole):
        x, edge_index, attr, other, nested, nothing, text = trial.arguments(batch)[0]
        assert x.size(0) == batch.num_nodes
        assert isinstance(edge_index, BatchTensor)
        assert edge_index.info is batch.edge_index.info
        assert type(attr) is Tensor
        assert attr.size(0) == batch.edge_index.size(1)
        assert other is weight
        assert torch.equal(nested["rows"][0], x)
        assert nested["rows"][1][0].size(0) == batch.num_nodes
        assert (nested["rows"][1][1], nested["flag"], nothing, text) == (4, flag, None, "text")


def test_the_batch_may_be_written_to() -> None:
    trial = tried(undirected_graph())
    whole_arguments(trial)[0].zero_()
    assert whole_arguments(trial)[0].any()


def test_counts_among_the_arguments_are_those_of_the_trial() -> None:
    def model(x: Tensor, edge_index: Tensor, num_nodes: int, batch_size: int, num_edges: int, depth: int) -> None: ...

    def call(batch: Data) -> dict[str, Any]:
        counts = {"num_nodes": batch.num_nodes, "batch_size": batch.batch_size, "num_edges": batch.num_edges}
        return {"x": batch.x, "edge_index": batch.edge_index, **counts, "depth": batch.num_nodes}

    data = undirected_graph()
    trial = tried(data, call=call, model=model)
    for batch in (*trial.parts, *trial.whole):
        counts = trial.arguments(batch)[0][2:]
        assert counts[:3] == (batch.num_nodes, batch.batch_size, batch.num_edges)
        assert counts[3] == next(iter(gas.HaloLoader(data, 2))).num_nodes  # a number by another name


def test_edges_that_the_call_changed_are_not_the_batch_s_own() -> None:
    def call(batch: Data) -> tuple[Any, ...]:
        batch.edge_weight.mul_(2)
        return batch.x, batch.edge_index, batch.edge_weight, batch.edge_type

    trial = tried(undirected_graph(), call=call)
    _, edge_index, weight, kind = whole_arguments(trial)
    assert isinstance(edge_index, BatchTensor)
    assert isinstance(kind, BatchTensor)
    assert not isinstance(weight, BatchTensor)
    assert weight.size(0) == edge_index.size(1)


def test_nodes_are_those_that_a_small_graph_has() -> None:
    data = undirected_graph(5)
    n_id = whole_arguments(tried(data, call=lambda batch: (batch.x, batch.edge_index, batch.n_id)))[2]
    assert torch.equal(torch.as_tensor(n_id), torch.arange(13) % 5)


class Named(Data):  # type: ignore[misc]
    """A class of one's own, with a property."""

    @property
    def doubled(self) -> Any:
        return 2 * self.x


def test_batches_are_of_the_data_s_class() -> None:
    data = Named(**undirected_graph().to_dict(), title="a graph", rate=torch.tensor(0.5))
    trial = tried(data, call=lambda batch: (batch,), model=lambda data: None)
    for batch in (*trial.parts, *trial.whole):
        (given,) = trial.arguments(batch)[0]
        assert type(given) is Named
        assert given.x.shape == (batch.num_nodes, CHANNELS)
        assert torch.equal(given.doubled, 2 * given.x)
        assert (given.title, given.rate) == ("a graph", 0.5)
        assert isinstance(given.edge_index, BatchTensor)


def test_rows_may_be_told_by_name_alone() -> None:
    """Where numbers of rows coincide by chance, only what the graph itself names belongs to nodes or edges."""

    def model(x: Tensor, edge_index: Tensor, table: Tensor) -> None: ...

    def call(batch: Data) -> tuple[Any, ...]:
        return batch.x, batch.edge_index, torch.ones(batch.num_nodes, 2)

    data = undirected_graph()
    count = next(iter(gas.HaloLoader(data, 2))).num_nodes
    by_size, by_name = (tried(data, call=call, model=model, by_size=by_size) for by_size in (True, False))
    assert whole_arguments(by_size)[2].shape == (13, 2)
    assert whole_arguments(by_name)[2].shape == (count, 2)
    assert whole_arguments(by_name)[0].shape == (13, CHANNELS)


def test_equal_entries_of_other_tensors_are_disturbed_if_wanted() -> None:
    zeros, different = torch.zeros(3), torch.tensor([1.0, 2.0])
    call = lambda batch: (batch.x, batch.edge_index, zeros, different)  # noqa: E731
    plain, disturbed = (whole_arguments(tried(undirected_graph(), call=call, disturbed=on)) for on in (False, True))
    assert not plain[2].any()
    assert torch.equal(disturbed[2], disturb(zeros))
    assert torch.equal(disturbed[3], different)
    assert not zeros.any()


def test_disturbed_values_are_different_and_always_the_same() -> None:
    zeros = torch.zeros(2, 3)
    assert len(set(disturb(zeros).flatten().tolist())) == 6
    assert ((disturb(zeros) >= 0.3) & (disturb(zeros) < 0.6)).all()
    torch.testing.assert_close(disturb(zeros + 5), disturb(zeros) + 5)
    assert torch.equal(disturb(zeros), disturb(zeros))
    for value in (torch.tensor([0.0, 1.0]), torch.zeros(0)):
        assert disturb(value) is value


def test_kinds_that_the_number_of_rows_allows() -> None:
    assert kinds_of(torch.zeros(3, 2), 3, 5) == {"node", "other"}
    assert kinds_of(torch.zeros(5), 3, 5) == {"edge", "other"}
    assert kinds_of(torch.zeros(5), 5, 5) == {"node", "edge", "other"}
    assert kinds_of(torch.zeros(()), 3, 5) == kinds_of(torch.zeros(2, 3), 3, 5) == {"other"}
