"""Several ranks compute of a heterogeneous graph what one process does, over gloo."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.calling import unpack_batch
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import TypedPlan
from gnnautoscale.graph import TypedGraph
from gnnautoscale.ranks.assignment import assign
from gnnautoscale.ranks.cutting import cut
from gnnautoscale.ranks.files import read_shard
from gnnautoscale.ranks.shard import Layout
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import World
from support.ranks import run_ranks
from support.typed import ADDING, MODELS, typed_graph

Rows = dict[str, Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


def graph() -> HeteroData:
    """A graph whose venues, without incoming edges, are all in the first part, and whose terms are in two."""
    return typed_graph(3)


def parts(data: HeteroData) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = {kind: torch.randint(6, (data[kind].num_nodes,), generator=generator) for kind in data.node_types}
    return labels | {"venue": torch.zeros(5, dtype=torch.long), "term": torch.arange(12) % 2}


def made(name: str) -> nn.Module:
    """A model with all its weights."""
    torch.manual_seed(1)
    model = {**MODELS, **ADDING}[name]().double()
    with torch.no_grad():
        whole(model.eval(), graph())
    return model


def whole(model: nn.Module, data: HeteroData) -> Any:
    """What a plain model computes of a whole graph."""
    data = copy.copy(data)
    for kind in data.node_types:
        data[kind].n_id = torch.arange(data[kind].num_nodes)
    args, kwargs = unpack_batch(inspect.signature(model.forward), "the model", (data,), {})
    return model(*args, **kwargs)


def by_type(model: nn.Module, out: Any) -> Rows:
    if isinstance(out, dict):
        return out
    return dict(zip(cast(TypedPlan, attached(model).plan).output_kinds, tensors_in(out), strict=True))


def assert_same(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape
    assert float((got - want).detach().abs().max()) <= tolerance * float(want.detach().abs().max())


# Inference ###########################################################################################################


def infer(data: HeteroData, names: tuple[str, ...]) -> list[tuple[Rows | None, list[Rows]]]:
    loader = ranks.RankLoader(data, partition=parts(data))
    found = []
    for name in names:
        model = ranks.autoscale(made(name), loader)
        every = loader.gathered(by_type(model, gas.infer(model, loader, update_histories=False)))
        gas.refresh(model, loader)
        some = {kind: torch.arange(0, count, 3) for kind, count in loader.own_counts.items()}
        predicted = by_type(model, gas.predict(model, loader, some))
        nodes = {kind: loader.nodes[kind][some[kind]] for kind in predicted}
        found.append((every, [predicted, nodes]))
        gas.detach(model)
    return found


# Rows of two types, a table by number, recorded edges, and layers that take all types at once.
@pytest.mark.parametrize(("size", "names"), [(2, ("residual", "HGT")), (3, ("looping", "weighted", "GCN"))])
def test_inference_and_predictions_are_those_of_one_process(size: int, names: tuple[str, ...]) -> None:
    data = graph()
    wanted = [whole(made(name), data) for name in names]  # first, so that ranks inherit the code that PyG writes for it
    found = run_ranks(size, infer, data, names)
    for number, expected in enumerate(wanted):
        (every, _), *others = (each[number] for each in found)
        assert every is not None
        for kind, rows in every.items():
            assert_same(rows, expected[kind] if isinstance(expected, dict) else expected)
        assert all(other is None for other, _ in others)
        for _, (predicted, nodes) in (each[number] for each in found):
            for kind, rows in predicted.items():
                want = expected[kind] if isinstance(expected, dict) else expected
                assert_same(rows, want[nodes[kind]])


# Steps ###############################################################################################################


def loss_of(model: nn.Module, batch: HeteroData) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for kind, rows in by_type(model, model(batch)).items():
        numbers = batch[kind].n_id[: batch[kind].batch_size]
        total = total + (rows * torch.cos(numbers.double()).unsqueeze(1)).sum() / 10
    return total


def own_nodes(batch: HeteroData) -> dict[str, list[int]]:
    return {kind: batch[kind].n_id[: batch[kind].batch_size].tolist() for kind in batch.node_types}


def train(
    data: HeteroData, name: str, epochs: int, refresh: bool = False, **options: Any
) -> tuple[list[Any], list[list[Tensor]], Rows]:
    """An own loop: the nodes of each batch, the gradients of each step, and the weights at the end.

    Before each step every rank may refresh its last part.
    """
    loader = ranks.RankLoader(data, partition=parts(data), batch_size=2, shuffle=True, **options)
    model = ranks.autoscale(made(name), loader).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches, gradients = [], []
    for _ in range(epochs):
        for batch in loader:
            if refresh:
                other = loader.batch_of([loader.shard.num_parts - 1])
                gas.refresh(model, other)
                batches.append(own_nodes(other))
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            batches.append(own_nodes(batch))
            gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
            optimizer.step()
    return batches, gradients, {name: value.clone() for name, value in model.state_dict().items()}


def in_one_process(
    data: HeteroData, name: str, steps: list[list[Any]], refresh: bool = False
) -> tuple[list[list[Tensor]], Rows]:
    """One process that adds up the gradients of the same batches, each with the histories as of the step before.

    Every other one may be refreshed, and no step.
    """
    loader = gas.HaloLoader(data, num_parts=1)
    model = gas.autoscale(made(name), data).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []

    def kept() -> list[tuple[str, Tensor]]:
        kinds = attached(model).memory.kinds.items()
        return [(kind, history.raw) for kind, each in kinds for history in each.histories.values()]

    for place, step in enumerate(steps):
        no_step = refresh and place % 2 == 0
        optimizer.zero_grad()
        before, after = [raw.clone() for _, raw in kept()], []
        for nodes in step:
            for (_, raw), rows in zip(kept(), before, strict=False):
                raw.copy_(rows)
            for _, raw in kept()[len(before) :]:
                raw.zero_()
            batch = loader.batch_for({kind: torch.tensor(each, dtype=torch.long) for kind, each in nodes.items()})
            if no_step:
                gas.refresh(model, batch)
            else:
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            after.append([raw[nodes[kind]].clone() for kind, raw in kept()])
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.div_(len(step))
        for nodes, pushed in zip(step, after, strict=True):
            for (kind, raw), rows in zip(kept(), pushed, strict=True):
                raw[nodes[kind]] = rows
        if no_step:
            continue
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
    return gradients, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("size", "name", "refresh"), [(2, "weighted", True), (3, "looping", False)])
def test_a_step_is_that_of_one_process_on_all_batches(size: int, name: str, refresh: bool) -> None:
    data = graph()
    found = run_ranks(size, train, data, name, 3, refresh)
    steps = [list(step) for step in zip(*(batches for batches, _, _ in found), strict=True)]
    assert any(not nodes["venue"] for nodes in steps[0]), "a rank without venues"
    gradients, weights = in_one_process(data, name, steps, refresh)
    for _, rank_gradients, rank_weights in found:
        for ours, theirs in zip(rank_gradients, gradients, strict=True):
            for mine, wanted in zip(ours, theirs, strict=True):
                assert_same(mine, wanted)
        for key, wanted in weights.items():
            assert_same(rank_weights[key], wanted)
            assert torch.equal(rank_weights[key], found[0][2][key])


def gradients_at_rest(data: HeteroData, name: str) -> list[list[Tensor]]:
    """The gradients of all batches together, in each of several sweeps with fixed weights."""
    loader = ranks.RankLoader(data, partition=parts(data), batch_size=2, bidirectional=True)
    model = ranks.autoscale(made(name), loader, compensate="gradient")
    sweeps = []
    for _ in range(4):
        model.zero_grad()
        for batch in loader:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        sweeps.append([zeros_if_none(weight) * loader.world.size for weight in model.parameters()])
    return sweeps


def zeros_if_none(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()


@pytest.mark.parametrize(("size", "name"), [(2, "looping"), (3, "GCN")])
def test_compensated_gradients_of_all_ranks_are_those_of_full_batch_once_nothing_is_stale(size: int, name: str) -> None:
    data, model = graph(), made(name)
    rows = whole(model, data)
    (rows * torch.cos(torch.arange(40.0).double()).unsqueeze(1)).sum().div(10).backward()
    wanted = [zeros_if_none(weight) for weight in model.parameters()]
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    for sweeps in run_ranks(size, gradients_at_rest, data, name):
        errors = [
            max(float((one - other).abs().max()) for one, other in zip(gradients, wanted, strict=True)) / largest
            for gradients in sweeps
        ]
        assert errors[-1] <= 1e-10 < 1e-4 < errors[0]


def exact_gradients(data: HeteroData, names: tuple[str, ...]) -> list[list[Tensor]]:
    """The gradients of a sum over all nodes of all ranks; they become their mean."""
    loader, found = ranks.RankLoader(data, partition=parts(data), batch_size=2), []
    for name in names:
        model = ranks.autoscale(made(name), loader)
        total = torch.zeros((), dtype=torch.double)
        for kind, rows in by_type(model, gas.exact_forward(model, loader)).items():
            total = total + (rows * torch.cos(loader.nodes[kind].double()).unsqueeze(1)).square().sum()
        (total * loader.world.size).backward()  # type: ignore[no-untyped-call]
        found.append([zeros_if_none(weight) for weight in model.parameters()])
        gas.detach(model)
    return found


def test_exact_gradients_are_those_of_full_batch() -> None:
    data, names = graph(), ("residual", "looping", "weighted")
    found = run_ranks(3, exact_gradients, data, names)
    for number, name in enumerate(names):
        model = made(name)
        out, total = whole(model, data), torch.zeros((), dtype=torch.double)
        for rows in out.values() if isinstance(out, dict) else [out]:
            total = total + (rows * torch.cos(torch.arange(rows.size(0)).double()).unsqueeze(1)).square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        for gradients in (each[number] for each in found):
            for mine, weight in zip(gradients, model.parameters(), strict=True):
                assert_same(mine, zeros_if_none(weight))


def test_same_seed_same_bits_and_one_rank_is_no_torchrun() -> None:
    data = graph()
    first, second = (run_ranks(2, train, data, "weighted", 2, seed=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[2][key], other[2][key]) for key in one[2])
    (alone,) = run_ranks(1, train, data, "weighted", 2, seed=4)
    torch.manual_seed(1)
    loader = gas.HaloLoader(data, partition=parts(data), batch_size=2, shuffle=True, seed=4)
    model = gas.autoscale(made("weighted"), data).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert all(torch.equal(alone[2][key], value) for key, value in model.state_dict().items())


def sent(data: HeteroData) -> tuple[int, int, list[int], bool]:
    """Bytes sent in an epoch, the least possible, messages in each step, and whether ghosts are what owners have."""
    loader = ranks.RankLoader(data, partition=parts(data), batch_size=2, shuffle=True)
    model = ranks.autoscale(made("looping"), loader, dtype=torch.int8)
    steps: list[int] = []
    memory, before = attached(model).memory, loader.world.sent_bytes
    exchange = World.exchange

    def counted(world: World, *args: Any) -> Any:
        steps[-1] += 1
        return exchange(world, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "exchange", counted)
        for batch in loader:
            steps.append(0)
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        memory.settle()
    moved, least, right = loader.world.sent_bytes - before, 0, True
    for kind, shard in loader.shard.kinds.items():
        for history in memory.kinds[kind].histories.values():
            least += shard.sent.numel() * history.codec.raw_width * history.codec.raw_dtype.itemsize
            every = loader.world.broadcast(loader.gathered({kind: history.raw[: shard.num_own].clone()}))[kind]
            ghosts = slice(shard.num_own, shard.nodes.numel())
            right &= torch.equal(history.raw[ghosts], every[shard.nodes[ghosts]])
    return moved, least, steps, right


def test_the_rows_of_all_types_travel_in_one_message_a_step_and_only_those_that_are_needed() -> None:
    for moved, least, steps, right in run_ranks(3, sent, graph()):
        assert moved == least > 0
        assert set(steps) == {1}
        assert right


# Diagnosis and verification ##########################################################################################


def stale_rows(data: HeteroData, name: str) -> Any:
    """What a diagnosis finds after the weights have moved, of rows that were written before."""
    loader: Any
    model = made(name)
    if ranks.current().size > 1:
        loader = ranks.RankLoader(data, partition=parts(data))
        ranks.autoscale(model, loader)
    else:
        loader = gas.HaloLoader(data, partition=parts(data))
        gas.autoscale(model, data)
    gas.refresh(model, loader)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    return gas.diagnose(model, loader, ages=loader.parts)["staleness"]["layers"]


def test_staleness_is_that_of_all_nodes() -> None:
    data = graph()
    alone = stale_rows(data, "residual")
    for found in run_ranks(3, stale_rows, data, "residual"):
        for mine, wanted in zip(found, alone, strict=True):
            assert mine["type"] == wanted["type"]
            for what in ("staleness", "closeness", "history"):
                assert mine[what] == (wanted[what] and pytest.approx(wanted[what], rel=1e-9)), what
            assert sum(group["rows"] for group in mine["by_age"]) == sum(group["rows"] for group in wanted["by_age"])


def verify(data: HeteroData, names: tuple[str, ...], labels: dict[str, Tensor]) -> list[gas.Verification]:
    loader = ranks.RankLoader(data, partition=labels)
    found = []
    for name in names:
        model = ranks.autoscale(made(name), loader)
        found.append(gas.verify(model, loader, nodes=10))
        assert all(not rows.any() for rows in (each.raw for each in attached(model).memory.histories.values()))
        gas.detach(model)
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_each_rank_verifies_nodes_of_its_own_and_all_get_what_they_found(apart: bool) -> None:
    data = graph()
    one_type_each = {kind: torch.full((data[kind].num_nodes,), int(kind == "paper")) for kind in data.node_types}
    names = ("looping",) if apart else ("residual", "HGT")
    found = run_ranks(2, verify, data, names, one_type_each if apart else parts(data))
    assert found[0] == found[1]
    for each in found[0]:
        assert each.exact, each
        assert each.training is not None
        assert each.nodes == 10
        assert each.how.startswith("their receptive field of")


# Shards ##############################################################################################################


def shards_of(data: HeteroData, size: int) -> list[TypedShard]:
    typed = TypedGraph.of(data)
    labels = torch.cat([parts(data)[kind] for kind in typed.counts])
    layout = Layout(labels, torch.arange(6) % size, size)
    return [cast(TypedShard, cut(typed, layout, rank, bidirectional=False, whole={})) for rank in range(size)]


def test_a_shard_has_the_edges_that_layers_look_at() -> None:
    data = graph()
    data["author"].ranking = torch.ones(20)  # no rows, whatever number of authors a rank has
    for shard in shards_of(data, 2):
        made = TypedGraph(shard.data)
        known = {kind: each.nodes for kind, each in shard.kinds.items()}
        assert shard.num_own + sum(each.num_ghosts for each in shard.kinds.values()) == sum(map(len, known.values()))
        assert "ranking" not in made.rows["author"]
        for (source, relation, target), edges in data.edge_items():
            found = shard.data[source, relation, target].edge_index
            own = known[target][: shard.kinds[target].num_own]
            into = torch.isin(edges.edge_index[1], own)
            if source == target:
                into |= torch.isin(edges.edge_index, known[target]).any(0)
            assert found.size(1) == int(into.sum())
            into_own = found[:, found[1] < own.numel()]
            ends = torch.stack([known[source][into_own[0]], known[target][into_own[1]]])
            wanted = edges.edge_index[:, torch.isin(edges.edge_index[1], own)]
            assert torch.equal(ends, wanted), "stand-ins are no source of an edge into own nodes"


def test_shards_in_files_are_those_in_memory(tmp_path: Path) -> None:
    data = graph()
    data.answer, data["paper"].kind = 42, "odd"
    manifest = ranks.write_shards(tmp_path / "shards", data, parts(data), 2)
    assert sum(each["own"] for each in manifest["shards"]) == data.num_nodes
    typed = TypedGraph.of(data)
    labels = torch.cat([parts(data)[kind] for kind in typed.counts])
    layout = Layout(labels, assign(typed.edge_index, labels, 2), 2)
    for rank in range(2):
        one = cut(typed, layout, rank, bidirectional=False, whole={})
        other = read_shard(tmp_path / "shards", rank, 2)
        assert other.data.answer == 42
        assert other.data["paper"].kind == "odd"
        for before, after in zip(one.data.stores, other.data.stores, strict=True):
            assert set(before) == set(after)
            for name, value in before.items():
                assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]


# Misuse ##############################################################################################################


class Share(pyg.MessagePassing):  # type: ignore[misc]
    """Weighs a citation by its share of all citations' weights, which no rank knows."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, weight=edge_weight / edge_weight.mean())
        return out

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.view(-1, 1)


