"""Trained models on disk: weights and the options to build the model again, without any code."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import write_atomically
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model

_FORMAT = "gnnautoscale model 1"


def save_model(path: Path, model: nn.Module, options: dict[str, Any], decoder: nn.Module | None = None) -> None:
    """Write the weights of a model and of a decoder, and the model's options, with its name as ``"model"``."""
    weights, others = (
        {name: value.detach().cpu() for name, value in module.state_dict().items()} if module is not None else None
        for module in (model, decoder)
    )
    content = {"format": _FORMAT, "options": options, "weights": weights, "decoder": others}
    write_atomically(path, lambda stream: torch.save(content, stream), rule="the model's file must be writable")


def load_model(
    path: Path,
    data: Data | HeteroData,
    num_outputs: int,
    decoder: nn.Module | None = None,
    *,
    targets: Sequence[str] = (),
) -> nn.Module:
    """Build a model that :func:`save_model` wrote for a graph with the same features, and load its weights.

    The given decoder, if any, gets its weights as well. Of a heterogeneous graph, the model computes outputs for nodes
    of the types ``targets``.
    """
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
    model = build_model(name, data, num_outputs, targets, **options)
    try:
        model.load_state_dict(weights)
        if decoder is not None:
            decoder.load_state_dict(saved.get("decoder") or {})
    except RuntimeError:
        raise InputError(
            "a saved model needs a graph with the features and types, classes and decoder that it was trained with",
            got=f"{data.num_features} features and {num_outputs} classes or outputs",
            fix="Use the data and the options of its training, or train it again.",
        ) from None
    return model
