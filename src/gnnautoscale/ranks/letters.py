"""Rows of several histories on their way to other ranks: which ones each of them gets, and where they belong there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnautoscale.history import History, RowSums
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.world import World


class Border:
    """Which rows of one type of nodes a rank sends, and which of its ghosts it receives, part by part."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        # The rows that are sent, wherever they were looked up.
        self._sent = {shard.sent.device: shard.sent}
        self._sent_starts, self._ghost_starts = shard.sent_starts.tolist(), shard.ghost_starts.tolist()
        self._first_part = shard.first_part.tolist()

    def sent(self, peer: int, part: int) -> slice:
        """Where the rows of an own part lie that a peer gets."""
        return slice(self._sent_starts[peer][part], self._sent_starts[peer][part + 1])

    def all_sent(self, peer: int) -> slice:
        """Where all rows lie that a peer gets."""
        return slice(self._sent_starts[peer][0], self._sent_starts[peer][-1])

    def ghosts(self, peer: int, part: int) -> slice:
        """Which ghosts are those of a peer's part."""
        first = self._first_part[peer] + part
        return slice(self._ghost_starts[first], self._ghost_starts[first + 1])

    def all_ghosts(self, peer: int) -> slice:
        """Which ghosts are those of a peer."""
        return slice(*(self._ghost_starts[self._first_part[end]] for end in (peer, peer + 1)))

    def letter(
        self,
        histories: Sequence[History],
        sent: Sequence[list[slice]],
        received: Sequence[list[slice]],
        *,
        wire: torch.device,
    ) -> Letter:
        """The rows of histories to send to each rank, and where those that each rank sends belong."""
        device, own = self._sent_from(histories[0], wire)
        rows = torch.cat([own[:0], *(own[piece] for pieces in sent for piece in pieces)])
        arriving = [torch.arange(piece.start, piece.stop, device=device) for pieces in received for piece in pieces]
        places = self._shard.num_own + torch.cat([own[:0], *arriving])
        raw = [_raw_rows(history, rows).view(torch.uint8) for history in histories]
        together = raw[0] if len(raw) == 1 else torch.cat(raw, dim=1)
        return Letter(histories, together, _counts(sent), places, _counts(received))

    def collect(self, sums: RowSums, world: World) -> None:
        """Add what was added to rows of ghosts to those of the ranks that own them."""
        device, own = self._sent_from(sums.history, world.wire)
        peers = [peer for peer in range(self._shard.size) if peer != self._shard.rank]
        ghosts, rows = ({peer: of(peer) for peer in peers} for of in (self.all_ghosts, self.all_sent))
        places = [torch.arange(piece.start, piece.stop, device=device) for piece in ghosts.values()]
        given = sums.read(self._shard.num_own + torch.cat(places), dtype=sums.history.dtype)
        sent, received = (
            [each[peer].stop - each[peer].start if peer in each else 0 for peer in range(self._shard.size)]
            for each in (ghosts, rows)
        )
        arrived = torch.split(world.exchange(given, sent, received).wait().to(device), received)
        for peer, piece in rows.items():
            sums.add(arrived[peer], own[piece])

    def _sent_from(self, history: History, wire: torch.device) -> tuple[torch.device, Tensor]:
        """Where rows of a history are read and written, and which own rows are sent, there."""
        # A GPU may be the wire of ranks that compute on the host; it cannot read their histories.
        device = history.raw.device if history.raw.is_cuda or not history.serves(wire) else wire
        return device, self._sent.setdefault(device, self._shard.sent.to(device))


@dataclass(frozen=True)
class Letter:
    """Rows of all histories of one type of nodes, side by side as bytes.

    Attributes:
        histories: The histories.
        rows: Those to send, to the first rank first, ``[num_sent, width]``.
        sent: How many each rank gets.
        places: The rows of those to receive, ``[num_received]``.
        received: How many of them come from each rank.
    """

    histories: Sequence[History]
    rows: Tensor
    sent: list[int]
    places: Tensor
    received: list[int]

    def write(self, raw: Tensor) -> None:
        """Write what has arrived, ``[num_received, width]``."""
        first = 0
        for history in self.histories:
            width = history.codec.raw_width * history.codec.raw_dtype.itemsize
            rows = raw[:, first : first + width].to(self.rows.device).contiguous().view(history.codec.raw_dtype)
            history.write(rows, self.places)
            first += width


def _raw_rows(history: History, rows: Tensor) -> Tensor:
    """Raw rows of a history, ``[count, raw_width]``, on the device of their index."""
    raw = torch.empty(rows.numel(), history.codec.raw_width, dtype=history.codec.raw_dtype, device=rows.device)
    history.read(rows, raw)
    return raw


def _counts(pieces: Sequence[list[slice]]) -> list[int]:
    return [sum(piece.stop - piece.start for piece in each) for each in pieces]
