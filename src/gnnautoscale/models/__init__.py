"""The models of the paper's experiments, GCN, GraphSAGE, GIN, GAT, APPNP, GCNII and PNA, and R-GCN for typed edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import Option, describe_arguments, options_of
from gnnautoscale.errors import InputError
from gnnautoscale.models.operators import APPNP, GAT, GCN, GCNII, GIN, PNA, GraphSAGE
from gnnautoscale.models.relational import RGCN
from gnnautoscale.models.stack import PaperModel, Stack

__all__ = [
    "APPNP",
    "GAT",
    "GCN",
    "GCNII",
    "GIN",
    "MODELS",
    "PNA",
    "RGCN",
    "GraphSAGE",
    "Stack",
    "build_model",
    "check_model_options",
    "model_options",
]

#: Model classes by their name in commands and configuration files.
MODELS: dict[str, type[PaperModel]] = {
    "gcn": GCN,
    "graphsage": GraphSAGE,
    "gin": GIN,
    "gat": GAT,
    "appnp": APPNP,
    "gcnii": GCNII,
    "pna": PNA,
    "pna-jk": PNA,
    "rgcn": RGCN,
}


def model_options(name: str) -> Mapping[str, Option]:
    """The options of a model, each with type, default and description, by name.

    Example:
        >>> layers = model_options("appnp")["layers"]
        >>> layers.type, layers.default, layers.help
        (<class 'int'>, 10, 'Number of propagations.')
    """
    if name not in MODELS:
        raise InputError(f"a model is one of {', '.join(MODELS)}", got=repr(name), fix="Choose one of these.")
    return options_of(MODELS[name])


def check_model_options(name: str, options: Iterable[str]) -> None:
    """Raise an :class:`InputError` for an option that a model does not have."""
    known = model_options(name)
    unknown = sorted(set(options) - known.keys())
    if unknown:
        raise InputError(
            f"the model '{name}' takes the options {', '.join(sorted(known))}",
            got=", ".join(unknown),
            fix="Leave these out, or choose another model.",
        )


def build_model(name: str, data: Data, num_outputs: int, **options: Any) -> nn.Module:
    """Build one of the library's models for a graph.

    Args:
        name: One of ``MODELS``.
        data: The training graph: its features give the input width, and its degrees scale PNA. R-GCN takes its types of
            edges, and learns a row for each node if these have no more than one feature, as in knowledge graphs.
        num_outputs: Number of outputs per node.
        options: Options of the model; see :func:`model_options`.

    Returns:
        The model. Its attribute ``built_from`` holds its name and options.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> type(build_model("gcn", KarateClub()[0], 4, hidden=16)).__name__
        'GCN'
    """
    check_model_options(name, options)
    from_graph: dict[str, Any] = {}
    if MODELS[name] is PNA:
        in_degree = torch.bincount(data.edge_index[1].cpu(), minlength=data.num_nodes)
        from_graph = {"jumping_knowledge": name == "pna-jk", "degrees": torch.bincount(in_degree)}
    if MODELS[name] is RGCN:
        if "edge_type" not in data:
            fix = "Set data.edge_type; to predict links of several types, use the decoder distmult."
            raise InputError("the model 'rgcn' needs edges with types", got="edges without edge_type", fix=fix)
        relations = data.get("num_relations", int(data.edge_type.max()) + 1 if data.num_edges else 1)
        from_graph = {"num_relations": relations, "num_nodes": data.num_nodes if data.num_features <= 1 else None}
    model = MODELS[name](data.num_features, num_outputs, **options, **from_graph)
    vars(model)["built_from"] = {"model": name, **options}
    return model


for _name, _model in MODELS.items():
    describe_arguments(_model, {key: each.help for key, each in model_options(_name).items()})
