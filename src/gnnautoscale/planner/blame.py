"""Says why a model cannot have histories: which module deviates, what probably causes it, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import BoundArguments

import torch
from torch import nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import tensors_in, weights_of
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import Plan, describe, has_rows
from gnnautoscale.graph import BatchInfo


class LayerError(UnsupportedModelError):
    """A layer fails on a batch."""

    def __init__(self, call: str, rule: str, *, got: str, fix: str) -> None:
        super().__init__(rule, got=got, fix=fix)
        self.call = call


class DeviationError(Exception):
    """A module computes other rows in a batch than on the whole graph.

    ``module`` is ``None`` for the model's output. If ``mixed_before``, what the module was called with differs already.
    The ``suspects`` ran before it, and their outputs cannot be compared row by row.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        *,
        mixed_before: bool = False,
        suspects: Sequence[tuple[str, nn.Module]] = (),
    ) -> None:
        super().__init__(name)
        self.name, self.module, self.mixed_before, self.suspects = name, module, mixed_before, list(suspects)

    def error(self, plan: Plan, used_outside: Sequence[str], *, training: bool) -> UnsupportedModelError:
        """The error to show; ``used_outside`` are the batch's attributes that are used outside of layers."""
        where = " in training mode" if training else ""
        edges = [name for name in used_outside if name != "n_id"]
        attention = next((item for item in self.suspects if "attention" in type(item[1]).__name__.lower()), None)
        if attention is not None:
            return UnsupportedModelError(
                f"every module must compute a node's row from its neighbourhood{where}",
                got=f"{describe(*_clean(attention))}, attention over all nodes of a batch, which histories cannot "
                "replace",
                fix="Use a layer that attends to neighbours, such as GATConv or TransformerConv, or train full batch.",
            )
        call = plan.calls.get(self.name)
        if call is not None and self.module is not None and not self.mixed_before:
            own_edges = any(name is not None and name.endswith("edge_index") for name in call.attributes)
            if not own_edges:
                return UnsupportedModelError(
                    f"{describe(self.name, self.module)} needs the batch's own edges{where}",
                    got="edges that the model changed before the layer (self-loops, order, direction, a selection): "
                    "the layer's degrees and weights are then wrong for the halo",
                    fix="Change the edges once, in data, before the loader is made, and pass batch.edge_index as it "
                    "is. To drop edges at random, use autoscale(..., edge_dropout=p).",
                )
            if "edge" in call.kinds:
                return UnsupportedModelError(
                    f"{describe(self.name, self.module)} needs the batch's own edge weights{where}",
                    got="weights or attributes of edges that the model changed before the layer, which normalizes "
                    "them: in a batch the halo's are missing",
                    fix="Compute them once for the whole graph, store them in data, and pass them as they are.",
                )
        if plan.explicit:
            return UnsupportedModelError(
                "a ScalableGNN exchanges the rows of all layers but the last by push_and_pull, with a history for each",
                got=f"other rows in a batch than in the whole graph from '{self.name}' on{where}",
                fix="Call self.push_and_pull(self.histories[i], x, n_id) after layer i.",
            )
        if self.mixed_before or self.module is None:
            before = "" if self.module is None else f" before {describe(*_clean((self.name, self.module)))}"
            place = before or " after the last layer"
            if edges:
                return UnsupportedModelError(
                    f"a row must depend on its node's neighbourhood only, not on what else is in the batch{where}",
                    got=f"values{place} that are computed from the batch's edges ({edges[0]}) outside of layers, such "
                    "as a degree, which is wrong for the halo; or that mix all nodes of a batch",
                    fix="Compute degrees and the like once for the whole graph, store them in data (data.degree = "
                    "...), and pass them on; move pooling and statistics over all nodes out of the model.",
                )
            return UnsupportedModelError(
                f"every row of the model must depend on its node's neighbourhood only{where}",
                got=f"something{place} that mixes all nodes of a batch",
                fix="Move pooling and statistics over all nodes (a mean, a norm over rows, a sort) out of the model.",
            )
        name = describe(*_clean((self.name, self.module)))
        if isinstance(self.module, MessagePassing):
            return UnsupportedModelError(
                f"{name} must compute the same rows in a batch as in the whole graph{where}",
                got="different rows: the layer uses more of the graph than a node's neighbours",
                fix="Replace it by a layer that computes each node's row from its neighbours.",
            )
        norm = "norm" in type(self.module).__name__.lower()
        return UnsupportedModelError(
            f"{name} must compute the same rows in a batch as in the whole graph{where}",
            got="different rows: it mixes all nodes of a batch",
            fix="Use a norm that treats each node separately, such as BatchNorm or LayerNorm(mode='node')."
            if norm
            else "Replace it by a module that computes each node's row from that row.",
        )


