"""Pairs drawn into batches with sampled neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.tasks.link_sampling import LinkSampleLoader
from gnnautoscale.tasks.pairs import EdgeKind, Pairs, known_keys
from gnnautoscale.tasks.ranking import KnownEdges

NODES = 40


def ring(*, typed: bool = False) -> Data:
    """Nodes on a ring that pass messages to the next one, and to the one after as pairs to predict."""
    node = torch.arange(NODES)
    kinds = {"edge_type": node % 2, "edge_label_type": node % 2} if typed else {}
    pairs = torch.stack([node, (node + 2) % NODES])
    return Data(
        x=node.float().unsqueeze(1),
        edge_index=torch.stack([node, (node + 1) % NODES]),
        edge_label_index=pairs,
        **kinds,
    )


def loader(data: Data, negatives: int, num_batches: int = 4) -> LinkSampleLoader:
    known = KnownEdges(known_keys(data, EdgeKind.of([data])), NODES)
    return LinkSampleLoader(data, Pairs.of(data), known, negatives, [1], num_batches, seed=1)


def drawn_in_an_epoch(given: LinkSampleLoader) -> Tensor:
    return torch.cat([batch.links for batch in given])


@pytest.mark.parametrize("typed", [False, True])
def test_an_epoch_has_every_edge_once_and_negatives_over_the_whole_graph(typed: bool) -> None:
    data = ring(typed=typed)
    links = drawn_in_an_epoch(loader(data, 50))
    edges, others = links[links[:, 2] == 1], links[links[:, 2] == 0]
    assert torch.equal(edges[edges[:, 0].argsort(), :2].t(), data.edge_label_index)
    assert 0.85 * 50 * NODES < others.size(0) <= 50 * NODES
    distance = (others[:, 1] - others[:, 0]) % NODES
    # No edge and no node by itself, but everything else; as the other relation, the next node may follow.
    assert set(distance.tolist()) == {*range(3, NODES), *([1] if typed else [])}
    if typed:
        known = {(each, (each + step) % NODES, each % 2) for each in range(NODES) for step in (1, 2)}
        assert not known & {(a, b, kind) for a, b, _, kind in others.tolist()}


def test_the_nodes_of_a_batch_are_the_ends_of_its_pairs_and_their_neighbours() -> None:
    for batch in loader(ring(), 2):
        own = batch.n_id[: batch.batch_size]
        assert torch.equal(own, torch.unique(batch.links[:, :2]))
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
        before = set(((own - 1) % NODES).tolist())  # who has an edge into these
        assert set(batch.n_id.tolist()) == set(own.tolist()) | before
        assert "edge_label_index" not in batch


def test_epochs_differ_and_seeds_repeat_them() -> None:
    first, second = loader(ring(), 1), loader(ring(), 1)
    once = drawn_in_an_epoch(first)
    assert torch.equal(once, drawn_in_an_epoch(second))
    assert not torch.equal(once, drawn_in_an_epoch(first))


def test_there_is_at_most_one_batch_per_pair() -> None:
    given = loader(ring(), 0, num_batches=100)
    assert len(given) == NODES
    assert [batch.links.size(0) for batch in given] == [1] * NODES
