"""Policies at slots, on a path of four nodes whose rows are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import scatter  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack, assert_same, history_rows, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.attach.inference import plan_of
from gnnautoscale.forward.edges import ActiveLayer
from gnnautoscale.forward.exchange import (
    ExchangePolicy,
    HistoryStore,
    PlanOnly,
    RowStore,
    StepExchange,
    StoreExchange,
    run_pass,
)
from gnnautoscale.forward.observe import LayerRun, Observer
from gnnautoscale.forward.record import Arguments
from gnnautoscale.forward.session import Session
from gnnautoscale.forward.sweep import SweepExchange


class Sum(MessagePassing):  # type: ignore[misc]
    """Adds up a node's neighbours."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.scale * self.propagate(edge_index, x=x)
        return out


class Sums(Stack):
    """Layers without an activation in between."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def path() -> Data:
    """0 - 1 - 2 - 3, with the node's number plus 1 as its feature; parts are {0, 1} and {2, 3}."""
    pairs = torch.tensor([[0, 1, 2], [1, 2, 3]])
    return Data(x=torch.tensor([[1.0], [2.0], [3.0], [4.0]]), edge_index=torch.cat([pairs, pairs.flip(0)], dim=1))


# One layer gives 2, 4, 6, 3; two layers give 4, 8, 7, 6.
FIRST = [2.0, 4.0, 6.0, 3.0]
SECOND = [4.0, 8.0, 7.0, 6.0]


def scaled() -> tuple[Sums, gas.HaloLoader]:
    data = path()
    loader = gas.HaloLoader(data, partition=torch.tensor([0, 0, 1, 1]))
    return gas.autoscale(Sums([Sum(), Sum()]), data), loader


def test_a_step_pulls_what_earlier_steps_pushed() -> None:
    model, loader = scaled()
    first, second = loader
    assert model(first).flatten().tolist() == [4.0, 2.0]  # node 2 was not pushed yet and counts as zero
    assert model(second).flatten().tolist() == SECOND[2:]
    assert model(first).flatten().tolist() == SECOND[:2]
    assert history_rows(model)["layers.0"].flatten().tolist() == FIRST


def test_pulled_rows_are_constants() -> None:
    model, loader = scaled()
    first, second = loader
    model(second)
    total: Tensor = model(first).sum()
    total.backward()  # type: ignore[no-untyped-call]
    # Node 0 reads 4, node 1 reads 2 and the constant 6; the first layer's scale reaches only what the batch computed.
    assert model.layers[1].scale.grad == 12.0
    assert model.layers[0].scale.grad == 6.0


class Marked(RowStore):
    """Rows of 100 everywhere, and a note of what is written."""

    def __init__(self) -> None:
        self.written: dict[str, list[float]] = {}

    def read(self, session: Session, slot: str, which: slice, like: Tensor) -> Tensor:
        return torch.full((session.info.n_id[which].numel(), *like.shape[1:]), 100.0)

    def write(self, session: Session, slot: str, rows: Tensor) -> None:
        self.written.setdefault(slot, []).extend(rows.flatten().tolist())


def test_a_store_gives_the_halo_its_rows_and_histories_stay() -> None:
    model, loader = scaled()
    store = Marked()
    with attached(model).running(StoreExchange(store)):
        assert model(next(iter(loader))).flatten().tolist() == [4.0, 102.0]
    assert store.written == {"layers.0": FIRST[:2]}
    assert history_rows(model) == {}


def test_a_store_that_does_not_write_reads_histories_as_they_are() -> None:
    model, loader = scaled()
    gas.refresh(model, loader)
    before = history_rows(model)["layers.0"].clone()
    with torch.no_grad():
        model.get_parameter("layers.0.scale").fill_(2.0)
    with attached(model).running(StoreExchange(HistoryStore(writes=False))):
        assert model(next(iter(loader))).flatten().tolist() == [8.0, 4.0 + 6.0]
    assert torch.equal(history_rows(model)["layers.0"], before)


