"""How the passes of a step are captured: what each of them reads and computes, and what runs meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in, weights_of
from gnnautoscale.exact.captured import CapturedSweeps, Form, Inputs, PlacedRows, Recipe
from gnnautoscale.exact.kinds import StepKind
from gnnautoscale.exact.loss import Loss, differentiate
from gnnautoscale.forward import Draws, GradientStore, Plan, Stage, StageExchange


@dataclass(frozen=True)
class Recipes:
    """Makes the recipes of all passes of a kind of steps.

    Args:
        model: The model.
        plan: Its plan.
        known: What the first step of this kind has shown.
        replays: Has the packed batches.
        run: Runs the model on a batch.
    """

    model: nn.Module
    plan: Plan
    known: StepKind
    replays: CapturedSweeps
    run: Callable[[StageExchange, Data], Any]

    def of(self, loss: Loss, *, with_output: bool) -> dict[tuple[Stage, bool], Recipe]:
        """The recipes by stage, and by whether it is the stage's backward pass."""
        levels = self.plan.levels
        recipes: dict[tuple[Stage, bool], Recipe] = {}
        for stage in (*map(Stage, range(len(levels)), levels), Stage(len(levels))):
            if stage.level is not None or with_output:
                recipes[stage, False] = self._recipe(stage, None)
            recipes[stage, True] = self._recipe(stage, loss)
        return recipes

    def _recipe(self, stage: Stage, loss: Loss | None) -> Recipe:
        """How to capture the passes of a stage, forward without a ``loss`` and backward with one."""
        known, replays = self.known, self.replays
        slots, names = known.reads[stage]
        rows, level = self.plan.rows, sorted(stage.level or ())

        def inputs(number: int) -> Inputs:
            own, all_rows = replays.size_of(number)
            found: Inputs = {
                ("rows", slot): (rows[slot].dtype, torch.Size([all_rows, *rows[slot].shape[1:]])) for slot in slots
            }
            found |= {("attribute", name): replays.attribute(number, name) for name in names}
            if loss is not None and stage.level is not None:
                found |= {
                    ("gradient", slot): (rows[slot].dtype, torch.Size([own, *rows[slot].shape[1:]])) for slot in level
                }
            elif loss is not None:
                given = [(kind, torch.Size([own, *row])) for kind, row in known.outputs]
                whole: Inputs = {("loss", str(place)): form for place, form in enumerate(given)}
                found |= replays.form_of_loss(number) if loss.fixed else whole
            return found

        def outputs(number: int) -> tuple[dict[str, Form], list[Form]]:
            own, all_rows = replays.size_of(number)
            count, written = (all_rows, sorted(slots)) if loss is not None else (own, level)
            forms = {slot: (rows[slot].dtype, torch.Size([count, *rows[slot].shape[1:]])) for slot in written}
            others = known.outputs if loss is None and stage.level is None else ()
            return forms, [(kind, torch.Size([own, *row])) for kind, row in others]

        def run(
            batch: Data, store: PlacedRows, there: Mapping[tuple[str, str], Tensor], draws: Draws
        ) -> tuple[dict[str, Tensor], list[Tensor]]:
            if loss is None:
                with torch.no_grad():
                    out = self.run(StageExchange(stage, store, draws), batch)
                return {slot: store.written[slot] for slot in level}, tensors_in(out) if out is not None else []
            return self._backward(stage, loss, batch, GradientStore(store), there, draws), []

        return Recipe(inputs, outputs, known.places, run)

    @torch.enable_grad()
    def _backward(
        self,
        stage: Stage,
        loss: Loss,
        batch: Data,
        store: GradientStore,
        there: Mapping[tuple[str, str], Tensor],
        draws: Draws,
    ) -> dict[str, Tensor]:
        every, known = weights_of(self.model), self.known
        for number, weight in enumerate(every):
            weight.grad = known.sums.get(number)
        try:
            out = self.run(StageExchange(stage, store, draws), batch)
            if stage.level is None:
                inputs = {name: value for (kind, name), value in there.items() if kind == "loss"}
                rows, gradients = loss.seeds(out, inputs)
            else:
                rows = list(store.outputs.values())
                gradients = [there["gradient", slot] for slot in store.outputs]
            differentiate(rows, gradients)
            if any(weight.grad is not known.sums.get(number) for number, weight in enumerate(every)):
                raise RuntimeError("other weights have a gradient than in the first step")
        finally:
            for weight in every:
                weight.grad = None
        return store.gradients
