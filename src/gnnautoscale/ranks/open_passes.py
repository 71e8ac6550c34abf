"""Forward passes of a rank whose backward pass has not come.

A loop goes on without one if its batch has nothing to learn from, while the loops of other ranks have one, in which
this rank has to take part. Here nobody can tell that from a loop that is still between the two. So before anything else
that all ranks do together, each takes part in a backward pass of its open passes. If no rank learned in it, all of them
know that, and the passes stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Learner(Protocol):
    """What makes the backward passes of a model those of all ranks."""

    #: Whether backward passes need all ranks on the way, not only at their end.
    meets_within: bool

    @property
    def weights(self) -> Sequence[Tensor]:
        """What learns."""

    def leave_out(self) -> Callable[[], Sequence[torch.optim.Optimizer] | None]:
        """Begin a backward pass that does not count.

        Once it has ended the result is called: it returns the optimizers that step now, since other ranks have
        learned, or puts gradients back as they were, and returns ``None``.
        """

    def join(self) -> bool:
        """Take part without a backward pass of its own."""


class OpenPasses:
    """The forward passes of this rank that are open, of one or several models."""

    def __init__(self) -> None:
        self._outputs: dict[Learner, list[Tensor]] = {}
        self._answering = False

    def add(self, learner: Learner, outputs: list[Tensor]) -> None:
        """Take note of a forward pass, and of its outputs that have gradients."""
        if outputs:
            self._outputs[learner] = outputs

    def remove(self, learner: Learner) -> None:
        """Take note of a backward pass."""
        self._outputs.pop(learner, None)

    def clear(self) -> None:
        """Take note that all ranks are done with their batches."""
        self._outputs.clear()

    def answer(self, but: Learner | None = None) -> None:
        """Take part in the backward passes of other ranks, and step as they do; passes of one model may be left out."""
        waiting = {learner: outputs for learner, outputs in self._outputs.items() if learner is not but}
        if not waiting or self._answering:
            return
        self._answering = True  # which takes collectives itself
        try:
            self._take_part(waiting)
        finally:
            self._answering = False

    def _take_part(self, waiting: dict[Learner, list[Tensor]]) -> None:
        ends = [learner.leave_out() for learner in waiting]
        if len(waiting) > 1 or any(learner.meets_within for learner in waiting):
            # Of a loss that is a sum over several models the gradients come in an order that only this tells.
            outputs = [each for of_model in waiting.values() for each in of_model]
            torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs], retain_graph=True)
        else:
            for learner in waiting:
                learner.join()
        stepping: dict[torch.optim.Optimizer, None] = {}
        learned = set()
        for end, (learner, outputs) in zip(ends, waiting.items(), strict=True):
            optimizers = end()
            if optimizers is None:
                self._outputs[learner] = outputs
            else:
                stepping |= dict.fromkeys(optimizers)
                learned |= {id(weight) for weight in learner.weights}
        for optimizer in stepping:
            for weight in (each for group in optimizer.param_groups for each in group["params"]):
                if id(weight) not in learned:
                    weight.grad = None  # of another model, which a loop forgets before it steps on this one
            optimizer.step()
