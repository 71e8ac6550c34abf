"""Several ranks compute what one process does, on tiny graphs, over gloo."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv, TAGConv  # type: ignore[import-untyped]
from torch_geometric.nn.conv import ChebConv, EGConv  # type: ignore[import-untyped]
from torch_geometric.utils import k_hop_subgraph  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack, assert_same, call_whole, history_rows, odd_graph, undirected_graph, whole
from gnnautoscale import ranks
from gnnautoscale.attach import regularize
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.ranks import is_first_to_say
from support.ranks import Normed, outcomes, run_ranks

Rows = dict[str, Tensor]


def gcn() -> nn.Module:
    torch.manual_seed(3)
    return Stack([GCNConv(8, 6), GCNConv(6, 6), GCNConv(6, 4)], ("edge_weight",))


def normed() -> nn.Module:
    torch.manual_seed(3)
    return Normed([GCNConv(8, 6), GCNConv(6, 6), GCNConv(6, 4)], nn.BatchNorm1d(6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": gcn,
    "GAT": lambda: Stack([GATConv(8, 3, heads=2), GATConv(6, 4)]),
    "SAGE": lambda: Stack([SAGEConv(8, 6), SAGEConv(6, 4)]),
    # Counts nodes by the largest number in its edges, and gives those a self-loop: not the last ones without edges.
    "EG": lambda: Stack([EGConv(8, 6, ["mean"], 2, 2), EGConv(6, 4, ["mean"], 2, 2)]),
    # Its normalization divides by the number of edges out of a node, also of a ghost.
    "Chebyshev": lambda: Stack([ChebConv(8, 6, 3), ChebConv(6, 4, 2)]),
}


def infer(data: Data, names: list[str], **options: Any) -> list[tuple[Tensor | None, Tensor, Tensor]]:
    loader = ranks.RankLoader(data, num_parts=7, **options)
    found = []
    for name in names:
        torch.manual_seed(5)
        model = ranks.autoscale(MODELS[name](), loader)
        own = gas.infer(model, loader, update_histories=False)
        gas.refresh(model, loader)
        some = torch.arange(0, loader.num_own, 3)
        found.append((loader.gathered(own), gas.predict(model, loader, some), loader.nodes[some]))
        gas.detach(model)
    return found


def whole_of(name: str, data: Data) -> Tensor:
    torch.manual_seed(5)
    out: Tensor = whole(MODELS[name](), data)
    return out


@pytest.mark.parametrize(
    ("size", "graph", "names"),
    [
        (2, odd_graph, ["GCN", "EG", "Chebyshev"]),
        (3, undirected_graph, ["GCN", "GAT", "SAGE"]),
        (4, odd_graph, ["GAT", "SAGE", "EG"]),
    ],
)
def test_inference_and_predictions_are_those_of_one_process(
    size: int, graph: Callable[[], Data], names: list[str]
) -> None:
    data = graph()
    wanted = [whole_of(name, data) for name in names]  # first, so that ranks inherit the code that PyG writes for it
    found = run_ranks(size, infer, data, names, bidirectional=graph is odd_graph)
    for number, expected in enumerate(wanted):
        every, _, _ = found[0][number]
        assert_same(every, expected)
        for _, predicted, nodes in (each[number] for each in found):
            assert_same(predicted, expected[nodes])
        assert all(each[number][0] is None for each in found[1:])


def infer_labels(data: Data, labels: Tensor) -> Tensor | None:
    loader = ranks.RankLoader(data, partition=labels)
    torch.manual_seed(5)
    model = ranks.autoscale(TAGConv(8, 4, K=2), loader)
    found: Tensor | None = loader.gathered(gas.infer(model, loader))
    return found


def test_a_rank_without_edges_has_the_histories_of_the_others() -> None:
    data = odd_graph()
    found, *_ = run_ranks(2, infer_labels, data, (torch.arange(33) >= 30).long())
    torch.manual_seed(5)
    assert_same(found, whole(TAGConv(8, 4, K=2), data))


def say_errors() -> tuple[bool, list[str]]:
    first = is_first_to_say("the same")
    lost = ranks.LostRankError("another rank is gone")
    errors: list[BaseException] = [lost, KeyboardInterrupt("go on"), ValueError("no")]
    told = []
    for error in errors:
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            sys.excepthook(type(error), error, None)
        told.append(stream.getvalue())
    return first, told


def test_what_all_ranks_say_is_said_once_and_a_lost_rank_in_one_sentence() -> None:
    found = run_ranks(2, say_errors)
    assert sorted(first for first, _ in found) == [False, True]
    lost, stopped, other = (sorted(texts) for texts in zip(*(told for _, told in found), strict=True))
    assert lost == ["error: another rank is gone\n"] * 2
    assert stopped == ["", "stopped: go on\n"]
    assert not other[0]
    assert other[1].endswith("ValueError: no\n")


def is_faulty() -> bool:
    return "FAULTY" in os.environ  # where nobody looks for what a model depends on


class Faulty(nn.Module):
    """Two layers, and between them something that nobody saw when the model was tried."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convs = nn.ModuleList([GCNConv(8, 6), GCNConv(6, 4)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        out: Tensor = self.convs[1](x - x.mean(0) if is_faulty() else x, edge_index)
        return out


