"""Messages about models that cannot have histories: each names the culprit and what to do instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, undirected_graph
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import LayerCall, Plan
from gnnautoscale.planner.blame import (
    DeviationError,
    explained,
    failed_layer,
    keeps_state,
    random_evaluation,
    whole_table,
)

C = CHANNELS


def sage() -> Any:
    return pyg.SAGEConv(C, C)


def own(*kinds: Any) -> LayerCall:
    """A call with the batch's own edges."""
    return LayerCall(["node", "own", *kinds], [None, "edge_index", *(None for _ in kinds)])


PLAN = Plan(
    calls={"conv": own(), "weighted": own("edge"), "changed": LayerCall(["node", "other"], [None, None])},
)
ATTENTION = nn.MultiheadAttention(C, 1)

# What deviates, what is used outside of layers, and what is said.
CASES: dict[str, tuple[DeviationError, list[str], str]] = {
    "layer": (
        DeviationError("conv", sage()),
        [],
        r"SAGEConv \('conv'\) must compute the same rows.*uses more of the graph than a node's neighbours.*Replace it",
    ),
    "attention before it": (
        DeviationError("head ", nn.Linear(C, C), suspects=[("norm ", nn.Identity()), ("attn ", ATTENTION)]),
        [],
        r"from its neighbourhood, but got MultiheadAttention \('attn'\), attention over all nodes.*GATConv",
    ),
    "changed edges": (
        DeviationError("changed", sage()),
        ["edge_index"],
        r"SAGEConv \('changed'\) needs the batch's own edges, but got edges that the model changed.*edge_dropout=p",
    ),
    "changed weights": (
        DeviationError("weighted", sage()),
        [],
        r"SAGEConv \('weighted'\) needs the batch's own edge weights, but got weights.*store them in data",
    ),
    "degree before a layer": (
        DeviationError("conv", sage(), mixed_before=True),
        ["n_id", "edge_index"],
        r"neighbourhood only, not on what else is in the batch, but got values before SAGEConv \('conv'\).*edges "
        r"\(edge_index\) outside of layers.*data\.degree",
    ),
    "degree at the end": (
        DeviationError(Plan.OUTPUT, None),
        ["edge_weight"],
        r"but got values after the last layer that are computed from the batch's edges \(edge_weight\) outside",
    ),
    "mean before a layer": (
        DeviationError("conv", sage(), mixed_before=True),
        ["n_id"],
        r"neighbourhood only, but got something before SAGEConv \('conv'\) that mixes all nodes of a batch\. Move",
    ),
    "mean at the end": (
        DeviationError(Plan.OUTPUT, None),
        [],
        "neighbourhood only, but got something after the last layer that mixes all nodes of a batch",
    ),
    "norm": (
        DeviationError("norm ", pyg.GraphNorm(C)),
        [],
        r"GraphNorm \('norm'\) must compute the same rows.*mixes all nodes.*Use a norm.*LayerNorm\(mode='node'\)",
    ),
    "module": (
        DeviationError("middle ", nn.Softmax(dim=0)),
        [],
        r"Softmax \('middle'\) must compute the same rows.*mixes all nodes.*Replace it by a module that computes each",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_deviations_are_blamed_on_their_cause(name: str) -> None:
    deviation, used_outside, says = CASES[name]
    error = deviation.error(PLAN, used_outside, training=False)
    with pytest.raises(UnsupportedModelError, match=says):
        raise error
    assert "training mode" not in str(error)
    assert " in training mode, but got" in str(deviation.error(PLAN, used_outside, training=True))


def test_other_errors_name_what_to_change() -> None:
    failed = failed_layer("conv#2", sage(), ValueError("no rows"))
    assert failed.call == "conv#2"
    assert "SAGEConv ('conv#2') must run on a batch as on the whole graph, but got the error 'no rows'" in str(failed)
    assert "self.embedding(n_id)" in str(whole_table("conv", 40))
    assert "training=self.training" in str(random_evaluation())
    assert "but got mean, norm.steps, which the forward pass sets" in str(keeps_state(["mean", "norm.steps"]))


# Models that fail on all trial graphs ################################################################################


def reason(error: Exception, model: nn.Module | None = None, *, own_rows: bool = False) -> Exception:
    batch = next(iter(gas.HaloLoader(undirected_graph(), 4)))
    x = batch.x[: batch.batch_size] if own_rows else batch.x
    arguments = inspect.signature(lambda x, edge_index: None).bind(x, batch.edge_index)
    return explained(error, batch.edge_index.info, arguments, model or sage())


def holding(**tensors: torch.Tensor) -> nn.Module:
    model: nn.Module = sage()
    for name, value in tensors.items():
        setattr(model, name, value)
    return model


def test_rows_of_the_batch_alone() -> None:
    found = reason(RuntimeError("out of bounds"), own_rows=True)
    assert isinstance(found, InputError)
    assert "nodes of the batch alone, such as the model's own output. Pass all rows of batch.x" in str(found)


def test_gradients_inside_the_model() -> None:
    message = "element 0 of tensors does not require grad and does not have a grad_fn"
    found = reason(RuntimeError(message))
    assert isinstance(found, UnsupportedModelError)
    assert "must not compute gradients through its layers" in str(found)


@pytest.mark.parametrize("how", ["attribute", "buffer"])
def test_edges_that_the_model_holds(how: str) -> None:
    edges = undirected_graph().edge_index
    model = holding(edges=edges)
    if how == "buffer":
        model = sage()
        model.register_buffer("edges", edges)
    found = reason(RuntimeError("sizes differ"), model)
    assert isinstance(found, UnsupportedModelError)
    assert "a model that holds edges itself, and the error 'sizes differ'. Store edges in data" in str(found)


@pytest.mark.parametrize("make", [lambda: holding(table=torch.zeros(40, 2)), lambda: nn.Embedding(40, 2)])
def test_a_table_with_a_row_for_each_node(make: Any) -> None:
    found = reason(RuntimeError("sizes differ"), make())
    assert isinstance(found, UnsupportedModelError)
    assert "but got 40 rows, as many as the whole graph has nodes" in str(found)


def test_any_other_error_is_the_model_s_own() -> None:
    own_error, refusal = RuntimeError("mat1 and mat2"), keeps_state(["mean"])
    assert reason(own_error) is own_error
    assert reason(refusal) is refusal
