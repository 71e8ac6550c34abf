"""Cuts rows with very many edges into pieces that are summed side by side.

One program adds up the edges of a row one after another, so without this everything waits for the row with the most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LONG = 512  # edges of a piece, at most; a row with more edges than that is long


class Pieces(NamedTuple):
    """The long rows of edges in CSR form, and the pieces they are cut into.

    Attributes:
        long_row: The long rows, ``[num_long]``, ascending, int32.
        first_piece: First piece of each long row, ``[num_long + 1]``, int32.
        piece_begin: First edge of each piece, ``[num_pieces]``, int32.
        piece_end: The edge behind the last of each piece, ``[num_pieces]``, int32.
    """

    long_row: Tensor
    first_piece: Tensor
    piece_begin: Tensor
    piece_end: Tensor

    @staticmethod
    def of(tensors: dict[str, Tensor], suffix: str = "") -> Pieces | None:
        """The pieces among tensors by name, as :meth:`named` returns them; ``None`` if there are none."""
        if "long_row" + suffix not in tensors:
            return None
        return Pieces(*(tensors[name + suffix] for name in Pieces._fields))

    def named(self, suffix: str = "") -> dict[str, Tensor]:
        """The tensors by name.

        Args:
            suffix: What each name ends in.
        """
        return {name + suffix: tensor for name, tensor in zip(self._fields, self, strict=True)}


@torch.inference_mode(False)  # kept for training too
def cut_long_rows(ptr: Tensor, num_edges: int) -> Pieces | None:
    """Cut each row of more than ``LONG`` edges into pieces of at most ``LONG``. On a GPU this waits for it.

    Args:
        ptr: First edge of each row, ``[num_rows + 1]``.
        num_edges: Number of edges.

    Returns:
        The pieces, or ``None`` if no row is long.

    Example:
        >>> pieces = cut_long_rows(torch.tensor([0, 5, 1205, 1210]), 1210)
        >>> pieces.long_row.tolist(), pieces.first_piece.tolist()
        ([1], [0, 3])
        >>> pieces.piece_begin.tolist(), pieces.piece_end.tolist()
        ([5, 517, 1029], [517, 1029, 1205])
    """
    if num_edges <= LONG:
        return None  # known without looking, for which a GPU would be waited for
    degree = ptr.diff()
    row = (degree > LONG).nonzero().squeeze(1)
    if not row.numel():
        return None
    # In 64 bits, since what is added to the last edges may be beyond 32.
    num_pieces = (degree[row].long() + LONG - 1) // LONG
    first = F.pad(num_pieces.cumsum(0), (1, 0))
    place = torch.repeat_interleave(num_pieces)  # of each piece's row among the long rows
    number = torch.arange(place.numel(), device=ptr.device) - first[place]
    begin = ptr[row].long()[place] + number * LONG
    end = torch.minimum(begin + LONG, ptr[row + 1][place].long())
    return Pieces(*(tensor.to(torch.int32) for tensor in (row, first, begin, end)))