def failed_layer(call: str, layer: MessagePassing, error: Exception) -> LayerError:
    """The error of a layer that runs on the whole graph but not on a batch."""
    return LayerError(
        call,
        f"{describe(call, layer)} must run on a batch as on the whole graph",
        got=f"the error '{error}'",
        fix="Replace it by a layer that computes each node's row from its neighbours.",
    )


def whole_table(user: str, num_rows: int) -> UnsupportedModelError:
    """The error of a model or layer that uses all rows of a table, one for each node of the graph, in a batch."""
    return UnsupportedModelError(
        f"'{user}' must use one row for each node of the batch and its halo",
        got=f"{num_rows} rows, as many as the whole graph has nodes, such as all rows of an embedding",
        fix="Look rows up by batch.n_id: self.embedding(n_id) instead of self.embedding.weight.",
    )


def random_evaluation() -> UnsupportedModelError:
    """The error of a model that draws random numbers in evaluation mode."""
    return UnsupportedModelError(
        "an autoscaled model computes the same in every evaluation",
        got="an output that is random in evaluation mode, by dropout that is always on, for example",
        fix="Pass training=self.training to dropout; to sample from a model with dropout, call it in training mode.",
    )


def keeps_state(attributes: Sequence[str]) -> UnsupportedModelError:
    """The error of a model whose output depends on its calls before."""
    return UnsupportedModelError(
        "a forward pass must not depend on what an earlier one computed from its batch",
        got=f"{', '.join(attributes)}, which the forward pass sets and uses again",
        fix="Compute it once from the whole graph before training, or again in every pass.",
    )


def explained(error: Exception, info: BatchInfo, arguments: BoundArguments, model: nn.Module) -> Exception:
    """What to raise if a model fails on all trial graphs: the usual cause if it shows, or the error itself."""
    given = [value for value in tensors_in([*arguments.arguments.values()]) if value.is_floating_point()]
    if info.num_halo and any(has_rows(value, info.batch_size) for value in given):
        return InputError(
            f"an autoscaled model takes one row for each of the {info.num_rows} nodes of the batch and its halo",
            got=f"rows of the {info.batch_size} nodes of the batch alone, such as the model's own output",
            fix="Pass all rows of batch.x; make what calls itself on its output one model.",
        )
    if isinstance(error, UnsupportedModelError):
        return error
    if "differentiated" in str(error) or "does not require grad" in str(error):
        return UnsupportedModelError(
            "a forward pass must not compute gradients through its layers",
            got=f"the error '{error}'",
            fix="Compute them outside of the model: rows that come from histories are constants.",
        )
    held = [value for module in model.modules() for value in tensors_in([*vars(module).values()])]
    held += [*weights_of(model), *model.buffers()]
    if any(value.dtype == torch.long and value.dim() == 2 and value.size(0) == 2 for value in held):
        return UnsupportedModelError(
            "layers must run on the batch's edges",
            got=f"a model that holds edges itself, and the error '{error}'",
            fix="Store edges in data, and take them as an argument: model(batch.x, batch.edge_index).",
        )
    if any(has_rows(value, info.graph.num_nodes) for value in held):
        return whole_table(type(model).__name__, info.graph.num_nodes)
    return error


def _clean(item: tuple[str, nn.Module]) -> tuple[str, nn.Module]:
    return item[0].strip(), item[1]
