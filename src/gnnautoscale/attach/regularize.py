"""Local Lipschitz regularization: layers that react little to small changes tolerate stale histories."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from gnnautoscale._util import map_tensors
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.forward import LayerRun, Observer


class LocalLipschitz(Observer):
    r"""The paper's auxiliary loss, for any autoscaled model.

    .. math::
        \mathcal{L}_{\textrm{reg}} = \sum_{\ell} \frac{1}{|\mathcal{B}|} \sum_{v \in \mathcal{B}}
        \| f^{(\ell)}(\tilde{h}_v^{(\ell - 1)}) - f^{(\ell)}(\tilde{h}_v^{(\ell - 1)} + \epsilon) \|

    with :math:`\epsilon` drawn uniformly from a ball of the given radius, for each node separately. In this context
    each layer runs a second time on such inputs, with the same dropout.

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

    def __init__(self, model: nn.Module, radius: float) -> None:
        if not radius > 0.0:
            raise InputError("radius must be positive", got=f"{radius}", fix="Try a tenth of typical feature values.")
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

        def disturb(value: Tensor) -> Tensor:
            if not value.is_floating_point() or value.dim() < 2 or value.size(0) != run.info.num_rows:
                return value
            return value + ball(value, self.radius)

        args, kwargs = map_tensors(disturb, (run.args, run.kwargs))
        difference = (run.out - run.again(*args, **kwargs))[: run.info.batch_size].flatten(1)
        self._terms.append(torch.linalg.vector_norm(difference, dim=1).mean())


def ball(like: Tensor, radius: float) -> Tensor:
    """Rows drawn uniformly from a ball around zero, shaped like the given ones, ``[num_rows, ...]``."""
    flat = torch.randn_like(like).flatten(1)
    length = radius * torch.rand(flat.size(0), 1, device=flat.device, dtype=flat.dtype).pow(1.0 / flat.size(1))
    rows: Tensor = flat * (length / torch.linalg.vector_norm(flat, dim=1, keepdim=True))
    return rows.view_as(like)
