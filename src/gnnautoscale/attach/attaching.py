"""Attaches histories to a model of PyG layers, and detaches them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]

from gnnautoscale._util import check_weights, checked
from gnnautoscale.attach.autoscaler import Autoscaler, attached, memory_for
from gnnautoscale.forward import Compensation, GraphMemory
from gnnautoscale.graph import Graph, TypedGraph
from gnnautoscale.history import Storage, codec_for

M = TypeVar("M", bound=nn.Module)


@checked(
    model={"fix": "Pass an instance of the model."},
    data={"least": 1, "fix": "Pass data or data.num_nodes."},
    edge_dropout={"least": 0, "below": 1, "fix": "Pass the share of edges to drop."},
    compensate={"fix": "Leave it out for the paper's steps."},
)
def autoscale(
    model: M,
    data: Data | HeteroData | int,
    *,
    storage: Storage = "device",
    dtype: torch.dtype | None = None,
    history_dir: str | Path | None = None,
    edge_dropout: float = 0.0,
    compensate: Compensation = "none",
) -> M:
    """Train a model in batches of a :class:`HaloLoader`, with histories in place of out-of-batch computation.

    The model is any module made of PyG layers; its code stays as it is. Hooks give each layer the right edges, push
    the batch's embeddings and pull the halo's. Called with a batch (``model(batch.x, batch.edge_index)`` or
    ``model(batch)``), the model returns one row per in-batch node. Before it runs, a copy of it is tried on small
    graphs, and again whenever the model, its mode or its arguments have changed; a model that histories cannot make
    exact is refused, with the reason.

    Args:
        model: The model; it is returned.
        data: The training graph, plain or heterogeneous, or the number of nodes of a plain one.
        storage: Where histories live: ``"device"`` or ``"host"`` memory, ``"disk"``, or ``"auto"`` for the first of
            these with enough room.
        dtype: Type of the histories: a floating-point type, or ``torch.int8`` or ``torch.float8_e4m3fn`` with a scale
            per row; by default the type of the embeddings without autocast.
        history_dir: The folder for histories on disk.
        edge_dropout: Share of edges to drop at random in each training step. Self-loops stay, in heterogeneous graphs
            those that a layer on edges of one type sees.
        compensate: How training steps make up for the border of a batch: ``"none"``, the paper, where the gradient ends
            there; ``"gradient"``, where it goes on, with the help of histories of gradients; or ``"momentum"``, where
            the halo's histories move towards what the batch knows of them. See the page about compensation.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> from gnnautoscale import HaloLoader
        >>> data = KarateClub()[0]
        >>> model = autoscale(GCN(34, 16, num_layers=3, out_channels=4), data)
        >>> batch = next(iter(HaloLoader(data, num_parts=4)))
        >>> model(batch.x, batch.edge_index).size(0) == batch.batch_size
        True
    """
    check_weights(model)
    if dtype is not None:
        codec_for(dtype, 1)  # refuses unsupported types
    # Rows that a step moves must not be pulled ahead of it.
    overlap, key = compensate != "momentum", None
    if isinstance(data, int):
        memory: Any = GraphMemory(None, data, storage, dtype, history_dir, overlap=overlap)
    else:
        graph = TypedGraph.of(data) if isinstance(data, HeteroData) else Graph.of(data)
        memory, key = memory_for(graph, storage, dtype, history_dir, overlap=overlap), graph.key
    Autoscaler(model, memory, key, edge_dropout=edge_dropout, compensate=compensate)
    return model


@checked()
def detach(model: M) -> M:
    """Undo :func:`autoscale`; the model keeps its current weights.

    Example:
        >>> from torch_geometric.nn import GCN
        >>> model = detach(autoscale(GCN(8, 16, num_layers=2), 100))
    """
    attached(model).detach()
    return model
