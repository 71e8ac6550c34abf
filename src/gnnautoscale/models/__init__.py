"""The models of the paper's experiments, and how to build one by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.models.operators import APPNP, GAT, GCN, GCNII, GIN, PNA, GraphSAGE
from gnnautoscale.models.stack import Stack

__all__ = [
    "APPNP",
    "GAT",
    "GCN",
    "GCNII",
    "GIN",
    "MODELS",
    "PNA",
    "GraphSAGE",
    "Stack",
    "build_model",
    "check_model_options",
    "model_options",
]

#: Models by the name that commands and configurations use.
MODELS: dict[str, type[nn.Module]] = {
    "gcn": GCN,
    "graphsage": GraphSAGE,
    "gin": GIN,
    "gat": GAT,
    "appnp": APPNP,
    "gcnii": GCNII,
    "pna": PNA,
    "pna-jk": PNA,
}

# What the name or the graph decides rather than the user.
_GIVEN = {"self", "in_channels", "out_channels", "degrees", "jumping_knowledge"}


def model_options(name: str) -> dict[str, inspect.Parameter]:
    """The options that a model takes, by name.

    Example:
        >>> sorted(model_options("appnp"))
        ['alpha', 'dropout', 'hidden', 'layers']
    """
    parameters = inspect.signature(_find(name).__init__).parameters
    return {key: value for key, value in parameters.items() if key not in _GIVEN}


def check_model_options(name: str, options: Iterable[str]) -> None:
    """Refuse names of options that a model does not take.

    Example:
        >>> check_model_options("gat", ["heads", "dropout"])
    """
    known = model_options(name)
    unknown = sorted(set(options) - known.keys())
    if unknown:
        raise InputError(
            f"the model '{name}' takes the options {', '.join(sorted(known))}",
            got=", ".join(unknown),
            fix="Leave these out, or choose another model.",
        )


def build_model(name: str, data: Data, num_outputs: int, **options: Any) -> nn.Module:
    """Build one of the paper's models for a graph.

    Args:
        name: One of ``MODELS``.
        data: The graph to train on; its features, and for PNA its degrees, decide about sizes.
        num_outputs: Number of outputs per node.
        options: Options of the model's class.

    Returns:
        The model; its ``built_from`` says its name and options.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> type(build_model("gcn", KarateClub()[0], 4, hidden=16)).__name__
        'GCN'
    """
    check_model_options(name, options)
    given = dict(options)
    if PNA is _find(name):
        in_degree = torch.bincount(data.edge_index[1].cpu(), minlength=data.num_nodes)
        options = {"jumping_knowledge": name == "pna-jk", **options, "degrees": torch.bincount(in_degree)}
    model = _find(name)(data.num_features, num_outputs, **options)
    vars(model)["built_from"] = {"model": name, **given}
    return model


def _find(name: str) -> type[nn.Module]:
    if name not in MODELS:
        raise InputError(f"a model is one of {', '.join(MODELS)}", got=repr(name), fix="Choose one of these.")
    return MODELS[name]
