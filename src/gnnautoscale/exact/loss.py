"""What an exact step differentiates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in
from gnnautoscale.errors import InputError


@dataclass(frozen=True)
class Loss:
    """What is differentiated of the model's output for a batch.

    Attributes:
        inputs: The tensors that it needs for a batch besides the output, on any device.
        seeds: Given the output and these tensors on its device, the tensors to differentiate, and their gradients
            (``None`` for 1).
        fixed: Whether a batch's inputs are the same in every step.
    """

    inputs: Callable[[Data], dict[str, Tensor]]
    seeds: Callable[[Any, dict[str, Tensor]], tuple[list[Tensor], list[Tensor | None]]]
    fixed: bool = False


def given_gradients(inputs: Callable[[Data], dict[str, Tensor]]) -> Loss:
    """The loss whose gradient with respect to each of a batch's outputs, numbered in their order, is given."""

    def seeds(out: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        return tensors_in(out), [given[str(place)] for place in range(len(given))]

    return Loss(inputs, seeds)


def check_gradient(rows: list[Tensor]) -> None:
    """Refuse to train on what depends on no weight, if there is anything to train on: nothing would be learned."""
    if rows and not any(row.requires_grad for row in rows):
        raise InputError(
            "what a model is trained on depends on weights that need a gradient",
            got="an output or a loss without one",
            fix="Let forward neither detach what it returns nor run under torch.no_grad() or torch.inference_mode().",
        )


def differentiate(rows: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Start a backward pass at some rows with their gradients; rows that need none are left out."""
    pairs = [(row, given) for row, given in zip(rows, gradients, strict=True) if row.requires_grad]
    if not pairs:
        return
    with warnings.catch_warnings():
        # A graph from before may have known the weights on another stream, which this one has waited for.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        torch.autograd.backward([row for row, _ in pairs], [given for _, given in pairs])
