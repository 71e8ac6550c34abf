"""Ranks of true edges, against a plain double loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnnautoscale.tasks import Bilinear, DistMult, Dot, ranking
from gnnautoscale.tasks.pairs import Pairs, keys_of
from gnnautoscale.tasks.ranking import KnownEdges, ranks

NODES, WIDTH, RELATIONS = 20, 6, 3


class Plain(nn.Module):
    """A decoder that knows no shortcut."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, source: Tensor, target: Tensor, relation: Tensor | None = None) -> Tensor:
        out: Tensor = self.decoder(source, target, relation)
        return out


def triples(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(NODES, (count, 3), generator=generator)
    found[:, 1] %= RELATIONS
    return found


def by_hand(decoder: nn.Module, out: Tensor, asked: Tensor, known: Tensor, typed: bool, backwards: bool) -> list[float]:
    true = {(int(a), int(r) if typed else 0, int(b)) for a, r, b in known}
    found = []
    for head, relation, tail in asked.tolist():
        kind = torch.tensor([relation]) if typed else None

        def score(a: int, b: int, kind: Tensor | None = kind) -> float:
            return float(decoder(out[a : a + 1], out[b : b + 1], kind))

        own, above, level = score(head, tail), 0, 0
        for other in range(NODES):
            pair = (other, tail) if backwards else (head, other)
            if pair == (head, tail) or (pair[0], relation if typed else 0, pair[1]) in true:
                continue
            value = score(*pair)
            above, level = above + (value > own + 1e-6), level + (abs(value - own) <= 1e-6)
        found.append(1 + above + level / 2)
    return found


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["dot", "bilinear", "distmult"])
@pytest.mark.parametrize("plain", [False, True])
@torch.no_grad()
def test_ranks_among_all_nodes(kind: str, plain: bool, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_MOST_SCORES", 3 * NODES)  # several pieces
    monkeypatch.setattr(ranking, "_MOST_VALUES", 7 * WIDTH)
    torch.manual_seed(0)
    decoder = {"dot": Dot(), "bilinear": Bilinear(WIDTH), "distmult": DistMult(RELATIONS, WIDTH)}[kind]
    out, asked = torch.randn(NODES, WIDTH), triples(10, 1)
    out[3] = out[4]  # a tie
    known, typed = torch.cat([asked, triples(60, 2)]), kind == "distmult"
    source, relation, target = known.t()
    first, second = (target, source) if backwards else (source, target)
    edges = KnownEdges(keys_of(first, second, relation if typed else None, NODES), NODES)
    label = torch.ones(10, dtype=torch.bool)
    pairs = Pairs(asked[:, [0, 2]].t().contiguous(), label, asked[:, 1].contiguous() if typed else None, NODES)
    found = ranks(Plain(decoder) if plain else decoder, out, pairs, edges, backwards=backwards)
    assert found.tolist() == by_hand(decoder, out, asked, known, typed, backwards)


@torch.no_grad()
def test_ranks_among_candidates() -> None:
    out = torch.arange(6.0).unsqueeze(1)
    pairs = Pairs(torch.tensor([[1, 1], [3, 5]]), torch.ones(2, dtype=torch.bool), None, 6)
    known = KnownEdges(keys_of(torch.tensor([1]), torch.tensor([4]), None, 6), 6)
    candidates = torch.tensor([[4, 5, 3, 2], [4, 3, 2, 5]])
    # Of the first, 4 is a known edge, 5 is better and 3 is the target itself; of the second, nothing is better.
    assert ranks(Dot(), out, pairs, known, candidates).tolist() == [2.0, 1.0]


def test_known_edges() -> None:
    source, target = torch.tensor([2, 2, 0]), torch.tensor([1, 3, 0])
    known = KnownEdges(keys_of(source, target, None, 4), 4)
    assert known.contain(torch.tensor([2, 2, 3]), torch.tensor([3, 0, 3]), None).tolist() == [True, False, False]
    rows, partners = known.partners(torch.tensor([1, 2, 0]), None)
    assert (rows.tolist(), partners.tolist()) == ([1, 1, 2], [1, 3, 0])
    nothing = KnownEdges(torch.empty(0, dtype=torch.long), 4)
    assert nothing.contain(source, target, None).tolist() == [False] * 3
