"""Keeps ghosts up to date: after each step, the rows that it pushed go to the ranks where they are ghosts.

Which parts every rank trains on in every step of an epoch is exchanged once, when they are drawn. So both sides know
the rows of a step in advance, and nothing but rows is sent, those of all slots together, as histories keep them. They
travel while the step goes on with its backward pass, and are in place before the next one pulls: **a pull sees all
pushes of all ranks up to the step before.** With a *lag* they have a step more to travel: then it sees those of other
ranks up to the step before that.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale._util import is_capturing, tensors_in
from gnnautoscale.errors import InputError
from gnnautoscale.history import History, RowSums
from gnnautoscale.kernels import Runs
from gnnautoscale.ranks.agreement import check_agreement
from gnnautoscale.ranks.parcel import packed, sizes, unpacked
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import Arrival, World
from gnnautoscale.transfer import BatchRows, Times, Transfer

#: The parts of one batch, as its rank numbers them.
Group = tuple[int, ...]
#: The histories of each type of nodes; a plain graph has one type, without a name.
Histories = Mapping[str, Sequence[History]]
#: Width and type of the histories of each slot, by type of nodes.
Forms = Mapping[str, Mapping[str, Any]]
#: The records of each layer call, by type of nodes.
Records = Mapping[str, Mapping[str, Sequence[Any]]]


class Ghosts:
    """The rows that a rank shares with others: which ones, in which step, and how they get there.

    Of a heterogeneous graph each type of nodes has its rows; those of all types travel together.
    """

    def __init__(self, shard: Shard | TypedShard, world: World) -> None:
        self.shard, self.world = shard, world
        #: Whether the last forward pass waits for a backward pass, or for :attr:`skip`, which takes part without one.
        self.unanswered = False
        #: Called with outputs whose backward pass needs all ranks.
        self.skip: Callable[[Sequence[Tensor]], None] | None = None
        #: Whether backward passes need all ranks on the way, not only at their end.
        self.meets_within = False
        self._outputs: list[Tensor] = []
        #: A context in which no backward pass is one of all ranks; ``None`` if none is.
        self.alone: Callable[[], AbstractContextManager[None]] | None = None
        #: Called when the model is detached.
        self.on_close: Callable[[], None] | None = None
        #: How many steps the rows of other ranks may lag behind those of the step before, 0 or 1.
        self.lag = 0
        self._borders = {kind: _Border(each) for kind, each in shard.kinds.items()}
        self._first, self._final = next(iter(self._borders)), next(reversed(self._borders))
        # The groups of all ranks in each step of the epoch, and the step of each of this rank's batches.
        self._steps: list[list[Group]] = []
        self._step_of: dict[tuple[object, ...], int] = {}
        self._last = -1
        #: The parts of all ranks in the last step, or pass beside the steps.
        self.groups: list[Group] = []
        self._aside: list[Group] | None = None
        # Of the present step: the rows of each type so far, and the histories that got them.
        self._begun: dict[str, object] = {}
        self._pushed: dict[str, Sequence[History]] = {}
        self._transfers: dict[str, Transfer] = {}
        # How many passes have begun, and what each of them has sent.
        self._passes = 0
        self._pending: deque[tuple[int, _Post]] = deque()
        self._forms: Forms = {}
        self._records: Callable[[], Records] = dict
        self._seen: list[Any] = []
        self._stepped = False

    def announce(self, groups: Sequence[Group], runs: Sequence[Mapping[str, Runs]]) -> None:
        """Tell all ranks which parts this one trains on in each step of an epoch, and learn theirs.

        ``runs`` are the rows of these batches, by type.
        """
        self.answer()
        self._check_records()
        everyone = self.world.gather(list(groups))
        self._steps = [list(step) for step in zip(*everyone, strict=True)]
        self._step_of = {tuple(tuple(each) for each in kinds.values()): step for step, kinds in enumerate(runs)}
        self._last = -1

    def parts_in_step(self, step: int) -> list[Group]:
        """The parts that each rank trains on in a step of the epoch under way."""
        return self._steps[step]

    def begin(self, kind: str, rows: BatchRows) -> None:
        """Begin a step on a batch, which must be the next one of the loader, or the same once more.

        It is called for each type of nodes, in their order.
        """
        if kind == self._first:
            self._passes += 1
            self._arrive(before=self._passes - self.lag)
            self._begun, self._pushed = {}, {}
        self._begun[kind] = tuple(rows.runs)
        if kind != self._final:
            return
        if self._aside is not None:
            self.groups = self._aside
            return
        step = self._step_of.get(tuple(self._begun.values()))
        if step is None or not self._last <= step <= self._last + 1:
            got = "another batch" if step is None else f"batch {step + 1} after batch {self._last + 1}"
            rule = "ranks step together, each on every batch of its loader in turn"
            raise InputError(rule, got=got, fix="Call the model once with each batch that the loader yields.")
        self._last, self.groups = step, self._steps[step]

    @contextmanager
    def aside(self, rows: Mapping[str, BatchRows]) -> Iterator[None]:
        """See :meth:`Sharing.aside`."""
        self.answer()
        groups = self.world.gather(self._parts_of(rows))
        if None in groups:
            got = f"another one on rank {groups.index(None)}"
            fix = "Pass each rank one of its batches, such as loader.batch_of([0])."
            raise InputError("ranks refresh batches of whole parts of their own", got=got, fix=fix)
        self._aside, before = groups, self.unanswered
        try:
            yield
        finally:
            self._aside, self.unanswered = None, before

    def _parts_of(self, rows: Mapping[str, BatchRows]) -> Group | None:
        """The parts that a batch consists of; ``None`` if these are not whole ones of this rank."""
        own = {kind: each.on_host[: each.batch_size] for kind, each in rows.items()}
        shards = self.shard.kinds
        found = [torch.searchsorted(shards[kind].starts, each, right=True) - 1 for kind, each in own.items()]
        parts = torch.unique(torch.cat(found))
        if not parts.numel() or int(parts[-1]) >= self.shard.num_parts:
            return None
        whole = all(int(shards[kind].starts.diff()[parts].sum()) == each.numel() for kind, each in own.items())
        return tuple(parts.tolist()) if whole else None

    def end(self, kind: str, pushed: Sequence[History], transfer: Transfer) -> None:
        """Send what a step has pushed to some histories of a type with a transfer; called like `begin`."""
        self._pushed[kind], self._transfers[kind] = pushed, transfer
        if kind == self._final:
            self.send(self._pushed, list(self._transfers.values()))

    def send(self, histories: Histories, transfers: Sequence[Transfer] = ()) -> None:
        """Start to send the rows that the present pass pushed, and to receive those of the other ranks."""
        groups = self.groups

        def pieces(border: _Border, peer: int) -> tuple[list[slice], list[slice]]:
            sent = [border.sent(peer, part) for part in groups[self.shard.rank]]
            return sent, [border.ghosts(peer, part) for part in groups[peer]]

        if not self._stepped:
            self._stepped = True
            self._check_records()
        if (posted := self._post(histories, pieces, transfers)) is not None:
            self._pending.append((self._passes, posted))

    def share(self, histories: Histories) -> None:
        """Send all rows that are ghosts elsewhere, and receive all ghosts."""
        self.answer()
        self._check_records()

        def pieces(border: _Border, peer: int) -> tuple[list[slice], list[slice]]:
            return ([], []) if peer == self.shard.rank else ([border.all_sent(peer)], [border.all_ghosts(peer)])

        if (posted := self._post(histories, pieces)) is not None:
            posted.open()

    def collect(self, sums: Mapping[str, Sequence[RowSums]]) -> None:
        """See :meth:`Sharing.collect`."""
        for kind, of_kind in sums.items():
            for each in of_kind:
                self._borders[kind].collect(each, self.world)

    def add_up(self, *tensors: Tensor) -> list[Tensor]:
        """See :meth:`Sharing.add_up`."""
        flat = torch.cat([each.detach().flatten().to(self.world.wire, torch.double) for each in tensors])
        pieces = torch.split(self.world.sum(flat).wait(), [each.numel() for each in tensors])
        return [piece.view_as(each).to(each) for piece, each in zip(pieces, tensors, strict=True)]

    def quietly(self) -> AbstractContextManager[None]:
        """See :meth:`Sharing.quietly`."""
        return nullcontext() if self.alone is None else self.alone()

    def settle(self) -> None:
        """Wait for all rows of other ranks, and write them into the rows of ghosts."""
        self._arrive(before=self._passes + 1)

    def _arrive(self, before: int) -> None:
        """Write the rows of the passes before one."""
        while self._pending and self._pending[0][0] < before:
            self._pending.popleft()[1].open()

    def answer(self) -> None:
        """If the last forward pass had no backward pass, such as one without labels, take part in that of the others.

        It is called before all ranks do something else together.
        """
        outputs, self._outputs = self._outputs, []
        if self.unanswered and self.skip is not None:
            self.skip(outputs)

    def answered(self) -> None:
        """Take note that the last forward pass has had its backward pass."""
        self.unanswered, self._outputs = False, []

    def finish(self, out: Any) -> None:
        """See :meth:`Sharing.finish`."""
        self._outputs = [each for each in tensors_in(out) if each.requires_grad] if self.meets_within else []

    def all_forms(self, forms: Forms) -> Forms:
        """See :meth:`Sharing.all_forms`; once there are some, nobody asks again."""
        if not any(self._forms.values()):
            everyone = self.world.gather(forms)
            self._forms = {
                kind: {slot: form for each in everyone for slot, form in each[kind].items()} for kind in forms
            }
        return self._forms

    def close(self) -> None:
        """Wait for rows on their way, which the other ranks have sent, and let the model go."""
        self.settle()
        if self.on_close is not None:
            self.on_close()
        self.skip, self.alone, self.on_close, self.meets_within, self._forms = None, None, None, False, {}
        self.answered()

    def first_late(self, kind: str) -> int:
        """See :meth:`Sharing.first_late`: own rows come first."""
        return self.shard.kinds[kind].num_own

    def around(self, transfer: Transfer, kind: str) -> Transfer:
        """A transfer of the rows of a type that also keeps ghosts up to date."""
        return RankTransfer(transfer, self, kind)

    def follow(self, records: Callable[[], Records]) -> None:
        """Compare what layers make of edges, the ``records`` of each call, with other ranks when it changes.

        A change may be one of this rank alone, so all ask each other: in the first step, whenever an epoch begins, and
        when all rows are shared.
        """
        self._records, self._seen, self._stepped = records, [], False

    def _check_records(self) -> None:
        records = self._records()
        seen = [record for calls in records.values() for made in calls.values() for record in made]
        known = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        (changes,) = self.world.add_up(float(not known))
        if changes:
            self._seen = seen
            check_agreement(self.world, self.shard, records)

    def _post(
        self,
        histories: Histories,
        pieces: Callable[[_Border, int], tuple[list[slice], list[slice]]],
        transfers: Sequence[Transfer] = (),
    ) -> _Post | None:
        """Start to exchange rows of all types together; returns what is on its way, ``None`` without histories.

        ``pieces`` of a border are sent to a peer, and received from it. The rows were pushed with some ``transfers``.
        """
        if not any(histories.values()):
            return None
        with _after_pushes(transfers):
            letters = []
            for kind, of_kind in histories.items():
                if of_kind:
                    border = self._borders[kind]
                    given = [pieces(border, peer) for peer in range(self.shard.size)]
                    letters.append(border.letter(of_kind, *zip(*given, strict=True), wire=self.world.wire))
            sent, received = [letter.sent for letter in letters], [letter.received for letter in letters]
            widths = [letter.rows.size(1) for letter in letters]
            message = packed([letter.rows for letter in letters], sent)
            arrival = self.world.exchange(message, sizes(widths, sent), sizes(widths, received))
        return _Post(arrival, letters, transfers)


class _Border:
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
    ) -> _Letter:
        """The rows of histories to send to each rank, and where those that each rank sends belong."""
        device, own = self._sent_from(histories[0], wire)
        rows = torch.cat([own[:0], *(own[piece] for pieces in sent for piece in pieces)])
        arriving = [torch.arange(piece.start, piece.stop, device=device) for pieces in received for piece in pieces]
        places = self._shard.num_own + torch.cat([own[:0], *arriving])
        raw = [_raw_rows(history, rows).view(torch.uint8) for history in histories]
        together = raw[0] if len(raw) == 1 else torch.cat(raw, dim=1)
        return _Letter(histories, together, _counts(sent), places, _counts(received))

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
class _Letter:
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


class _Post(NamedTuple):
    """Rows of other ranks on their way, of each type, and the transfers that move rows of these histories."""

    arrival: Arrival
    letters: list[_Letter]
    transfers: Sequence[Transfer]

    def open(self) -> None:
        """Wait for the rows, and write them; steps see them from now on."""
        widths = [letter.rows.size(1) for letter in self.letters]
        received = [letter.received for letter in self.letters]
        with _after_pushes(self.transfers):
            arrived = unpacked(self.arrival.wait(), widths, received)
            for letter, raw in zip(self.letters, arrived, strict=True):
                letter.write(raw)
        for transfer in self.transfers:
            transfer.join()


@contextmanager
def _after_pushes(transfers: Sequence[Transfer]) -> Iterator[None]:
    """A context for reading and writing rows after what the transfers of all types have pushed."""
    with ExitStack() as contexts:
        for transfer in transfers:
            contexts.enter_context(transfer.after_pushes())
        yield


class RankTransfer(Transfer):
    """Lets another transfer move the rows of a type of nodes in steps, and sends those that are ghosts elsewhere.

    They are sent at the end of the forward pass, so that they travel during the backward pass; but once the step is
    complete if it was replayed, or if they are pushed only then.
    """

    def __init__(self, inner: Transfer, ghosts: Ghosts, kind: str) -> None:
        self._inner, self._ghosts, self._kind = inner, ghosts, kind
        self._pushed: dict[str, History] = {}
        # Where steps on batches that come back push to, since replayed ones do not say it again.
        self._pushed_before: dict[Hashable, dict[str, History]] = {}
        self._sent = False

    def begin(self, rows: BatchRows, following: BatchRows | None, histories: Mapping[str, History]) -> None:
        """See :meth:`Transfer.begin`."""
        self._rows, self._sent = rows, False
        self._ghosts.begin(self._kind, rows)
        self._pushed = {}
        self._inner.begin(rows, following, histories)

    def look_ahead(self) -> None:
        """See :meth:`Transfer.look_ahead`."""
        self._inner.look_ahead()

    def exchange(self, slot: str, history: History, rows: Tensor, *, push: bool = True) -> Tensor:
        """See :meth:`Transfer.exchange`."""
        if push:
            self._pushed[slot] = history
        return self._inner.exchange(slot, history, rows, push=push)

    def end(self) -> None:
        """See :meth:`Transfer.end`."""
        self._inner.end()
        self._ghosts.unanswered = torch.is_grad_enabled()
        if self._current.key is not None:
            self._pushed_before[self._current.key] = self._pushed
        if not is_capturing() and not self._inner.pushes_late:
            self._send()

    def join(self) -> None:
        """See :meth:`Transfer.join`."""
        self._inner.join()

    def complete(self) -> None:
        """See :meth:`Transfer.complete`."""
        self._inner.complete()
        if not self._sent:
            self._send()

    def _send(self) -> None:
        pushed = self._pushed or self._pushed_before.get(self._current.key, {})
        self._ghosts.end(self._kind, [pushed[slot] for slot in sorted(pushed)], self._inner)
        self._sent = True

    def finish_pushes(self) -> None:
        """See :meth:`Transfer.finish_pushes`."""
        self._inner.finish_pushes()

    def settle(self) -> None:
        """See :meth:`Transfer.settle`."""
        self._ghosts.settle()
        self._inner.settle()

    def close(self) -> None:
        """See :meth:`Transfer.close`."""
        self._inner.close()

    def measure(self, times: Times) -> None:
        """See :meth:`Transfer.measure`."""
        self._inner.measure(times)

    @property
    def version(self) -> int:  # type: ignore[override]
        """Changes when rows move to another address on the device."""
        return self._inner.version

    @property
    def skips_shared(self) -> bool:  # type: ignore[override]
        """Whether the step that has begun found the rows that it shares with the step before on the device."""
        return self._inner.skips_shared


def _raw_rows(history: History, rows: Tensor) -> Tensor:
    """Raw rows of a history, ``[count, raw_width]``, on the device of their index."""
    raw = torch.empty(rows.numel(), history.codec.raw_width, dtype=history.codec.raw_dtype, device=rows.device)
    history.read(rows, raw)
    return raw


def _counts(pieces: Sequence[list[slice]]) -> list[int]:
    return [sum(piece.stop - piece.start for piece in each) for each in pieces]
