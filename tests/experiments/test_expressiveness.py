"""Weisfeiler-Lehman colours against plain Python, and the paper's Proposition and Theorem 2 on small graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from conftest import assert_same, odd_graph
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import expressiveness
from gnnautoscale.experiments.expressiveness import (
    TOLERANCE,
    Comparison,
    Example,
    PowerfulGNN,
    compare_classes,
    examples,
    full_batch,
    nearest_colours,
    on_subgraphs,
    row_classes,
    survey,
    while_training,
    with_histories,
    wl_colours,
)
from gnnautoscale.experiments.expressiveness.survey import counterexample, random_graph, two_stars
from gnnautoscale.graph import ClusterLoader, HaloLoader, SampleLoader
from support.command import invoke

SMALL = [example for example in examples() if example.data.num_nodes < 1000]
SEEDS = range(4)


def refined_by_hand(edge_index: Tensor, colours: list[int], rounds: int) -> list[Any]:
    """Colour refinement with nested tuples as colours: nothing is renamed, so nothing can be confused."""
    now: list[Any] = list(colours)
    edges = edge_index.t().tolist()
    for _ in range(rounds):
        names = {colour: number for number, colour in enumerate(sorted(set(now)))}
        ranks = [names[colour] for colour in now]
        incoming: list[list[int]] = [[] for _ in now]
        for source, target in edges:
            incoming[target].append(ranks[source])
        now = [(rank, *sorted(others)) for rank, others in zip(ranks, incoming, strict=True)]
    return now


def first_appearance(values: list[Any]) -> list[int]:
    seen: dict[Any, int] = {}
    return [seen.setdefault(value, len(seen)) for value in values]


def odd(seed: int) -> Data:
    """A directed graph with all that is odd, in two colours."""
    data = odd_graph(seed)
    return Data(x=torch.eye(2, dtype=torch.double)[data.y % 2], edge_index=data.edge_index)


def classes(out: Tensor) -> Tensor:
    return row_classes(out, TOLERANCE)


def model_for(example: Example, seed: int = 0) -> PowerfulGNN:
    return PowerfulGNN(example.data.num_features, example.layers, seed=seed)


def separation(exact: Tensor, colours: Tensor) -> float:
    """The least distance of outputs of different colours."""
    apart = torch.cdist(exact, exact)[colours.unsqueeze(0) != colours.unsqueeze(1)]
    return float(apart.min()) if apart.numel() else float("inf")


# Colours #############################################################################################################


def test_colours_of_a_star_and_of_a_directed_path() -> None:
    star = torch.tensor([[0, 1, 0, 2, 0, 3], [1, 0, 2, 0, 3, 0]])
    assert wl_colours(star, 5).tolist() == [0, 1, 1, 1, 2]  # node 4 has no edge
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert wl_colours(path, 4).tolist() == [0, 1, 2, 3]
    assert wl_colours(path, 4, rounds=0).tolist() == [0, 0, 0, 0]
    assert wl_colours(path, 4, rounds=1).tolist() == [0, 1, 1, 1]
    assert wl_colours(path, 4, rounds=2).tolist() == [0, 1, 2, 2]
    assert wl_colours(torch.tensor([[0, 0, 0], [1, 1, 2]]), 3).tolist() == [0, 1, 2]  # a double edge counts twice


def test_colours_to_start_from_are_kept_apart() -> None:
    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    assert wl_colours(ring, 4).tolist() == [0, 0, 0, 0]
    assert wl_colours(ring, 4, colours=torch.tensor([9, 4, 4, 4])).tolist() == [0, 1, 2, 3]
    assert wl_colours(ring, 4, colours=torch.tensor([9, 4, 9, 4])).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, None])
@pytest.mark.parametrize("seed", SEEDS)
def test_colours_are_those_of_plain_python(seed: int, rounds: int | None) -> None:
    for data in (odd(seed), random_graph(60, pairs=70, colours=2, seed=seed)):
        start = row_classes(data.x)
        found = wl_colours(data.edge_index, data.num_nodes, colours=start, rounds=rounds)
        by_hand = refined_by_hand(data.edge_index, start.tolist(), data.num_nodes if rounds is None else rounds)
        assert found.tolist() == first_appearance(by_hand)


def test_compared_classes() -> None:
    colours = torch.tensor([0, 0, 1, 1, 2])
    assert compare_classes(torch.tensor([3, 3, 1, 1, 0]), colours) == Comparison(3, 3, torn=0, merged=0)
    assert compare_classes(torch.tensor([0, 1, 2, 2, 3]), colours) == Comparison(3, 4, torn=1, merged=0)
    assert compare_classes(torch.tensor([0, 0, 0, 0, 3]), colours) == Comparison(3, 2, torn=0, merged=2)
    assert compare_classes(torch.tensor([0, 1, 1, 1, 1]), colours) == Comparison(3, 2, torn=1, merged=3)
    assert compare_classes(torch.tensor([5, 5, 0, 0, 9]), colours).same
    assert not compare_classes(torch.tensor([0, 0, 1, 2, 3]), colours).same


def test_rows_that_are_nearly_equal() -> None:
    rows = torch.tensor([[0.0, 1.0], [1e-12, 1.0], [0.0, 1.1], [0.3, 1.0]], dtype=torch.double)
    assert row_classes(rows, 1e-9).tolist() == [0, 0, 1, 2]
    assert row_classes(rows).tolist() == [0, 1, 2, 3]
    assert row_classes(rows, 1.0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wl_colours(torch.tensor([[0], [3]]), 2), "indices from 0 to 1"),
        (lambda: wl_colours(torch.tensor([[0], [1]]), 0), "at least 1"),
        (lambda: wl_colours(torch.tensor([[0], [1]]), 2, rounds=-1), "rounds must be"),
        (lambda: wl_colours(torch.tensor([[0], [1]]), 2, colours=torch.ones(2)), "must be integers"),
        (lambda: wl_colours(torch.tensor([[0], [1]]), 2, colours=torch.arange(3)), "2 nodes"),
        (lambda: compare_classes(torch.arange(2), torch.arange(3)), "3 nodes"),
        (lambda: compare_classes(torch.arange(0), torch.arange(0)), "at least one"),
        (lambda: row_classes(torch.tensor([[float("nan")]])), "finite"),
        (lambda: row_classes(torch.ones(3)), r"shape \[3\]"),
        (lambda: PowerfulGNN(1, 0), "layers must be"),
        (lambda: with_histories(PowerfulGNN(3, 1), HaloLoader(counterexample(), 2), passes=0), "passes must be"),
        (lambda: while_training(PowerfulGNN(3, 1), HaloLoader(counterexample(), 2), lr=-1.0), "lr must be"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


# The model ###########################################################################################################


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_tells_apart_what_as_many_rounds_do(seed: int, layers: int) -> None:
    for data in (odd(seed), random_graph(60, pairs=70, colours=2, seed=seed)):
        colours = wl_colours(data.edge_index, data.num_nodes, colours=row_classes(data.x), rounds=layers)
        assert compare_classes(classes(full_batch(PowerfulGNN(2, layers, seed=seed), data)), colours).same


# The Proposition #####################################################################################################


def drawn(data: Data, keep: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs of one layer on all edges, and on some with the Proposition's weights."""
    model = PowerfulGNN(3, 1)
    edges = data.edge_index[:, keep]
    degree, left = (torch.bincount(index[1], minlength=data.num_nodes) for index in (data.edge_index, edges))
    with torch.no_grad():
        return full_batch(model, data), model(data.x, edges, degree[edges[1]] / left[edges[1]].double())


