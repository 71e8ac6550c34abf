"""Training on several ranks that share a heterogeneous graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.training.ranked import RankStrategy, first_rows
from gnnautoscale.training.typed_strategy import TypedStrategy


class TypedRankStrategy(RankStrategy, TypedStrategy):
    """Trains on one rank's batches of several types; see :class:`RankStrategy`."""

    @property
    def _seen(self) -> tuple[Data, Tensor]:
        """See :class:`RankStrategy`: the nodes of the type with targets."""
        return self._typed.train, self._loader.nodes[self._typed.target]

    def _saved_rows(self) -> dict[str, Any]:
        """The rows of own nodes of each type."""
        saved, counts = TypedStrategy._saved_rows(self)["types"], self._loader.own_counts
        return {"types": {kind: first_rows(rows, counts[kind]) for kind, rows in saved.items()}}
