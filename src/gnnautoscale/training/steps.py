"""A training step: forward pass, loss, backward pass, clipping and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import weights_of
from gnnautoscale.attach import LocalLipschitz
from gnnautoscale.errors import InputError
from gnnautoscale.exact import check_gradient
from gnnautoscale.ranks import GradientMean
from gnnautoscale.tasks import Task, trained_rows
from gnnautoscale.training.feed import Item, as_it_is
from gnnautoscale.transfer import Times

Precision = Literal["float32", "tf32", "bfloat16"]


class Steps:
    """Trains a model on batches, one step after the other.

    ``call`` takes a batch and returns the model's output for the batch's own nodes; it is the model itself by default.
    ``nodes`` gives those nodes of a batch that the task looks at, in the order of the output.
    The optimizer steps after ``accumulate`` batches with targets, and at the end of an epoch, with the mean of their
    gradients, which are clipped to ``grad_norm``; ranks that step together do after so many steps in which any of them
    has targets, with the mean over all their batches that have. ``precision`` is that of matrix products: full, TF32
    inside products, or bfloat16 by autocast. A batch's loss is the mean over its targets, or ``per_target`` times their
    sum; then batches without targets train as well, since others may depend on their rows. ``together`` gives the
    weights the mean of several ranks' gradients; these step together, and if their backward passes exchange something
    ``always_backward`` makes each of them run one, even without targets.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        device: torch.device,
        *,
        call: Callable[[Data], Any] | None = None,
        nodes: Callable[[Any], Data] = as_it_is,
        grad_norm: float | None = None,
        penalty: LocalLipschitz | None = None,
        penalty_weight: float = 0.0,
        precision: Precision = "float32",
        accumulate: int = 1,
        per_target: float | None = None,
        together: GradientMean | None = None,
        always_backward: bool = False,
    ) -> None:
        self._model, self._optimizer, self.task = model, optimizer, task
        self._call: Callable[[Data], Any] = model if call is None else call
        self._nodes = nodes
        self._grad_norm, self._penalty, self._penalty_weight = grad_norm, penalty, penalty_weight
        self._precision: Precision = precision
        self._accumulate, self._per_target, self.together = accumulate, per_target, together
        self._always_backward = always_backward
        self._weights = weights_of(model, *(() if task.module is None else (task.module,)))
        # How many batches have added to the gradients since the last step of the optimizer.
        self._added = 0
        # What several steps of all ranks have added up, apart from the gradients of a step, and from how many batches.
        self._held: list[Tensor | None] = []
        self._num_held = 0
        self.device = device
        # The summed loss of this epoch's targets so far, and their number.
        self._total = torch.zeros((), device=device)
        self._count = 0
        #: Number of optimizer steps so far.
        self.steps = 0
        #: Measures what steps spend their time on.
        self.times = Times()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context of everything that touches the model while it trains."""
        before = torch.get_float32_matmul_precision()
        if self._precision == "tf32" and self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def train(
        self,
        items: Iterable[Item],
        after_step: Callable[[Item], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> float:
        """Train on batches; returns the mean loss over all targets, without the penalty."""
        try:
            items = iter(items)
            while (item := self._next(items)) is not None:
                if before_step is not None:
                    before_step()
                self._run(item)
                self._count += item.targets.size(0)
                if self._trains_on(item) if self.together is None else self.together.trained:
                    self._added += 1
                    self._hold()
                    self._update_if_due()
                if after_step is not None:
                    after_step(item)
            self._update_if_due(at_last=True)
            total, count = float(self._total), float(self._count)
            if self.together is not None:
                total, count = self.together.world.add_up(total, count)
            return total / max(count, 1.0)
        finally:
            self._total.zero_()
            self._count = 0

    def _next(self, items: Iterator[Item]) -> Item | None:
        with self.times.during("loader"):
            return next(items, None)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, also in the middle of an epoch."""
        state = {"steps": self.steps, "total": self._total, "count": self._count, "added": self._added}
        if self._holds:
            return {**state, "gradients": self._held if self._added else [], "held": self._num_held}
        return {**state, "gradients": [weight.grad for weight in self._weights] if self._added else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps, self._count = state["steps"], state["count"]
        self._total.copy_(state["total"])
        self._added = state["added"]
        if self._holds:
            pairs = zip(self._weights, state["gradients"], strict=False)
            self._held = [None if held is None else held.to(weight, copy=True) for weight, held in pairs]
            self._num_held = state.get("held", 0)
            return
        for weight, gradient in zip(self._weights, state["gradients"], strict=False):
            weight.grad = None if gradient is None else gradient.to(weight)

    def _run(self, item: Item) -> None:
        self._step(item)

    def _trains_on(self, item: Item) -> bool:
        return item.targets.size(0) > 0 or self._per_target is not None

    def _step(self, item: Item) -> None:
        learned = self._learn(item)
        if self.together is not None and not learned:
            self.together.join()
        if self._accumulate == 1 and (learned if self.together is None else self.together.trained):
            self._update()

    def _learn(self, item: Item) -> bool:
        """Run the model on a batch, and find gradients if there is something to learn, or if other ranks need that.

        Returns whether there was a backward pass.
        """
        if not self._trains_on(item) and not self._always_backward:
            # Nothing to learn, but histories move on.
            with torch.no_grad(), self._autocast():
                self._show(self._call(item.batch), item.batch)
            return False
        if self._accumulate == 1 or self._holds:
            self._optimizer.zero_grad()
        with self._penalty if self._penalty is not None else nullcontext(), self._autocast():
            out = self._call(item.batch)
        self._show(out, item.batch)
        loss, total = self._losses(out, item)
        if not loss.is_cuda and not bool(torch.isfinite(loss)):  # on a GPU the host would wait
            raise FloatingPointError(f"the loss is {float(loss.detach())}")
        if self._penalty is not None:
            # Of a batch that another rank waits for only, the penalty takes part but does not count.
            total = total + self._penalty_weight * self._trains_on(item) * self._penalty.value()
        if self.together is not None:
            self.together.counts = self._trains_on(item)
        with torch.autograd.set_multithreading_enabled(False):  # nothing to do for a second thread
            shared = self._accumulate > 1 and not self._holds
            torch.autograd.backward(total / self._accumulate if shared else total)
        self._total += loss.detach() * item.targets.size(0)
        return True

    def _losses(self, out: Any, item: Item) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch's targets, and what its step differentiates."""
        count = item.targets.size(0)
        chosen = trained_rows(out, item.rows)
        loss = self.task.loss(chosen, item.targets) if count else chosen.sum()
        self._check_loss(loss)
        if self._per_target is None:
            return loss, loss
        return loss, loss * (self._per_target * (self.task.weight(item.targets) if count else 0))

    def _show(self, out: Any, batch: Data) -> None:
        """Show the output to a task that wants to see it."""
        if type(self.task).see is not Task.see:
            nodes = self._nodes(batch)
            self.task.see(out, nodes.n_id[: nodes["batch_size"]])

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            rule = f"{type(self.task).__name__}.loss must return a tensor of one number"
            raise InputError(rule, got=got, fix="Return the mean over the targets.")
        check_gradient([loss])

    @property
    def _holds(self) -> bool:
        """Whether gradients of several steps add up apart from those of a step, which are the mean of all ranks'."""
        return self.together is not None and self._accumulate > 1

    def _hold(self) -> None:
        """Add the gradients of a step of all ranks to those of earlier ones."""
        if self.together is None or not self._holds:
            return
        held = self._held or [None] * len(self._weights)
        for place, weight in enumerate(self._weights):
            if weight.grad is not None:
                added, before = weight.grad * self.together.learners, held[place]
                held[place] = added if before is None else before.add_(added)
        self._held, self._num_held = held, self._num_held + self.together.learners

    def _update(self) -> None:
        """Step with the gradients that there are."""
        if self._grad_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self._grad_norm)
        self._optimizer.step()

    def _update_if_due(self, *, at_last: bool = False) -> None:
        """Count a step, and make it if its gradients come from several batches; ``at_last`` also from fewer."""
        if self._added < self._accumulate and not (at_last and self._added):
            return
        if self._holds:
            for weight, held in zip(self._weights, self._held, strict=True):
                weight.grad = None if held is None else held.div_(self._num_held)
            self._held, self._num_held = [], 0
            self._update()
        elif self._accumulate > 1:
            if self._added < self._accumulate:
                gradients = [weight.grad for weight in self._weights if weight.grad is not None]
                torch._foreach_mul_(gradients, self._accumulate / self._added)
            self._update()
            # In place: captured steps add to these very tensors.
            self._optimizer.zero_grad(set_to_none=False)
        self._added = 0
        self.steps += 1

    def _autocast(self) -> torch.autocast:
        # Casts are not cached, since a captured step must make its own.
        enabled = self._precision == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)