def test_a_drawing_that_tears_nodes_of_one_colour() -> None:
    data = counterexample()
    assert wl_colours(data.edge_index, 4, colours=row_classes(data.x), rounds=1).tolist() == [0, 1, 2, 0]
    # The edges into node 0 and node 3 are those from 1 and from 2: keep one of each, not the same.
    wanted = [(1, 0), (2, 3)]
    edges = [tuple(edge) for edge in data.edge_index.t().tolist()]
    whole, sampled = drawn(data, [edges.index(edge) for edge in wanted])
    assert_same(whole[0], whole[3], 1e-12)
    assert float((sampled[0] - sampled[3]).norm()) > 0.1


def test_a_drawing_that_merges_nodes_of_two_colours() -> None:
    data = two_stars()
    colours = wl_colours(data.edge_index, 8, colours=row_classes(data.x), rounds=1)
    assert colours[0] != colours[1]
    edges = [tuple(edge) for edge in data.edge_index.t().tolist()]
    whole, sampled = drawn(data, [edges.index((2, 0)), edges.index((5, 1))])  # both see colour 1
    assert float((whole[0] - whole[1]).norm()) > 0.1
    assert_same(sampled[0], sampled[1], 1e-12)


@pytest.mark.parametrize("rescale", [True, False])
def test_sampling_does_not_keep_classes(rescale: bool) -> None:
    def outcomes(example: Example) -> list[Comparison]:
        loaders = [SampleLoader(example.data, torch.arange(example.data.num_nodes), [1], 4, seed=s) for s in range(20)]
        outputs = [on_subgraphs(model_for(example), example.data, loader, rescale=rescale) for loader in loaders]
        return [compare_classes(classes(out), example.colours) for out in outputs]

    tearing, merging = outcomes(SMALL[0]), outcomes(SMALL[1])
    # Nodes 0 and 3 draw one of two neighbours each: different ones half of the time.
    assert {(result.torn, result.merged) for result in tearing} == {(0, 0), (1, 0)}
    assert {(result.torn, result.merged) for result in merging} == {(0, 0), (0, 2)}


def test_dropping_edges_between_parts_does_not_keep_classes() -> None:
    loader = ClusterLoader(SMALL[0].data, partition=torch.tensor([0, 0, 1, 1]))
    out = on_subgraphs(model_for(SMALL[0]), SMALL[0].data, loader)
    assert compare_classes(classes(out), SMALL[0].colours) == Comparison(3, 4, torn=1, merged=0)