def verify(data: Data, names: list[str], **options: Any) -> list[Any]:
    loader = ranks.RankLoader(data, num_parts=7, **options)
    found = []
    for name in names:
        torch.manual_seed(5)
        model = ranks.autoscale({**MODELS, "faulty": Faulty}[name](), loader)
        for batch in loader:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        gas.infer(model, loader, update_histories=False)
        before = history_rows(model)
        with pytest.MonkeyPatch.context() as patch:
            if name == "faulty" and loader.world.rank == 1:
                patch.setenv("FAULTY", "1")
            found.append(gas.verify(model, loader, nodes=10))
        assert all(torch.equal(rows, before[slot]) for slot, rows in history_rows(model).items())
        gas.detach(model)
    return found


def test_each_rank_verifies_nodes_of_its_own_and_all_get_what_they_found() -> None:
    found = run_ranks(3, verify, odd_graph(), ["GCN", "Chebyshev", "faulty"], bidirectional=True)
    assert found[0] == found[1] == found[2]
    *right, wrong = found[0]
    for each in right:
        assert each.exact, each
        assert each.training is not None
        assert each.nodes == 12
        assert each.how.startswith("their receptive field of")
    assert not wrong.exact
    assert wrong.layer == "GCNConv ('convs.1')"


def surround(data: Data, hops: int) -> list[tuple[Tensor, Data]]:
    loader = ranks.RankLoader(data, num_parts=5)
    rows = torch.tensor([2, 0]) if loader.world.rank else torch.tensor([1])
    graph, places = loader.graph_around(rows, hops)
    return [(loader.nodes[rows][places.argsort()], graph.data)]


@pytest.mark.parametrize(("graph", "hops"), [(odd_graph, 1), (undirected_graph, 2), (odd_graph, 3)])
def test_what_lies_around_a_node_is_found_on_all_ranks(graph: Callable[[], Data], hops: int) -> None:
    data = graph()
    data.number = torch.arange(data.num_nodes)
    both = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    for ((nodes, found),) in run_ranks(3, surround, data, hops):
        assert torch.equal(found.number[: nodes.numel()], nodes)
        expected = k_hop_subgraph(nodes, hops, both, num_nodes=data.num_nodes)[0]
        assert sorted(found.number.tolist()) == expected.tolist()
        inside = torch.isin(data.edge_index, expected).all(0)
        ends, wanted = found.number[found.edge_index], data.edge_index[:, inside]
        order, wanted_order = ((pair[0] * data.num_nodes + pair[1]).argsort(stable=True) for pair in (ends, wanted))
        assert torch.equal(ends[:, order], wanted[:, wanted_order])
        assert torch.equal(found.edge_weight[order], data.edge_weight[inside][wanted_order])
        assert torch.equal(found.x, data.x[found.number])


def tell(rank_has: list[int]) -> list[Tensor]:
    world = ranks.current()
    count = rank_has[world.rank]
    rows = torch.full((count, 3), float(world.rank), dtype=torch.double)
    return world.rows_of_others(torch.arange(count, dtype=torch.int32) + 10 * world.rank, rows)


