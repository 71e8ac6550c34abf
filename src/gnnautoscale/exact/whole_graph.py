"""The model's output for all nodes, with the gradients of the whole graph: what users call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import checked, map_tensors, tensors_in, usable_device, weights_of
from gnnautoscale.attach import CallModel, Outputs, attached, call_with_batch, loader_for
from gnnautoscale.errors import InputError
from gnnautoscale.exact.loss import given_gradients
from gnnautoscale.exact.passes import ExactPasses
from gnnautoscale.graph import HaloLoader
from gnnautoscale.replay import on_training_stream


@checked()
def exact_forward(
    model: nn.Module,
    loader: HaloLoader | Data | HeteroData,
    *,
    call: CallModel = call_with_batch,
    device: torch.device | str = "cpu",
) -> Any:
    """Run a model on all nodes of its training graph, one batch at a time, with the gradients of the whole graph.

    In place of ``model(data.x, data.edge_index)`` in a full-batch loop: the output and, after ``loss.backward()``, the
    gradients of the weights are the same, for any loss and any optimizer. Device memory holds one batch. Each layer is
    computed twice for each node, forward and backward.

    The model runs in its present mode. Batch norms in training take the statistics of all nodes. Dropout draws for each
    batch by itself, so a node of the halo has another mask than in its own batch. Histories hold the exact rows of all
    nodes afterwards; their gradients take as much memory again.

    Args:
        model: An autoscaled model.
        loader: Makes the batches. Of a ``Data``, a loader is made and kept with the model.
        call: Calls the model with a batch, if ``model(batch)`` does not fit.
        device: Where the output is gathered, in host memory by default.

    Returns:
        The model's output, one row per node in the order of the data, ``[num_nodes, ...]``; on a heterogeneous graph
        each tensor has one row for each node of its type. Its gradient is computed before the model runs again.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> loader = gas.HaloLoader(data, num_parts=4)
        >>> out = gas.exact_forward(model, loader)
        >>> F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        >>> all(weight.grad is not None for weight in model.parameters())
        True
    """
    device = usable_device(device)
    scaler, loader = attached(model), loader_for(model, loader)
    weights = [weight for weight in weights_of(model) if weight.requires_grad]
    passes = ExactPasses(model, loader, call)
    outputs = Outputs(loader, scaler, device)
    with torch.no_grad(), outputs:
        passes.forward(outputs.add)
    flat = [*tensors_in(outputs.result)]
    if torch.is_grad_enabled() and weights:
        with on_training_stream(passes.device):  # where all gradients of weights are added up
            # The gradient of an output in host memory comes from no stream, so it must not go to weights directly.
            through = [weight.view_as(weight) for weight in weights]
            flat = list(_WholeGraph.apply(passes, weights, flat, *through))  # type: ignore[no-untyped-call]
    each = iter(flat)
    return map_tensors(lambda _: next(each), outputs.result)


class _WholeGraph(torch.autograd.Function):
    """Connects the outputs of all nodes to the weights that they were computed with."""

    @staticmethod
    def forward(
        ctx: Any, passes: ExactPasses, weights: list[Tensor], outputs: list[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs."""
        ctx.passes, ctx.weights = passes, weights
        ctx.before = passes.moment()
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights."""
        passes: ExactPasses = ctx.passes
        if passes.moment() != ctx.before:
            raise InputError(
                "the gradient of an exact pass is computed before the model runs again or changes",
                got="a call of the model, or other weights, since then",
                fix="Call loss.backward() right after gas.exact_forward.",
            )

        def inputs(batch: Data) -> dict[str, Tensor]:
            nodes = [info.nodes for info in passes.of_outputs(batch, len(gradients))]
            chosen = zip(gradients, nodes, strict=True)
            return {str(place): whole[each.to(whole.device)] for place, (whole, each) in enumerate(chosen)}

        found = passes.gradients(ctx.weights, given_gradients(inputs))
        ctx.before = passes.moment()
        return None, None, None, *found