@pytest.mark.parametrize("example", SMALL, ids=lambda example: example.name)
def test_nothing_is_lost_if_no_edge_is(example: Example) -> None:
    model, data = model_for(example), example.data
    samples = SampleLoader(data, torch.arange(data.num_nodes), [-1] * example.layers, 4)
    for batches in (samples, ClusterLoader(data, 1)):
        assert_same(on_subgraphs(model, data, batches), full_batch(model, data), 1e-12)


# Theorem 2 ###########################################################################################################


@pytest.mark.parametrize("parts", ["metis", "random", "one"])
@pytest.mark.parametrize("example", SMALL, ids=lambda example: example.name)
def test_histories_keep_classes(example: Example, parts: Literal["metis", "random", "one"]) -> None:
    model = model_for(example)
    count = 1 if parts == "one" else example.num_parts
    how: Literal["metis", "random"] = "random" if parts == "random" else "metis"
    loader = HaloLoader(example.data, count, partition=how, shuffle=True)
    exact = full_batch(model, example.data)
    for passes in (None, example.layers):
        out = with_histories(model, loader, passes=passes)
        assert_same(out, exact, 1e-11)
        assert compare_classes(classes(out), example.colours).same


@pytest.mark.parametrize(("seed", "parts"), [(0, "metis"), (1, "random"), (2, "metis"), (3, "random")])
def test_histories_keep_classes_of_directed_graphs(seed: int, parts: Literal["metis", "random"]) -> None:
    data = odd(seed)
    colours = wl_colours(data.edge_index, 33, colours=row_classes(data.x), rounds=3)
    loader = HaloLoader(data, 5, partition=parts, shuffle=True, seed=seed)
    for passes in (None, 3):
        out = with_histories(PowerfulGNN(2, 3, seed=seed), loader, passes=passes)
        assert compare_classes(classes(out), colours).same


def test_histories_that_are_still_empty_do_not_keep_classes() -> None:
    """What the theorem asks for is needed: the first pass pulls rows that nobody has written."""
    example = SMALL[2]
    out = with_histories(model_for(example), HaloLoader(example.data, 4), passes=1)
    assert compare_classes(classes(out), example.colours).torn == 1


@pytest.mark.parametrize("example", SMALL, ids=lambda example: example.name)
def test_stale_histories_keep_classes_while_they_are_not_too_stale(example: Example) -> None:
    """Whenever outputs are nearer to the exact ones than half of what lies between colours."""
    colours = example.colours
    for lr in (1e-2, 1e-4):
        out, exact = while_training(
            model_for(example), HaloLoader(example.data, example.num_parts, shuffle=True), lr=lr
        )
        error = float((out - exact).norm(dim=1).max())
        assert (error > 1e-8) == (example.layers > 1)  # one layer reads features only, which are never stale
        near = 2 * error < separation(exact, colours)
        assert near or lr > 1e-4
        if near:
            assert torch.equal(nearest_colours(out, exact, colours), colours)


def test_histories_that_are_too_stale_do_not_keep_classes() -> None:
    example = SMALL[3]
    out, exact = while_training(model_for(example), HaloLoader(example.data, example.num_parts, shuffle=True), lr=0.1)
    assert not torch.equal(nearest_colours(out, exact, example.colours), example.colours)


def test_the_model_itself_is_left_alone() -> None:
    model, data = PowerfulGNN(3, 2), counterexample()
    before = full_batch(model, data)
    while_training(model, HaloLoader(data, 2), lr=0.1)
    with_histories(model, HaloLoader(data, 2))
    assert torch.equal(before, full_batch(model, data))


# The command #########################################################################################################


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressiveness, "examples", lambda: SMALL[:3])


def test_every_method_is_surveyed() -> None:
    found = survey(SMALL[3], seed=1, partition="random")
    assert list(found)[:2] == ["full batch", "GAS"]
    assert {method for method in found if found[method].same} >= {"full batch", "GAS", "GAS, a pass per layer"}
    assert not found["GraphSAGE"].same
    assert not found["Cluster-GCN"].same


@pytest.mark.usefixtures("_small")
def test_the_table() -> None:
    result = invoke(["expressiveness", "--draws", "2"])
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["graph", "counterexample", "two stars", "hexagon and triangles"]
    cells = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}
    assert {row["GAS"] for row in cells.values()} == {"yes"}
    assert cells["counterexample"]["Cluster-GCN"] == "0/2: 1.0 split"
    assert cells["hexagon and triangles"]["kinds of nodes"] == "1"


def test_the_table_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressiveness, "examples", lambda: SMALL[:1])
    found = json.loads(invoke(["expressiveness", "--draws", "1", "--json"]).stdout)
    assert found["draws"] == 1
    (row,) = found["rows"]
    assert row["graph"] == "counterexample"
    assert row["methods"]["GAS"]["kept"] == 1
    assert row["methods"]["GAS"]["draws"][0] == {"colours": 3, "classes": 3, "torn": 0, "merged": 0}


@pytest.mark.parametrize("flags", [["--draws", "0"], ["--partition", "best"], ["--lr", "-1"]])
def test_bad_options_are_refused(flags: list[str]) -> None:
    assert isinstance(invoke(["expressiveness", *flags]).exception, InputError)