class Shares(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Share(), Share()])

    def forward(self, x_dict: Rows, edge_index_dict: Any, edge_weight_dict: Any) -> Tensor:
        x, cites = x_dict["paper"], ("paper", "cites", "paper")
        for layer in self.layers:
            x = layer(x, edge_index_dict[cites], edge_weight_dict[cites])
        return x


def refusals(work: Callable[[str], None], names: list[str]) -> list[Exception | None]:
    """How a rank is refused each of several things in turn."""
    errors: list[Exception | None] = []
    for name in names:
        try:
            work(name)
            errors.append(None)
        except gas.InputError as error:
            errors.append(error)
    return errors


def add_up(name: str) -> None:
    data = graph()
    loader = ranks.RankLoader(data, partition=parts(data))
    model = ranks.autoscale(made(name), loader)
    if name == "averages":
        model(next(iter(loader)))
    gas.infer(model, loader)


def test_models_that_add_up_rows_of_all_nodes_are_refused() -> None:
    for errors in run_ranks(2, refusals, add_up, list(ADDING)):
        for name, error in zip(ADDING, errors, strict=True):
            assert isinstance(error, UnsupportedModelError), (name, error)
            assert "models that add up rows of all nodes train in one process" in str(error), name


def chain() -> ranks.RankLoader:
    """Papers that cite those before and behind them, so that ranks have different citations."""
    data, papers = HeteroData(), torch.arange(40)
    data["paper"].x = torch.ones(40, 2)
    before = torch.stack([papers[1:], papers[:-1]])
    data["paper", "cites", "paper"].edge_index = torch.cat([before, before.flip(0)], dim=1)
    data["paper", "cites", "paper"].edge_weight = before.amax(0).repeat(2).float()
    return ranks.RankLoader(data, partition={"paper": papers // 10})


def misuse(what: str) -> None:
    data = graph()
    if what == "links":
        data["author", "writes", "paper"].edge_label_index = torch.zeros(2, 1, dtype=torch.long)
    loader = ranks.RankLoader(data, partition=parts(data))
    compensate: Any = "gradient" if what == "compensate" else "none"
    model = ranks.autoscale(made("SAGE sum"), loader, compensate=compensate)
    if what == "share":
        loader = chain()
        gas.infer(ranks.autoscale(Shares(), loader), loader)
    if what == "order":
        model(list(loader)[1])
    if what == "ghost":
        gas.refresh(model, loader)
        gas.predict(model, loader, {"paper": torch.tensor([loader.own_counts["paper"]])})
    if what == "rows":
        loader.gathered(gas.infer(model, loader))
    calls: dict[str, Callable[..., Any]] = {"grow": gas.grow}
    calls[what](model, loader, *([data] if what == "grow" else []))


MISUSES = {
    "links": "something of nodes",
    "compensate": "a bidirectional loader",
    "share": "'layers.0' must make the same of an edge on all ranks",
    "order": "every batch of its loader in turn",
    "ghost": "batches of its own nodes",
    "rows": "a dictionary by type (author, paper, term, venue)",
    "grow": "grow needs the whole graph",
}


def test_what_ranks_cannot_do_is_refused_on_each_of_them() -> None:
    for errors in run_ranks(2, refusals, misuse, list(MISUSES)):
        for (what, message), error in zip(MISUSES.items(), errors, strict=True):
            assert isinstance(error, gas.InputError), (what, error)
            assert message in str(error), what
