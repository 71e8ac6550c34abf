"""Graphs to train on, and weights to compare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import generate

FEATURES, CLASSES = 6, 3


def community_graph() -> Data:
    return generate.communities(48, degree=4.0, num_features=FEATURES, num_classes=CLASSES)


def two_cliques() -> Data:
    """Nodes 0 to 3 and 4 to 7, each with edges among themselves only; training nodes in the first."""
    pairs = [(i, j) for start in (0, 4) for i in range(start, start + 4) for j in range(start, start + 4) if i != j]
    nodes = torch.arange(8)
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(8, FEATURES, generator=generator),
        edge_index=torch.tensor(pairs).t().contiguous(),
        y=nodes % CLASSES,
        train_mask=nodes < 4,
        val_mask=nodes >= 4,
        test_mask=nodes >= 6,
    )


def multilabel_graph() -> Data:
    data = community_graph()
    data.y = (F.one_hot(data.y, 4) + F.one_hot((data.y + 1) % 4, 4)).float()
    return data


Weights = dict[str, Tensor]


def weights_of(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_bits(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train_on(data: Data, mask: Tensor) -> None:
    """Train on other nodes, which are no longer validated or tested on."""
    data.train_mask, data.val_mask, data.test_mask = mask, data.val_mask & ~mask, data.test_mask & ~mask


def train_on_nearly_all(data: Data) -> None:
    """Train on all nodes but two, so that every part has some of them."""
    last = torch.arange(data.num_nodes) - data.num_nodes
    data.train_mask, data.val_mask, data.test_mask = last < -2, last == -2, last == -1
