"""Small graphs with edges to predict."""

from __future__ import annotations

import random

import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit  # type: ignore[import-untyped]

from support.communities import community_graph

Splits = tuple[Data, Data, Data]


def splits(*, negatives: bool = True, disjoint: float = 0.4) -> Splits:
    """Edges of a small graph, some to pass messages, some to train, validate and test on."""
    torch.manual_seed(3)
    random.seed(3)  # PyG draws negatives from it
    found: Splits = RandomLinkSplit(
        num_val=0.1,
        num_test=0.1,
        is_undirected=True,
        disjoint_train_ratio=disjoint,
        add_negative_train_samples=negatives,
    )(Data(x=community_graph().x, edge_index=community_graph().edge_index))
    return found
