"""What a GPU captures, run here without capturing: the passes of a step on rows at fixed places."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, undirected_graph
from gnnautoscale.exact.captured import CapturedSweeps, PlacedRows
from gnnautoscale.exact.loss import given_gradients
from gnnautoscale.exact.passes import ExactPasses
from gnnautoscale.exact.recipes import Recipes
from gnnautoscale.forward import Draws, Stage


class Unpacked:
    """Stands in for packed batches: it knows their sizes."""

    def __init__(self, batches: list[Data]) -> None:
        self._batches = batches

    def size_of(self, number: int) -> tuple[int, int]:
        batch = self._batches[number]
        return batch.batch_size, batch.num_nodes

    def attribute(self, number: int, name: str) -> tuple[torch.dtype, torch.Size]:
        value = self._batches[number][name]
        return value.dtype, value.shape


def test_passes_at_fixed_places_have_the_rows_and_gradients_of_a_step() -> None:
    data = undirected_graph()
    torch.manual_seed(0)
    model = gas.autoscale(GCN(CHANNELS, 8, num_layers=2, out_channels=3).eval(), data)
    loader = gas.HaloLoader(data, 3)
    passes, wanted = ExactPasses(model, loader), torch.zeros(data.num_nodes, 3)
    seeds = torch.randn(data.num_nodes, 3)

    def own(batch: Data) -> Tensor:
        return cast(Tensor, batch.n_id[: batch.batch_size].as_subclass(Tensor))

    def note(batch: Data, out: Any) -> None:
        wanted[own(batch)] = out

    passes.forward(note)
    loss = given_gradients(lambda batch: {"0": seeds[own(batch)]})
    weights = list(model.parameters())
    expected = passes.gradients(weights, loss)

    known, plan, batches = passes._seen, passes._plan, list(loader)
    assert known.learned == frozenset(range(len(weights)))
    known.sums = {number: torch.zeros_like(weight) for number, weight in enumerate(weights)}
    unpacked = cast(CapturedSweeps, Unpacked(batches))
    recipes = Recipes(model, plan, known, unpacked, passes._pass).of(loss, with_output=True)
    (slot,), first, last = plan.live, Stage(0, plan.levels[0]), Stage(1)
    assert recipes.keys() == {(first, False), (first, True), (last, False), (last, True)}

    def run(stage: Stage, backward: bool, number: int, there: dict[tuple[str, str], Tensor]) -> Any:
        recipe = recipes[stage, backward]
        assert recipe.inputs(number) == {name: (value.dtype, value.shape) for name, value in there.items()}
        rows, others = recipe.run(batches[number], PlacedRows(there), there, Draws(None))
        forms, further = recipe.outputs(number)
        assert {name: (value.dtype, value.shape) for name, value in rows.items()} == forms
        assert [(value.dtype, value.shape) for value in others] == further
        return others if others else rows.get(slot)

    rows, gradients = torch.zeros(data.num_nodes, 8), torch.zeros(data.num_nodes, 8)
    for number, batch in enumerate(batches):
        rows[own(batch)] = run(first, False, number, {})
    for number, batch in enumerate(batches):
        nodes = batch.n_id.as_subclass(Tensor)
        there = {("rows", slot): rows[nodes]}
        torch.testing.assert_close(run(last, False, number, there)[0], wanted[own(batch)])
        there["loss", "0"] = seeds[own(batch)]
        gradients.index_add_(0, nodes, run(last, True, number, there))
    for number, batch in enumerate(batches):
        run(first, True, number, {("gradient", slot): gradients[own(batch)]})
    for number, found in enumerate(expected):
        torch.testing.assert_close(known.sums[number], found)
    assert all(weight.grad is None for weight in weights)
