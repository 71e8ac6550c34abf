"""Several ranks compute of a heterogeneous graph what one process does, over gloo."""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.calling import unpack_batch
from gnnautoscale.forward import TypedPlan
from support.ranks import run_ranks
from support.typed import MODELS, typed_graph

Rows = dict[str, Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
# Rows of two types, a table by number, recorded edges, and layers that take all types at once.
CHOSEN = ("residual", "looping", "weighted", "GCN", "HGT", "to_hetero mean", "SAGE max")


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
    model = MODELS[name]().double()
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


@pytest.mark.parametrize("size", [2, 3])
def test_inference_and_predictions_are_those_of_one_process(size: int) -> None:
    data = graph()
    found = run_ranks(size, infer, data, CHOSEN)
    for number, name in enumerate(CHOSEN):
        expected = whole(made(name), data)
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


def train(data: HeteroData, name: str, epochs: int, **options: Any) -> tuple[list[Any], list[list[Tensor]], Rows]:
    """An own loop: the nodes of each batch, the gradients of each step, and the weights at the end."""
    loader = ranks.RankLoader(data, partition=parts(data), batch_size=2, shuffle=True, **options)
    model = ranks.autoscale(made(name), loader).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches, gradients = [], []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            batches.append(own_nodes(batch))
            gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
            optimizer.step()
    return batches, gradients, {name: value.clone() for name, value in model.state_dict().items()}


def in_one_process(data: HeteroData, name: str, steps: list[list[Any]]) -> tuple[list[list[Tensor]], Rows]:
    """One process that adds up the gradients of the same batches, each with the histories as of the step before."""
    loader = gas.HaloLoader(data, num_parts=1)
    model = gas.autoscale(made(name), data).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []

    def kept() -> list[tuple[str, Tensor]]:
        kinds = attached(model).memory.kinds
        return [(kind, history.raw) for kind in kinds for history in kinds[kind].histories.values()]

    for step in steps:
        optimizer.zero_grad()
        before, after = [raw.clone() for _, raw in kept()], []
        for nodes in step:
            for (_, raw), rows in zip(kept(), before, strict=False):
                raw.copy_(rows)
            if not before:
                for _, raw in kept():
                    raw.zero_()
            batch = loader.batch_for({kind: torch.tensor(each, dtype=torch.long) for kind, each in nodes.items()})
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            after.append([raw[nodes[kind]].clone() for kind, raw in kept()])
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.div_(len(step))
        for nodes, pushed in zip(step, after, strict=True):
            for (kind, raw), rows in zip(kept(), pushed, strict=True):
                raw[nodes[kind]] = rows
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
    return gradients, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("size", "name"), [(2, "GCN"), (3, "looping"), (2, "HGT")])
def test_a_step_is_that_of_one_process_on_all_batches(size: int, name: str) -> None:
    data = graph()
    found = run_ranks(size, train, data, name, 3)
    steps = [list(step) for step in zip(*(batches for batches, _, _ in found), strict=True)]
    assert any(not nodes["venue"] for nodes in steps[0]), "a rank without venues"
    gradients, weights = in_one_process(data, name, steps)
    for _, rank_gradients, rank_weights in found:
        for ours, theirs in zip(rank_gradients, gradients, strict=True):
            for mine, wanted in zip(ours, theirs, strict=True):
                assert_same(mine, wanted)
        for key, wanted in weights.items():
            assert_same(rank_weights[key], wanted)
            assert torch.equal(rank_weights[key], found[0][2][key])
