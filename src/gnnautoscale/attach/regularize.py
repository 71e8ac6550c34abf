"""Local Lipschitz regularization: layers that react little to small changes tolerate stale histories."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale._util import checked, map_tensors
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.forward import LayerRun, Observer
from gnnautoscale.graph import BatchInfo, TypedInfo


class LocalLipschitz(Observer):
    r"""The paper's auxiliary loss, for any autoscaled model.

    .. math::
        \mathcal{L}_{\textrm{reg}} = \sum_{\ell} \frac{1}{|\mathcal{B}|} \sum_{v \in \mathcal{B}}
        \| f^{(\ell)}(\tilde{h}_v^{(\ell - 1)}) - f^{(\ell)}(\tilde{h}_v^{(\ell - 1)} + \epsilon) \|

    with :math:`\epsilon` drawn uniformly from a ball of the given radius, for each node separately. In this context
    each layer runs a second time on such inputs, with the same dropout. In a ``HeteroConv`` each type of edges has a
    layer of its own.

    Args:
        model: An autoscaled model.
        radius: Radius of the ball.

    Example:
        >>> import gnnautoscale as gas
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GIN
        >>> data = KarateClub()[0]
        >>> model = gas.autoscale(GIN(34, 16, num_layers=2, out_channels=4), data)
        >>> batch = next(iter(gas.HaloLoader(data, num_parts=4)))
        >>> with gas.LocalLipschitz(model, radius=0.1) as penalty:
        ...     out = model(batch.x, batch.edge_index)
        >>> bool(penalty.value() > 0)
        True
    """

    repeats = True

    @checked(radius={"above": 0, "fix": "Try a tenth of typical feature values."})
    def __init__(self, model: nn.Module, radius: float) -> None:
        self._scaler = attached(model)
        self.radius = radius
        self._terms: list[Tensor] = []
        self._open = ExitStack()

    def __enter__(self) -> LocalLipschitz:
        self._terms.clear()
        self._open.enter_context(self._scaler.observed(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def has_terms(self) -> bool:
        """Whether a layer has run in this context."""
        return bool(self._terms)

    def value(self) -> Tensor:
        """The penalty of the forward pass in this context, a scalar to add to the loss."""
        if not self._terms:
            raise InputError(
                "the penalty needs a forward pass",
                got="none",
                fix="Call the model inside `with gas.LocalLipschitz(model, radius) as penalty:`.",
            )
        total: Tensor = torch.stack(self._terms).sum()
        return total

    def layer_ran(self, run: LayerRun) -> None:
        """Repeat a layer on disturbed inputs and keep the mean change of its output."""
        info = run.info
        if isinstance(info, TypedInfo):
            args, kwargs = self._disturbed_by_type((run.args, run.kwargs), info)
            again = run.again(*args, **kwargs)
            changes = [
                _changes(rows, again[kind], info.nodes[kind]) for kind, rows in run.out.items() if rows is not None
            ]
        else:
            args, kwargs = map_tensors(
                partial(self._disturbed, counts=(info.num_rows, info.num_sources)), (run.args, run.kwargs)
            )
            changes = [_changes(run.out, run.again(*args, **kwargs), info)]
        # A rare type may have no node in a batch.
        self._terms += [change.mean() for change in (torch.cat(changes),) if change.numel()]

    def _disturbed(self, value: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Disturb rows, if there is one of these numbers of them."""
        if not value.is_floating_point() or value.dim() < 2 or value.size(0) not in counts:
            return value
        return value + ball(value, self.radius)

    def _disturbed_by_type(self, value: Any, info: TypedInfo) -> Any:
        """Disturb rows in dictionaries by type of nodes."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._disturbed_by_type(item, info) for item in value)
        if not isinstance(value, dict):
            return value
        return {
            key: self._disturbed(item, (info.nodes[key].num_rows,))
            if key in info.nodes and isinstance(item, Tensor)
            else self._disturbed_by_type(item, info)
            for key, item in value.items()
        }


def _changes(rows: Tensor, others: Tensor, info: BatchInfo) -> Tensor:
    """The distance between two versions of each of the batch's own rows, ``[batch_size]``."""
    difference = (rows - others)[: info.batch_size].flatten(1)
    changes: Tensor = torch.linalg.vector_norm(difference, dim=1)
    return changes


def ball(like: Tensor, radius: float) -> Tensor:
    """Rows drawn uniformly from a ball around zero, shaped like the given ones, ``[num_rows, ...]``."""
    flat = torch.randn_like(like).flatten(1)
    length = radius * torch.rand(flat.size(0), 1, device=flat.device, dtype=flat.dtype).pow(1.0 / flat.size(1))
    rows: Tensor = flat * (length / torch.linalg.vector_norm(flat, dim=1, keepdim=True))
    return rows.view_as(like)
