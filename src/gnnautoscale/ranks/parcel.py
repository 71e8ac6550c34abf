"""One message for rows of several widths, such as those of several types of nodes: bytes, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sizes(widths: Sequence[int], counts: Sequence[Sequence[int]]) -> list[int]:
    """The bytes of each rank, given the width of each table and how many of its rows each rank gets.

    Example:
        >>> sizes([4, 8], [[1, 2], [0, 3]])
        [4, 32]
    """
    return [sum(count * width for count, width in zip(each, widths, strict=True)) for each in zip(*counts, strict=True)]


def packed(tables: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """The rows of several tables in one message, all of them for the first rank first.

    Args:
        tables: Rows as bytes, to the first rank first, ``[num_rows, width]`` each.
        counts: For each table, how many of its rows each rank gets.

    Example:
        >>> tables = torch.tensor([[1], [2]]).byte(), torch.tensor([[3, 4], [5, 6]]).byte()
        >>> message = packed(tables, [[1, 1], [0, 2]])
        >>> message.tolist()
        [1, 2, 3, 4, 5, 6]
        >>> [rows.tolist() for rows in unpacked(message, [1, 2], [[1, 1], [0, 2]])]
        [[[1], [2]], [[3, 4], [5, 6]]]
    """
    if len(tables) == 1:
        return tables[0].flatten()
    of_ranks = zip(*(torch.split(table, list(count)) for table, count in zip(tables, counts, strict=True)), strict=True)
    return torch.cat([rows.flatten() for of_rank in of_ranks for rows in of_rank])


def unpacked(message: Tensor, widths: Sequence[int], counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The rows of each table in a message, ``[num_rows, width]`` each; the inverse of :func:`packed`."""
    if len(widths) == 1:
        return [message.view(-1, widths[0])]
    lengths = [
        count * width for of_rank in zip(*counts, strict=True) for count, width in zip(of_rank, widths, strict=True)
    ]
    pieces = torch.split(message, lengths)
    return [torch.cat(pieces[number :: len(widths)]).view(-1, width) for number, width in enumerate(widths)]
