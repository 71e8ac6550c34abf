"""Trained models on disk: weights and the options to build the model again, without any code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import write_atomically
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model

_FORMAT = "gnnautoscale model 1"


def save_model(path: Path, model: nn.Module, options: dict[str, Any]) -> None:
    """Write a model's weights and its options, with its name as ``"model"``."""
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    content = {"format": _FORMAT, "options": options, "weights": weights}
    write_atomically(path, lambda stream: torch.save(content, stream), rule="the model's file must be writable")


def load_model(path: Path, data: Data, num_outputs: int) -> nn.Module:
    """Build a model that :func:`save_model` wrote for a graph with the same features, and load its weights."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        if saved["format"] != _FORMAT:
            raise KeyError("format")
        options, weights = dict(saved["options"]), saved["weights"]
        name = options.pop("model")
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            "a saved model must be a file that `gas train --save` wrote",
            got=f"{path} ({reason})",
            fix="Train it again.",
        ) from None
    model = build_model(name, data, num_outputs, **options)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise InputError(
            "a saved model needs a graph with the features and classes that it was trained on",
            got=f"{data.num_features} features and {num_outputs} classes",
            fix="Use the data of its training, or train it again.",
        ) from None
    return model
