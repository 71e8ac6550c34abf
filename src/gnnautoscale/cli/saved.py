"""Trained models on disk: weights, and the options to build the model and its data again, without any code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import damage_in, load_state, reason_of, state_of, write_atomically
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model

_FORMAT = "gnnautoscale model 1"


@dataclass(frozen=True)
class SavedModel:
    """The content of a file that :func:`save_model` wrote.

    Attributes:
        path: The file.
        options: Options of the model, with its name as ``"model"``.
        data: Options of the data that it was trained on; empty in files of earlier versions.
        weights: Weights of the model.
        decoder: Weights of the task's own module; empty if it has none.
    """

    path: Path
    options: dict[str, Any]
    data: dict[str, Any]
    weights: dict[str, Tensor]
    decoder: dict[str, Tensor]

    def build(
        self,
        data: Data | HeteroData,
        num_outputs: int,
        decoder: nn.Module | None = None,
        *,
        targets: Sequence[str] = (),
    ) -> nn.Module:
        """Build the model for a graph with the features of its training, and load its weights.

        The given decoder, if any, gets its weights as well. Of a heterogeneous graph, the model computes outputs for
        nodes of the types ``targets``.
        """
        options = dict(self.options)
        model = build_model(options.pop("model"), data, num_outputs, targets, **options)
        try:
            load_state(model, self.weights)
            if decoder is not None:
                decoder.load_state_dict(self.decoder)
        except (RuntimeError, TypeError, AttributeError):
            raise InputError(
                "a saved model needs a graph with the features and types, classes and decoder that it was trained with",
                got=f"{data.num_features} features and {num_outputs} classes or outputs",
                fix="Use the data and the options of its training, or train it again.",
            ) from None
        return model


def save_model(
    path: Path,
    model: nn.Module,
    options: dict[str, Any],
    decoder: nn.Module | None = None,
    *,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights of a model and of a decoder, the model's options, with its name, and those of its data."""
    weights, others = (
        {name: value.detach().cpu() for name, value in state_of(module).items()} if module is not None else None
        for module in (model, decoder)
    )
    content = {"format": _FORMAT, "options": options, "weights": weights, "decoder": others, "data": dict(data or {})}
    write_atomically(path, lambda stream: torch.save(content, stream), rule="the model's file must be writable")


def read_model(path: Path) -> SavedModel:
    """Read a file that :func:`save_model` wrote, after its checksums."""
    reason = damage_in(path)
    if reason is None:
        try:
            match torch.load(path, weights_only=True, map_location="cpu"):
                case {
                    "format": found,
                    "options": {"model": str(name), **options},
                    "weights": dict(weights),
                    "decoder": dict() | None as decoder,
                    **others,
                } if found == _FORMAT and isinstance(data := others.get("data", {}), dict):
                    named = {str(key): value for key, value in options.items()}
                    return SavedModel(path, {"model": name, **named}, data, weights, decoder or {})
            reason = "it holds something else"
        except pickle.UnpicklingError:
            reason = "it holds more than values and tensors"
        except Exception as error:  # PyTorch raises many types for damaged and foreign files
            reason = reason_of(error) if isinstance(error, OSError) else "it is no file of torch.save"
    rule, got = "a saved model must be a file that `gas train --save` wrote", f"{path} ({reason})"
    raise InputError(rule, got=got, fix="Train it again." if os.path.exists(path) else "Check the path.")
