"""Random models are exact, or refused if something in them is not harmless.

``benchmarks/random_models.py`` runs as many as one likes.
"""

from __future__ import annotations

from functools import cache

import pytest

from support.oracle import Outcome
from support.random_models import Recipe

SEEDS = 10
TOGETHER = 5


@cache
def outcome_of(seed: int) -> Outcome:
    return Recipe.draw(seed).outcome()


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_exact_or_refused(first: int) -> None:
    bad = {}
    for seed in range(first, first + TOGETHER):
        recipe, found = Recipe.draw(seed), outcome_of(seed)
        assert "fails on the whole graph" not in found.detail, (recipe, found)
        if not found.held or (found.kind == "refused" and recipe.is_harmless):
            bad[seed] = f"{found.kind}: {found.detail}\n{recipe}"
    assert not bad, "\n".join(f"seed {seed}: {text}" for seed, text in bad.items())


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = (Recipe.draw(7) for _ in range(2))
    assert first == second
    assert first.outcome() == outcome_of(7)
    assert Recipe.draw(8) != first
