"""Random models on heterogeneous graphs are exact, or refused if something in them is not harmless.

``benchmarks/random_models.py --typed`` runs as many as one likes.
"""

from __future__ import annotations

import pytest

from support.random_typed_models import TypedRecipe

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


@pytest.mark.parametrize("seed", range(6))
def test_exact_or_refused(seed: int) -> None:
    recipe = TypedRecipe.draw(seed)
    found = recipe.outcome()
    assert found.held, (found, recipe)
    assert found.kind == ("exact" if recipe.is_harmless else "refused"), (found, recipe)
