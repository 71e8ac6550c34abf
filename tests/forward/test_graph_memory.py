"""Histories that fit the plan of the moment: of another width, of another type, with the rows that can be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, Stack, assert_same, history_rows, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.forward import memory as module
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.plan import Plan
from gnnautoscale.history import Medium, Storage

C = CHANNELS
CPU = torch.device("cpu")
ROWS = torch.arange(12.0).view(4, 3) / 7


def plan_of(width: int, dtype: torch.dtype = torch.float32) -> Plan:
    """Two slots; the output of the second needs no history."""
    needs: dict[str, frozenset[str]] = {"a": frozenset(), "b": frozenset({"a"}), Plan.OUTPUT: frozenset({"b"})}
    return Plan(needs=needs, rows={slot: torch.empty(0, width, dtype=dtype) for slot in "ab"})


def filled(storage: Storage = "device", folder: Path | None = None, dtype: torch.dtype | None = None) -> GraphMemory:
    memory, plan = GraphMemory(None, 4, storage, dtype, folder), plan_of(3)
    memory.prepare(plan, CPU)
    memory.history("a", plan, CPU).push(ROWS, torch.arange(4))
    return memory


def rows_in(memory: GraphMemory, dtype: torch.dtype = torch.float32) -> Tensor:
    return memory.histories["a"].pull(torch.arange(4), device=CPU, dtype=dtype)


@pytest.mark.parametrize("medium", ["device", "host", "disk"])
@pytest.mark.parametrize("chunk", [1 << 18, 3])
def test_another_type_keeps_the_rows(
    medium: Medium, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_COPIED", chunk)
    memory = filled(medium, tmp_path if medium == "disk" else None)
    memory.prepare(plan_of(3, torch.float64), CPU)
    assert memory.histories["a"].dtype == torch.float64
    assert torch.equal(rows_in(memory), ROWS)
    memory.prepare(plan_of(3, torch.bfloat16), CPU)
    assert memory.histories["a"].dtype == torch.bfloat16
    assert torch.equal(rows_in(memory, torch.bfloat16), ROWS.bfloat16())
    memory.release()


def test_another_width_starts_with_zeros() -> None:
    memory = filled()
    memory.prepare(plan_of(5), CPU)
    assert memory.histories["a"].width == 5
    assert rows_in(memory).tolist() == [[0.0] * 5] * 4


@pytest.mark.parametrize("medium", ["device", "host", "disk"])
def test_last_gradients_of_every_slot(medium: Medium, tmp_path: Path) -> None:
    memory = filled(medium, tmp_path if medium == "disk" else None, torch.int8)
    gradients = memory.last_gradient("b", plan_of(3), CPU, with_rows=False)  # which has no history of rows
    assert gradients.dtype == torch.float32  # their sizes vary more than those of rows
    gradients.push(ROWS, torch.arange(4))
    assert memory.last_gradient("b", plan_of(3), CPU, with_rows=False) is gradients
    assert torch.equal(gradients.pull(torch.arange(4), device=CPU, dtype=torch.float32), ROWS)
    assert memory.last_gradient("b", plan_of(5), CPU, with_rows=True).width == 10
    memory.release()


def test_what_fits_stays() -> None:
    memory = filled()
    history = memory.histories["a"]
    memory.mark_written_by([1.0])
    memory.prepare(plan_of(3), CPU)
    assert memory.histories["a"] is history
    assert memory.is_written_by([1.0])
    memory.prepare(plan_of(3, torch.float64), CPU)
    assert not memory.is_written_by([1.0])


def test_a_type_that_was_asked_for_stays() -> None:
    memory = filled(dtype=torch.float16)
    history = memory.histories["a"]
    memory.prepare(plan_of(3, torch.float64), CPU)
    assert memory.histories["a"] is history
    assert history.dtype == torch.float16


def test_no_history_is_made_before_it_has_rows() -> None:
    memory = GraphMemory(None, 4, "device", None)
    memory.prepare(plan_of(3), CPU)
    assert memory.histories == {}


# Precision ###########################################################################################################


def test_histories_are_as_precise_as_the_model_whatever_autocast_computes() -> None:
    data = undirected_graph()
    model = Stack([pyg.SAGEConv(C, C), pyg.SAGEConv(C, C), pyg.SAGEConv(C, 4)])
    expected = whole(model, data)
    gas.autoscale(model, data).train()
    loader = gas.HaloLoader(data, 4, partition="random")
    with torch.autocast("cpu", torch.bfloat16):
        for batch in loader:
            model(batch)
    assert {history.dtype for history in attached(model).memory.histories.values()} == {torch.float32}
    assert_same(gas.infer(model, loader), expected, 1e-6)


def test_rows_are_kept_when_the_model_becomes_more_precise() -> None:
    data = undirected_graph()
    model = gas.autoscale(Stack([pyg.SAGEConv(C, C), pyg.SAGEConv(C, 4)]), data)
    loader = gas.HaloLoader(data, 4, partition="random")
    gas.refresh(model, loader)
    before = history_rows(model)["layers.0"]
    model.double()
    batch = next(iter(loader))
    model(batch.x.double(), batch.edge_index)
    after = history_rows(model)["layers.0"]
    assert after.dtype == torch.float64
    assert_same(after.float(), before)
