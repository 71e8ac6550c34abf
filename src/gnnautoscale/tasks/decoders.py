"""Decoders: from the rows of two nodes to the score of an edge between them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from gnnautoscale._util import checked
from gnnautoscale.errors import InputError

#: Names of decoders.
DecoderName = Literal["dot", "bilinear", "distmult"]


class Decoder(nn.Module):
    """Scores a pair by the inner product of a query, which depends on one end and the relation, with the other end.

    A decoder of your own can be any module that takes rows of sources and of targets, both ``[num_pairs, width]``, and
    for typed edges relations ``[num_pairs]``, and returns scores ``[num_pairs]``. One that is derived from this class
    ranks all nodes of a graph faster, by a product of matrices.
    """

    def query(self, rows: Tensor, relation: Tensor | None, *, backwards: bool = False) -> Tensor:
        """Queries for targets, given rows of sources; or for sources, given targets, if ``backwards``; same shape."""
        return rows

    def forward(self, source: Tensor, target: Tensor, relation: Tensor | None = None) -> Tensor:
        """Scores of pairs, ``[num_pairs]``; see the class for shapes."""
        return (self.query(source, relation) * target).sum(dim=-1)


class Dot(Decoder):
    """The inner product of both rows, as in graph autoencoders.

    Example:
        >>> Dot()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]))
        tensor([5.])
    """


class Bilinear(Decoder):
    """The product of both rows with a matrix between them, which tells sources from targets.

    Args:
        width: Number of outputs of the model.
    """

    @checked(width={"least": 1})
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        nn.init.xavier_uniform_(self.weight)

    def query(self, rows: Tensor, relation: Tensor | None, *, backwards: bool = False) -> Tensor:
        """See :meth:`Decoder.query`."""
        return rows @ (self.weight.t() if backwards else self.weight)


class DistMult(Decoder):
    """The product of both rows and that of the relation, for typed edges (Yang et al., 2015).

    Args:
        num_relations: Number of relations.
        width: Number of outputs of the model.
    """

    @checked(num_relations={"least": 1}, width={"least": 1})
    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_relations, width))
        nn.init.uniform_(self.weight, -math.sqrt(6 / width), math.sqrt(6 / width))

    def query(self, rows: Tensor, relation: Tensor | None, *, backwards: bool = False) -> Tensor:
        """See :meth:`Decoder.query`."""
        if relation is None:
            fix = "Set data.edge_label_type, or use another decoder."
            raise InputError("DistMult needs the relation of each pair", got="none", fix=fix)
        return rows * self.weight[relation]


def make_decoder(name: str, num_relations: int | None, width: int) -> nn.Module:
    """The decoder of a name, for as many relations (``None`` for edges without types) and outputs."""
    if name == "dot" and num_relations is None:
        return Dot()
    if name == "bilinear" and num_relations is None:
        return Bilinear(width)
    if name == "distmult" and num_relations is not None:
        return DistMult(num_relations, width)
    raise InputError(
        "a decoder is dot or bilinear for edges without types, distmult for typed ones, or a module",
        got=f"{name!r} for {'edges without types' if num_relations is None else f'{num_relations} relations'}",
        fix="Choose another one, or set data.edge_label_type.",
    )
