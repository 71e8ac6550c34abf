"""Models that are built by name.

Those of the paper's experiments, GCN, GraphSAGE, GIN, GAT, APPNP, GCNII and PNA; R-GCN for typed edges; and some of
heterogeneous graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import Option, checked, describe_arguments, did_you_mean, options_of
from gnnautoscale.errors import InputError
from gnnautoscale.models.hetero import HAN, HGT, HeteroRGCN, HeteroSAGE, TypedStack, Types
from gnnautoscale.models.operators import APPNP, GAT, GCN, GCNII, GIN, PNA, GraphSAGE
from gnnautoscale.models.relational import RGCN
from gnnautoscale.models.stack import NamedModel, PaperModel, Stack

__all__ = [
    "APPNP",
    "GAT",
    "GCN",
    "GCNII",
    "GIN",
    "HAN",
    "HGT",
    "MODELS",
    "PNA",
    "RGCN",
    "TYPED_MODELS",
    "GraphSAGE",
    "HeteroRGCN",
    "HeteroSAGE",
    "Stack",
    "Types",
    "build_model",
    "check_model_options",
    "model_name",
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
#: Those of heterogeneous graphs.
TYPED_MODELS: dict[str, type[TypedStack]] = {"hetero-sage": HeteroSAGE, "hgt": HGT, "han": HAN, "rgcn": HeteroRGCN}


#: Other names of these.
ALIASES = {"sage": "graphsage", "gcn2": "gcnii", "heterosage": "hetero-sage", "r-gcn": "rgcn"}


def model_name(name: str) -> str:
    """The name of a model in :data:`MODELS` or :data:`TYPED_MODELS`, given that name or another one in use.

    Example:
        >>> model_name("sage"), model_name("GCN")
        ('graphsage', 'gcn')
    """
    known = list(dict.fromkeys([*MODELS, *TYPED_MODELS]))
    found = ALIASES.get(name.lower(), name.lower()) if isinstance(name, str) else None
    if found not in known:
        fix = did_you_mean(str(name), [*known, *ALIASES], "Choose one of these.")
        raise InputError(f"a model is one of {', '.join(known)}", got=repr(name), fix=fix)
    return found


def model_options(name: str) -> Mapping[str, Option]:
    """The options of a model, each with type, default and description, by name.

    Example:
        >>> layers = model_options("appnp")["layers"]
        >>> layers.type, layers.default, layers.help
        (<class 'int'>, 10, 'Number of propagations.')
    """
    name = model_name(name)
    found: list[type[NamedModel]] = [models[name] for models in (TYPED_MODELS, MODELS) if name in models]
    return {key: each for model in found for key, each in options_of(model).items()}


def check_model_options(name: str, options: Iterable[str]) -> None:
    """Raise an :class:`InputError` for an option that a model does not have."""
    _check_options(name, model_options(name), options)


def _check_options(name: str, known: Mapping[str, Option], given: Iterable[str]) -> None:
    unknown = sorted(set(given) - known.keys())
    if unknown:
        raise InputError(
            f"the model '{name}' takes the options {', '.join(sorted(known))}",
            got=", ".join(unknown),
            fix="Leave these out, or choose another model.",
        )


@checked(num_outputs={"least": 1})
def build_model(
    name: str, data: Data | HeteroData, num_outputs: int, targets: Sequence[str] = (), /, **options: Any
) -> nn.Module:
    """Build a model for a graph.

    Args:
        name: One of ``MODELS``, or of ``TYPED_MODELS`` for a heterogeneous graph.
        data: The training graph: its features give the input width, and its degrees scale PNA. R-GCN takes its types of
            edges, and learns a row for each node if these have no more than one feature, as in knowledge graphs.
        num_outputs: Number of outputs per node.
        targets: The types of nodes to compute outputs for, of a heterogeneous graph.
        options: Options of the model; see :func:`model_options`.

    Returns:
        The model. Its attribute ``built_from`` holds its name and options.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> type(build_model("gcn", KarateClub()[0], 4, hidden=16)).__name__
        'GCN'
    """
    name = model_name(name)
    check_model_options(name, options)
    typed = isinstance(data, HeteroData)
    fitting: Iterable[str] = TYPED_MODELS if typed else MODELS
    if name not in fitting:
        kind = "a heterogeneous" if typed else "a plain"
        rule = f"the models of {kind} graph are {', '.join(fitting)}"
        raise InputError(rule, got=repr(name), fix="Choose one of these.")
    model: nn.Module
    if isinstance(data, HeteroData):
        _check_options(name, options_of(TYPED_MODELS[name]), options)
        model = TYPED_MODELS[name](Types.of(data), targets, num_outputs, **options)
    else:
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


for _model in {*MODELS.values(), *TYPED_MODELS.values()}:
    describe_arguments(_model, {key: each.help for key, each in options_of(_model).items()})