def test_a_sweep_computes_one_level_and_ends() -> None:
    model, loader = scaled()
    store = Marked()
    (level,) = plan_of(model, loader).levels
    with attached(model).running(SweepExchange(level, store)):
        outs = [run_pass(partial(model, batch)) for batch in loader.in_order()]
    assert outs == [None, None]
    assert store.written == {"layers.0": FIRST}
    with attached(model).running(SweepExchange(None, store)):  # the level below is read, not computed
        assert model(next(loader.in_order())).flatten().tolist() == [100.0, 200.0]


def test_plan_only_makes_the_plan_and_nothing_else() -> None:
    model, loader = scaled()
    with attached(model).running(PlanOnly()):
        assert run_pass(lambda: model(next(iter(loader)))) is None
    assert attached(model).plan is not None
    assert history_rows(model) == {}


class Doubled(ExchangePolicy):
    """A policy of one's own: what is computed goes on twice as large."""

    def at_slot(self, session: Session, slot: str, compute: Callable[[], Any]) -> Any:
        rows = compute()
        return 2.0 * torch.cat([rows, rows.new_zeros(session.info.num_rows - rows.size(0), rows.size(1))])


def test_policies_are_nested_and_given_back() -> None:
    model, loader = scaled()
    first = next(iter(loader))
    scaler = attached(model)
    with scaler.running(Doubled()):
        with scaler.running(StepExchange()):
            assert model(first).flatten().tolist() == [4.0, 2.0]
        assert model(first).flatten().tolist() == [16.0, 8.0]
    with pytest.raises(ZeroDivisionError), scaler.running(Doubled()):
        raise ZeroDivisionError
    assert model(first).flatten().tolist() == [4.0, 2.0]


class Notes(Observer):
    repeats = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.edges: list[tuple[str, int]] = []
        self.again: list[float] = []

    def around_layer(
        self, session: Session, call: str, layer: MessagePassing, arguments: Arguments, run: Callable[[], Any]
    ) -> Any:
        self.calls.append(call)
        return run()

    def edges_used(self, session: Session, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> None:
        if not session.repeating:
            self.edges.append((active.name, active.num_edge_calls))

    def layer_ran(self, run: LayerRun) -> None:
        x, edge_index = run.args
        self.again += run.again(2.0 * x, edge_index)[: run.info.batch_size].flatten().tolist()


def test_observers_see_layers_and_may_run_them_again() -> None:
    model, loader = scaled()
    gas.refresh(model, loader)
    seen = Notes()
    with attached(model).observed(seen):
        out = model(next(iter(loader)))
    assert out.flatten().tolist() == SECOND[:2]
    assert seen.calls == ["layers.0", "layers.1"]
    assert seen.edges == [("layers.0", 0), ("layers.1", 0)]
    assert seen.again == [2.0 * value for value in (*FIRST[:2], *SECOND[:2])]
    assert history_rows(model)["layers.0"].flatten().tolist() == FIRST  # what ran again was not pushed


def test_dropout_acts_after_the_pull() -> None:
    """A history holds rows without dropout, and the halo's rows are dropped like the batch's."""
    data = undirected_graph(24, 40)
    model = Stack([pyg.SimpleConv(aggr="mean"), pyg.SimpleConv(aggr="mean")])
    loader = gas.HaloLoader(data, 4, partition="random")
    masks = []

    class Dropped(Stack):
        def forward(self, x: Tensor, edge_index: Tensor, *_: Any, **__: Any) -> Tensor:
            h = self.layers[0](x, edge_index)
            dropped = F.dropout(h, 0.5, self.training)
            masks.append(dropped != 0)
            out: Tensor = self.layers[1](dropped, edge_index)
            return out

    exact = whole(Stack([pyg.SimpleConv(aggr="mean")]), data)
    dropping = gas.autoscale(Dropped(list(model.layers)), data)
    for _ in range(2):
        for batch in loader:
            dropping.train()
            masks.clear()
            out = dropping(batch.x, batch.edge_index)
            mask = masks[-1]
    assert bool(mask[: batch.batch_size].any())
    assert not bool(mask[batch.batch_size :].all())
    rows = torch.where(mask, exact[batch.n_id] * 2, 0.0)
    expected = scatter(rows[batch.edge_index.plain[0]], batch.edge_index.plain[1], 0, mask.size(0), "mean")
    assert_same(out, expected[: batch.batch_size])