def test_ranks_tell_each_other_different_numbers_of_rows() -> None:
    for rank, (numbers, rows) in enumerate(run_ranks(3, tell, [2, 0, 1])):
        others = [number for number in (0, 1, 20) if number // 10 != rank]
        assert (numbers.dtype, numbers.tolist()) == (torch.int32, others)
        assert rows.tolist() == [[float(number // 10)] * 3 for number in others]


def infer_elsewhere(data: Data, others: list[Data]) -> list[Tensor | None]:
    loader = ranks.RankLoader(data, partition=torch.arange(40) // 7)
    model = ranks.autoscale(gcn(), loader)
    gas.refresh(model, loader)
    loaders = [ranks.RankLoader(each, partition=torch.arange(40) // 7) for each in others]
    found = [each.gathered(gas.infer(model, each)) for each in (*loaders, *loaders)]
    some = torch.arange(0, loader.num_own, 3)
    return [*found, loader.gathered(gas.infer(model, loader)), gas.predict(model, loader, some), loader.nodes[some]]


def test_inference_on_other_graphs_is_exact_and_leaves_histories_alone() -> None:
    data = undirected_graph()
    others = [undirected_graph(seed=5), copy.copy(data)]
    found = run_ranks(3, infer_elsewhere, data, others)
    for got, graph in zip(found[0], [*others, *others, data], strict=False):
        assert_same(got, whole(gcn(), graph))
    for *_, predicted, nodes in found:
        assert_same(predicted, whole(gcn(), data)[nodes])


def loss_of(model: nn.Module, batch: Data) -> Tensor:
    out, size = model(batch), batch.batch_size
    return F.cross_entropy(out, batch.y[:size])


def loss_of_output(batch: Data, out: Tensor) -> Tensor:
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def train(
    data: Data, make: Callable[[], nn.Module], epochs: int, **options: Any
) -> tuple[list[list[tuple[int, ...]]], list[list[Tensor]], dict[str, Tensor]]:
    """An own loop: the batches of each step as nodes of the whole graph, gradients of each step, and weights."""
    compensate = options.pop("compensate", "none")
    loader = ranks.RankLoader(data, num_parts=6, batch_size=2, shuffle=True, **options)
    model = ranks.autoscale(make(), loader, compensate=compensate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches, gradients = [], []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            batches.append(loader.nodes[batch.n_id[: batch.batch_size]].tolist())
            gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
            optimizer.step()
    return batches, gradients, {name: value.clone() for name, value in model.state_dict().items()}


def in_one_process(
    data: Data, make: Callable[[], nn.Module], steps: list[list[list[int]]], compensate: Any
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """One process that adds up the gradients of the same batches, each with the histories as of the step before."""
    loader = gas.HaloLoader(data, num_parts=1, bidirectional=True)
    model = gas.autoscale(make(), data, compensate=compensate)
    memory = attached(model).memory
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = []

    def kept() -> list[Tensor]:
        return [history.raw for history in (*memory.histories.values(), *memory.last_gradients.values())]

    # What each rank finds in histories. Rows that it moved itself are its own, until their batch is trained.
    views: list[list[Tensor]] = [[] for _ in steps[0]]
    for step in steps:
        optimizer.zero_grad()
        for place, nodes in enumerate(step):
            for raw, rows in zip(kept(), views[place], strict=False):
                raw.copy_(rows)
            for raw in kept()[len(views[place]) :]:
                raw.zero_()
            loss_of(model, loader.batch_for(torch.tensor(nodes))).backward()  # type: ignore[no-untyped-call]
            views[place] = [raw.clone() for raw in kept()]
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.div_(len(step))
        pushed = [[rows[nodes] for rows in view] for view, nodes in zip(views, step, strict=True)]
        for view in views:
            for nodes, theirs in zip(step, pushed, strict=True):
                for rows, their_rows in zip(view, theirs, strict=True):
                    rows[nodes] = their_rows
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
    return gradients, {name: value.clone() for name, value in model.state_dict().items()}


def refresh_and_train(
    data: Data, compensate: Any
) -> tuple[list[list[tuple[int, ...]]], list[Tensor], dict[str, Tensor]]:
    """Before each step every rank refreshes its last part; the nodes of both in turn, gradients, and histories."""
    loader = ranks.RankLoader(data, num_parts=6, bidirectional=True)
    model = ranks.autoscale(gcn().double(), loader, compensate=compensate)
    assert loader.shard is not None
    batches, gradients = [], []
    for batch in loader:
        other = loader.batch_of([loader.num_parts - 1])
        gas.refresh(model, other, loss=partial(loss_of_output, other))
        model.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        batches += [loader.nodes[each.n_id[: each.batch_size]].tolist() for each in (other, batch)]
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    memory = attached(model).memory
    memory.settle()
    known = loader.shard.nodes
    kept = {**memory.histories, **{f"gradient {slot}": each for slot, each in memory.last_gradients.items()}}
    whole = {name: history.raw.new_full((data.num_nodes, history.width), torch.nan) for name, history in kept.items()}
    for name, rows in whole.items():
        rows[known] = kept[name].raw[: known.numel()]
    return batches, gradients, whole


@pytest.mark.parametrize("compensate", ["none", "gradient"])
def test_every_rank_refreshes_a_batch_of_its_own_and_all_of_them_see_its_rows(compensate: Any) -> None:
    data = undirected_graph(dtype=torch.float64)
    found = run_ranks(2, refresh_and_train, data, compensate)
    loader = gas.HaloLoader(data, num_parts=1)
    model = gas.autoscale(gcn().double(), data, compensate=compensate)
    memory = attached(model).memory

    def kept() -> dict[str, Tensor]:
        gradients = {f"gradient {slot}": each.raw for slot, each in memory.last_gradients.items()}
        return {**{slot: each.raw for slot, each in memory.histories.items()}, **gradients}

    gradients = []
    for place, passes in enumerate(zip(*(batches for batches, _, _ in found), strict=True)):
        before, after = {name: raw.clone() for name, raw in kept().items()}, []
        model.zero_grad()
        for nodes in passes:
            for name, raw in kept().items():
                raw.copy_(before.get(name, torch.zeros_like(raw)))
            batch = loader.batch_for(torch.tensor(nodes))
            if place % 2 == 0:
                gas.refresh(model, batch, loss=partial(loss_of_output, batch))
            else:
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            after.append({name: raw[nodes].clone() for name, raw in kept().items()})
        for nodes, pushed in zip(passes, after, strict=True):
            for name, raw in kept().items():
                raw[nodes] = pushed[name]
        if place % 2:
            flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
            gradients.append(flat / len(passes))
    for _, rank_gradients, rows in found:
        for mine, wanted in zip(rank_gradients, gradients, strict=True):
            assert_same(mine, wanted, 1e-10)
        for name, raw in kept().items():
            known = ~rows[name].isnan()
            assert_same(rows[name][known], raw[known], 1e-10)


@pytest.mark.parametrize(
    ("size", "compensate", "graph"),
    [
        (2, "none", undirected_graph),
        (3, "none", odd_graph),
        (2, "gradient", undirected_graph),
        (3, "momentum", undirected_graph),
        (2, "momentum", odd_graph),
    ],
)
def test_a_step_is_that_of_one_process_on_all_batches(size: int, compensate: str, graph: Callable[[], Data]) -> None:
    data = graph(dtype=torch.float64)  # type: ignore[call-arg]
    make = lambda: gcn().double()  # noqa: E731
    found = run_ranks(size, train, data, make, 3, compensate=compensate, bidirectional=compensate != "none")
    steps = [list(step) for step in zip(*(batches for batches, _, _ in found), strict=True)]
    assert len({node for batch in steps[0] for node in batch}) == sum(map(len, steps[0])), "ranks share no nodes"
    gradients, weights = in_one_process(data, make, steps, compensate)
    for _, rank_gradients, rank_weights in found:
        for ours, theirs in zip(rank_gradients, gradients, strict=True):
            for mine, wanted in zip(ours, theirs, strict=True):
                assert_same(mine, wanted, 1e-10)
        for name, wanted in weights.items():
            assert_same(rank_weights[name], wanted, 1e-10)
            assert torch.equal(rank_weights[name], found[0][2][name])


# Exact gradients #####################################################################################################


def own_loss(out: Tensor, nodes: Tensor) -> Tensor:
    """A rank's part of the sum over all nodes, times the number of ranks, since gradients become their mean."""
    return ranks.current().size * (out * torch.cos(nodes.double()).unsqueeze(1)).square().sum()


def exact_gradients(data: Data, names: list[str], storage: Any, folder: Path) -> list[tuple[Any, Rows, Rows]]:
    """The outputs of all nodes, the gradients of all weights, and the buffers after one pass in training mode."""
    loader, found = ranks.RankLoader(data, num_parts=7, batch_size=2), []
    for name in names:
        model = exact_model(name)
        given: dict[str, Any] = {"history_dir": folder / name} if storage == "disk" else {}
        ranks.autoscale(model, loader, storage=storage, **given)
        for _ in range(2):  # the second one begins with the gradients and rows of the first
            model.zero_grad()
            out = gas.exact_forward(model, loader)
            own_loss(out, loader.nodes).backward()  # type: ignore[no-untyped-call]
        gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        found.append((loader.gathered(out.detach()), gradients, dict(model.named_buffers())))
        gas.detach(model)
    return found


def exact_model(name: str) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {**MODELS, "norms": normed, "deep": deep}
    torch.manual_seed(5)
    return made[name]().double().train()


def deep() -> nn.Module:
    return Stack([SAGEConv(8, 8) for _ in range(4)])


@pytest.mark.parametrize(
    ("size", "storage", "names"), [(2, "disk", ["GCN", "norms", "deep"]), (3, "host", ["GAT", "norms"])]
)
def test_exact_gradients_are_those_of_full_batch(size: int, storage: str, names: list[str], tmp_path: Path) -> None:
    data = odd_graph(dtype=torch.float64)
    found = run_ranks(size, exact_gradients, data, names, storage, tmp_path)
    for number, name in enumerate(names):
        plain = exact_model(name)
        for _ in range(2):
            plain.zero_grad()
            out = call_whole(plain, data)
            own_loss(out, torch.arange(data.num_nodes)).backward()  # type: ignore[no-untyped-call]
        assert_same(found[0][number][0], out.detach(), 1e-10)
        for _, gradients, buffers in (each[number] for each in found):
            assert gradients.keys() == {key for key, weight in plain.named_parameters() if weight.grad is not None}
            for key, gradient in gradients.items():
                assert torch.equal(gradient, found[0][number][1][key])
                wanted = plain.get_parameter(key).grad
                assert wanted is not None
                assert_same(gradient, wanted, 1e-10)
            for key, value in plain.named_buffers():
                assert_same(buffers[key].double(), value.double(), 1e-10)


def two_rings(count: int = 12) -> Data:
    """Two rings without an edge between them, so that two ranks have a whole graph each."""
    nodes = torch.arange(count)
    ring = torch.stack([nodes, (nodes + 1) % count])
    edges = torch.cat([ring, ring + count], dim=1)
    data = Data(x=torch.randn(2 * count, 8), edge_index=torch.cat([edges, edges.flip(0)], dim=1))
    data.y = torch.arange(2 * count) % 4
    return data


def infer_nearly(data: Data, other: Data) -> Tensor | None:
    loader, there = (ranks.RankLoader(each, partition=torch.arange(24) // 12) for each in (data, other))
    torch.manual_seed(5)
    model = ranks.autoscale(MODELS["SAGE"](), loader)
    gas.refresh(model, loader)
    found: Tensor | None = there.gathered(gas.infer(model, there))
    return found


def test_a_rank_that_sees_its_training_graph_infers_with_one_that_sees_another() -> None:
    data, other = two_rings(), two_rings()
    other.x, other.edge_index = data.x, data.edge_index[:, 1:]
    torch.manual_seed(5)
    expected = whole(MODELS["SAGE"](), other)
    assert_same(run_ranks(2, infer_nearly, data, other)[0], expected)


def train_norms_in_turn(data: Data, whats: list[str]) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    return [train_norms(data, what) for what in whats]


def train_norms(data: Data, what: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One step on all nodes."""
    compensate: Any = "gradient" if what == "compensated" else "none"
    make = normed_inside if what == "penalty" else normed
    if ranks.current().size > 1:
        loader: Any = ranks.RankLoader(data, partition=torch.arange(24) // 12, bidirectional=True)
        model = ranks.autoscale(make(), loader, sync_norms=True, compensate=compensate)
    else:
        loader = gas.HaloLoader(data, 1)
        model = gas.autoscale(make(), data)
    (batch,) = loader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regularize, "ball", lambda like, radius: radius * torch.linspace(-1, 1, like.size(1)))
        with gas.LocalLipschitz(model, 0.5) if what == "penalty" else nullcontext() as penalty:
            if what == "unlabelled" and not ranks.current().is_first:
                model(batch)
                loader.world.open.answer()
                return [weight.grad for weight in model.parameters() if weight.grad is not None], model.state_dict()
            loss = loss_of(model, batch)
        loss = loss if penalty is None else loss + penalty.value()
    loss.backward()  # type: ignore[no-untyped-call]
    return [weight.grad for weight in model.parameters() if weight.grad is not None], dict(model.state_dict())


def normed_inside() -> nn.Module:
    """Norms that a layer runs inside, and so once more for the penalty."""
    torch.manual_seed(3)
    inner = [nn.Sequential(nn.Linear(width, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)) for width in (8, 6)]
    return Stack([GINConv(inner[0]), GINConv(inner[1]), GCNConv(6, 4)])


def test_norms_over_ranks_are_those_of_all_batches_together() -> None:
    data, whats = two_rings(), ["plain", "compensated", "penalty", "unlabelled"]
    found = run_ranks(2, train_norms_in_turn, data, whats)
    for number, what in enumerate(whats):
        plain = normed().train()
        if what == "penalty":
            expected, state_after = train_norms(data, what)
        else:
            learns = slice(0, 12) if what == "unlabelled" else slice(0, 24)
            out = plain(data.x, data.edge_index)[learns]
            F.cross_entropy(out, data.y[learns]).backward()  # type: ignore[no-untyped-call]
            expected = [weight.grad for weight in plain.parameters() if weight.grad is not None]
            state_after = plain.state_dict()
        for gradients, state in (each[number] for each in found):
            for got, wanted in zip(gradients, expected, strict=True):
                assert_same(got, wanted)
            for name, wanted in state_after.items():
                assert_same(state[name], wanted)


def ghosts_seen(data: Data, lag: int, compensate: Any) -> list[tuple[int, list[int]]]:
    """After each step, which step the rows of ghosts come from that the next one would pull."""
    loader = ranks.RankLoader(data, partition=torch.arange(40) % 2, bidirectional=True)
    assert loader.shard is not None
    model = ranks.autoscale(gcn(), loader, lag=lag, compensate=compensate)
    pushed, seen = [], []
    memory = attached(model).memory
    for step in range(5):
        for batch in loader:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.01)
        own = memory.histories["layers.0"].raw[: loader.num_own].clone()
        pushed.append(loader.world.gather((loader.nodes, own)))
        memory.sharing._arrive(before=step + 2 - lag)
        ghosts = memory.histories["layers.0"].raw[loader.num_own : loader.shard.nodes.numel()]
        known = []
        for number, everyone in enumerate(pushed):
            whole = torch.zeros(data.num_nodes, ghosts.size(1))
            for nodes, rows in everyone:
                whole[nodes] = rows
            if torch.equal(whole[loader.shard.nodes[loader.num_own :]], ghosts):
                known.append(number)
        seen.append((step, known))
    return seen


@pytest.mark.parametrize(("lag", "compensate"), [(0, "none"), (1, "gradient")])
def test_a_pull_sees_the_pushes_of_the_step_before_or_with_a_lag_of_the_one_before_that(
    lag: int, compensate: str
) -> None:
    for seen in run_ranks(2, ghosts_seen, undirected_graph(), lag, compensate):
        assert seen == [(step, [step - lag] if step >= lag else []) for step in range(5)]


def train_some(data: Data, how: Any) -> tuple[list[bool], dict[str, Tensor]]:
    """A loop that leaves out batches without training nodes."""
    loader = ranks.RankLoader(data, num_parts=6, bidirectional=True)
    model = ranks.autoscale(gcn(), loader, compensate="gradient" if how == "gradient" else "none")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    stepped = []
    for _ in range(3):
        for batch in loader:
            out, mask = model(batch), batch.train_mask[: batch.batch_size]
            stepped.append(bool(mask.any()))
            if not mask.any():
                continue
            optimizer.zero_grad()
            F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask]).backward()  # type: ignore[no-untyped-call]
            if how == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    gas.infer(model, loader)
    return stepped, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_loop_may_leave_out_batches_without_labels() -> None:
    data = undirected_graph()
    data.train_mask = torch.arange(40) < 8
    run_ranks(2, train_some, data, "gradient")
    found = run_ranks(2, train_some, data, "plain")
    assert any(one != other for one, other in zip(*(stepped for stepped, _ in found), strict=True)), "one rank skips"
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    initial = gcn().state_dict()
    assert any(not torch.equal(found[0][1][name], initial[name]) for name in initial)
    for error in outcomes(2, train_some, data, "clipping"):
        assert "all ranks must make the same steps" in str(error)


def do_more(data: Data) -> list[str]:
    """What is wrong after each thing that all ranks do beside steps, though only one of them has made the last step."""
    another, labels = undirected_graph(seed=5), torch.arange(40) // 10
    loader, other = (ranks.RankLoader(each, partition=labels) for each in (data, another))
    world, wrong = loader.world, []

    def step(models: list[nn.Module], batch: Data, *, learns: bool) -> None:
        """A step on the sum of what the models give."""
        out = torch.stack([model(batch) for model in models]).sum(0)
        if learns:
            optimizer.zero_grad()
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def is_exact(model: nn.Module, own: Tensor, where: Any, graph: Data) -> bool:
        every, plain = where.gathered(own), gcn()
        plain.load_state_dict(model.state_dict())
        return bool(world.broadcast(every is None or torch.allclose(every, whole(plain, graph), atol=1e-5)))

    def predicted(model: nn.Module) -> Tensor:
        gas.refresh(model, loader)
        found: Tensor = gas.predict(model.eval(), loader, torch.arange(loader.num_own))
        model.train()
        return found

    work: dict[str, Callable[[nn.Module], bool]] = {
        "infer": lambda model: is_exact(model, gas.infer(model, loader), loader, data),
        "infer elsewhere": lambda model: is_exact(model, gas.infer(model, other), other, another),
        "refresh": lambda model: is_exact(model, predicted(model), loader, data),
        "verify": lambda model: gas.verify(model, loader, nodes=4).exact,
        "gather": lambda model: world.gather(world.rank) == [0, 1],
        "exact gradients": lambda model: gas.exact_forward(model, loader).isfinite().all().item() is True,
        "models in turn": lambda model: True,
        "models added up": lambda model: True,
        "detach": lambda model: gas.detach(model) is model,
    }
    for name, does in work.items():
        models = [ranks.autoscale(gcn(), loader) for _ in range(2 if name.startswith("models") else 1)]
        optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.5)
        for turn, batch in enumerate(loader):
            for each in [[model] for model in models] if name == "models in turn" else [models]:
                step(each, batch, learns=turn % 2 == world.rank)
            if not does(models[0]):
                wrong.append(f"{name}, batch {turn}")
            if name == "detach":
                break
        flat = torch.cat([weight.detach().flatten() for model in models for weight in model.parameters()])
        if not all(torch.equal(flat, each) for each in world.gather(flat)):
            wrong.append(f"{name}: weights differ")
    return wrong


def test_a_step_that_one_rank_leaves_out_is_made_before_all_do_something_else() -> None:
    assert run_ranks(2, do_more, undirected_graph()) == [[], []]


def accumulate(data: Data) -> list[list[Tensor]]:
    loader = ranks.RankLoader(data, num_parts=4)
    model, batch = ranks.autoscale(gcn(), loader), next(iter(loader))
    found = []
    for passes in (3, 1, 2):  # after three, histories do not change any more
        model.zero_grad()
        for _ in range(passes):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        found.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for each in loader:
        model(each)  # without labels on any rank
    found.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    return found


def test_gradients_of_several_backward_passes_add_up_and_steps_without_labels_leave_them_alone() -> None:
    for _, once, twice, after in run_ranks(2, accumulate, undirected_graph()):
        for one, two, still in zip(once, twice, after, strict=True):
            assert_same(two, 2 * one)
            assert torch.equal(two, still)


def test_same_seed_same_bits_and_one_rank_is_no_torchrun() -> None:
    data = undirected_graph()
    first, second = (run_ranks(2, train, data, normed, 2, seed=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])
        assert all(torch.equal(one[2][name], first[0][2][name]) for name in one[2]), "averages of norms are shared too"
    alone = run_ranks(1, train, data, normed, 2, seed=4)[0]
    loader = gas.HaloLoader(data, num_parts=6, batch_size=2, shuffle=True, seed=4)
    model = gas.autoscale(normed(), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert all(torch.equal(alone[2][name], value) for name, value in model.state_dict().items())


def attach_again(data: Data) -> bool:
    loader = ranks.RankLoader(data, num_parts=4)
    plain, found = gcn(), []
    for _ in range(2):
        model = ranks.autoscale(plain, loader)
        for batch in loader:
            model.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        found.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        gas.detach(model)
    assert not any(weight._post_accumulate_grad_hooks for weight in plain.parameters())
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_detached_model_can_be_attached_again() -> None:
    assert run_ranks(2, attach_again, undirected_graph()) == [True, True]


def sent(data: Data, dtype: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes sent in an epoch, bytes of all rows that are ghosts elsewhere, and whether ghosts are what owners have."""
    loader = ranks.RankLoader(data, num_parts=6, batch_size=2, shuffle=True)
    model = ranks.autoscale(gcn(), loader, dtype=dtype)
    assert loader.shard is not None
    before = loader.world.sent_bytes
    for batch in loader:
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    attached(model).memory.settle()
    moved, rows = loader.world.sent_bytes - before, history_rows(model)
    everyone = loader.world.gather(({name: value[: loader.num_own] for name, value in rows.items()}, loader.nodes))
    right = 1
    for name, value in rows.items():
        place = torch.full((data.num_nodes, 1), -1)
        known = torch.zeros(data.num_nodes, value.size(1))
        for theirs, nodes in everyone:
            known[nodes], place[nodes] = theirs[name].float(), 0
        ghosts = slice(loader.num_own, loader.shard.nodes.numel())
        right &= int(torch.equal(value[ghosts].float(), known[loader.shard.nodes[ghosts]]))
    raw = sum(
        each.codec.raw_width * each.codec.raw_dtype.itemsize for each in attached(model).memory.histories.values()
    )
    return moved, loader.shard.sent.numel() * raw, right


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_only_rows_that_are_needed_elsewhere_travel_once_in_an_epoch_as_histories_keep_them(dtype: Any) -> None:
    for moved, needed, right in run_ranks(3, sent, undirected_graph(), dtype):
        assert moved == needed > 0
        assert right


class Share(MessagePassing):  # type: ignore[misc]
    """Weighs an edge by its share of all edges' weights, which no rank knows."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, weight=edge_weight / edge_weight.mean())
        return out

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.view(-1, 1)


def misuses() -> list[Exception | None]:
    errors: list[Exception | None] = []
    for what in MISUSES:
        try:
            misuse(what)
            errors.append(None)
        except gas.InputError as error:
            errors.append(error)
    return errors


def misuse(what: str) -> None:
    data = undirected_graph()
    if what == "options":
        ranks.RankLoader(data, num_parts=4 + ranks.current().rank)
    if what == "data":
        ranks.RankLoader(undirected_graph(seed=ranks.current().rank), num_parts=4)
    if what == "targets":
        data.y[3] += ranks.current().rank
        ranks.RankLoader(data, num_parts=4)
    if what == "ranks":
        ranks.RankLoader(data, num_parts=1)
    if what == "batches":
        ranks.RankLoader(data, num_parts=4, batch_size=5)
    if what == "links":
        linked = copy.copy(data)
        linked.edge_label_index = data.edge_index
        ranks.RankLoader(linked, num_parts=4)
    loader = ranks.RankLoader(data, num_parts=4)
    if what in ("share", "share in inference"):
        shares = ranks.autoscale(Stack([Share(), Share()], ("edge_weight",)), loader)
        if what == "share":
            for batch in loader:
                shares(batch)
        gas.infer(shares, loader)
    if what == "table":
        ranks.autoscale(nn.Sequential(nn.Linear(8, 40), nn.Embedding(40, 8)), loader)
    if what == "model":
        ranks.autoscale(GCNConv(8, 4 + ranks.current().rank), loader)
    if what == "sync_norms":
        ranks.autoscale(normed(), loader, sync_norms=ranks.current().is_first)
    if what == "lag":
        ranks.autoscale(gcn(), loader, lag=2)
    if what == "momentum":
        ranks.autoscale(gcn(), ranks.RankLoader(odd_graph(), num_parts=4), compensate="momentum")
    model = ranks.autoscale(gcn(), loader)
    second = list(loader)[1]
    if what == "weights":
        head = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()])
        loss_of(model, next(iter(loader))).backward()  # type: ignore[no-untyped-call]
        head.step()
    if what == "order":
        model(second)
    if what == "ghost":
        gas.refresh(model, loader)
        gas.predict(model, loader, torch.tensor([loader.num_own]))
    calls: dict[str, Callable[..., Any]] = {
        "grow": gas.grow,
        "diagnose": partial(gas.diagnose, what="lipschitz"),
    }
    if what == "capture":
        gas.capture(model, lambda batch: None, torch.optim.SGD(model.parameters()))
    calls[what](model, loader, *([data] if what == "grow" else []))


MISUSES = {
    "options": "all ranks must have the same num_parts",
    "data": "all ranks must have the same graph",
    "targets": "all ranks must have the same targets and masks",
    "model": "all ranks must have the same model",
    "sync_norms": "all ranks must have the same sync_norms",
    "ranks": "each rank needs a part of its own",
    "batches": "batch_size must be at most",
    "links": "has targets of nodes",
    "table": "no rows of its own for all nodes, since ranks number nodes anew, but got '1.weight'",
    "lag": "lag must be an integer of at least 0 and below 2",
    "momentum": "ranks compensate with a bidirectional loader",
    "share": "'layers.0' must make the same of an edge on all ranks",
    "share in inference": "'layers.0' must make the same of an edge on all ranks",
    "weights": "but got 2 others that an optimizer steps",
    "order": "every batch of its loader in turn",
    "ghost": "batches of its own nodes",
    "grow": "grow needs the whole graph",
    "capture": "capture needs the whole graph",
    "diagnose": "diagnose 'lipschitz' needs the whole graph",
}


def test_what_ranks_cannot_do_is_refused_on_each_of_them() -> None:
    for errors in run_ranks(2, misuses):
        for (what, message), error in zip(MISUSES.items(), errors, strict=True):
            assert isinstance(error, gas.InputError), (what, error)
            assert message in str(error), what
