"""The paper's interface: a base class whose subclasses push and pull themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnautoscale._util import checked
from gnnautoscale.attach.autoscaler import Autoscaler
from gnnautoscale.errors import InputError
from gnnautoscale.forward import GraphMemory, running_session
from gnnautoscale.history import Storage


@dataclass(frozen=True)
class HistorySlot:
    """Name and row width of a history, for :meth:`ScalableGNN.push_and_pull`."""

    name: str
    width: int


class _AttachOnceBuilt(type):
    """Attaches histories once all constructors have run and all layers exist."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        Autoscaler(model, GraphMemory(None, model.num_nodes, *model._memory_options), None, explicit=True)
        return model


class ScalableGNN(nn.Module, metaclass=_AttachOnceBuilt):
    r"""A model that places its histories itself.

    Subclasses build their layers and call :meth:`push_and_pull` between them, as in the paper's Listing 2. Call them
    with batches of a :class:`HaloLoader`: ``model(batch.x, batch.edge_index, batch.n_id)``.

    Args:
        num_nodes: Number of nodes of the training graph.
        hidden_channels: Width of the histories.
        num_layers: Number of layers, one more than histories.
        storage: See :func:`autoscale`.
        dtype: See :func:`autoscale`.
        history_dir: See :func:`autoscale`.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> class GNN(ScalableGNN):
        ...     def __init__(self, num_nodes: int) -> None:
        ...         super().__init__(num_nodes, hidden_channels=16, num_layers=2)
        ...         self.first, self.second = SAGEConv(34, 16), SAGEConv(16, 4)
        ...
        ...     def forward(self, x: Tensor, adj_t: Tensor, n_id: Tensor) -> Tensor:
        ...         x = self.first(x, adj_t).relu()
        ...         x = self.push_and_pull(self.histories[0], x, n_id)
        ...         return self.second(x, adj_t)
        >>> len(GNN(34).histories)
        1
    """

    @checked(num_nodes={"least": 1}, hidden_channels={"least": 1}, num_layers={"least": 1, "below": 2**16})
    def __init__(
        self,
        num_nodes: int,
        hidden_channels: int,
        num_layers: int,
        *,
        storage: Storage = "device",
        dtype: torch.dtype | None = None,
        history_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.num_nodes, self._memory_options = num_nodes, (storage, dtype, history_dir)
        self.histories = [HistorySlot(f"histories.{i}", hidden_channels) for i in range(num_layers - 1)]

    def push_and_pull(self, history: HistorySlot, x: Tensor, n_id: Tensor) -> Tensor:
        """Push the batch's rows to a history and pull the halo's rows from it.

        Args:
            history: One of ``self.histories``.
            x: Embeddings of batch and halo, ``[num_rows, hidden_channels]``; the halo's rows are ignored.
            n_id: The batch's ``n_id``, ``[num_rows]``.

        Returns:
            Embeddings of batch and halo, ``[num_rows, hidden_channels]``; the halo's are constants to autograd.
        """
        session = running_session(self)
        if session is None:  # detached: the whole graph at once
            return x
        if x.dim() != 2 or x.size(1) != history.width or n_id.numel() != session.info.num_rows:
            raise InputError(
                f"this history takes rows of width {history.width}, one for each of the batch's "
                f"{session.info.num_rows} nodes in n_id",
                got=f"rows of shape {tuple(x.shape)} and n_id of shape {tuple(n_id.shape)}",
                fix="Pass batch.n_id, and set hidden_channels to the width of the inner layers.",
            )
        rows: Tensor = session.slot(history.name, lambda: x)
        return rows
