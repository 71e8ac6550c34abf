"""Keeps ghosts up to date: after each step, the rows that it pushed go to the ranks where they are ghosts.

Both sides know the rows of a step in advance, so nothing but rows is sent, those of all slots together, as histories
keep them. They travel while the step goes on with its backward pass, and are in place before the next one pulls: **a
pull sees all pushes of all ranks up to the step before.** With a *lag* they have a step more to travel: then it sees
those of other ranks up to the step before that.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale._util import is_capturing, tensors_in
from gnnautoscale.history import History, RowSums
from gnnautoscale.ranks.agreement import check_agreement
from gnnautoscale.ranks.gradients import GradientMean
from gnnautoscale.ranks.letters import Border, Letter
from gnnautoscale.ranks.parcel import packed, sizes, unpacked
from gnnautoscale.ranks.steps import Steps
from gnnautoscale.ranks.world import Arrival
from gnnautoscale.transfer import BatchRows, Times, Transfer

#: The histories of each type of nodes; a plain graph has one type, without a name.
Histories = Mapping[str, Sequence[History]]
#: Width and type of the histories of each slot, by type of nodes.
Forms = Mapping[str, Mapping[str, Any]]
#: The records of each layer call, by type of nodes.
Records = Mapping[str, Mapping[str, Sequence[Any]]]


class Ghosts:
    """The rows of one model that a rank shares with others: which ones, in which step, and how they get there.

    Of a heterogeneous graph each type of nodes has its rows; those of all types travel together.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, self.shard, self.world = steps, steps.shard, steps.world
        #: Makes the backward passes of the model those of all ranks; ``None`` if none is.
        self.mean: GradientMean | None = None
        #: Whether backward passes need all ranks on the way, not only at their end.
        self.meets_within = False
        #: How many steps the rows of other ranks may lag behind those of the step before, 0 or 1.
        self.lag = 0
        self._borders = {kind: Border(each) for kind, each in self.shard.kinds.items()}
        self._first, self._final = next(iter(self._borders)), next(reversed(self._borders))
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
        # The epoch in which ranks have compared records last.
        self._compared = -1

    @property
    def shared(self) -> object:
        """See :attr:`Sharing.shared`."""
        return self.steps

    def start(self) -> None:
        """See :meth:`Sharing.start`."""
        self.world.open.answer(but=self.mean)

    def begin(self, kind: str, rows: BatchRows) -> None:
        """Begin a step on a batch, which must be the next one of the loader, or the same once more.

        It is called for each type of nodes, in their order.
        """
        if kind == self._first:
            self._passes += 1
            self._arrive(before=self._passes - self.lag)
            self._begun, self._pushed = {}, {}
        self._begun[kind] = tuple(rows.runs)
        if kind == self._final:
            self.steps.begin(tuple(self._begun.values()))

    def aside(self, rows: Mapping[str, BatchRows]) -> AbstractContextManager[None]:
        """See :meth:`Sharing.aside`."""
        return self.steps.aside(rows)

    def end(self, kind: str, pushed: Sequence[History], transfer: Transfer) -> None:
        """Send what a step has pushed to some histories of a type with a transfer; called like `begin`."""
        self._pushed[kind], self._transfers[kind] = pushed, transfer
        if kind == self._final:
            self.send(self._pushed, list(self._transfers.values()))

    def send(self, histories: Histories, transfers: Sequence[Transfer] = ()) -> None:
        """Start to send the rows that the present pass pushed, and to receive those of the other ranks."""
        groups = self.steps.groups

        def pieces(border: Border, peer: int) -> tuple[list[slice], list[slice]]:
            sent = [border.sent(peer, part) for part in groups[self.shard.rank]]
            return sent, [border.ghosts(peer, part) for part in groups[peer]]

        self._compare_records()
        if (posted := self._post(histories, pieces, transfers)) is not None:
            self._pending.append((self._passes, posted))

    def share(self, histories: Histories) -> None:
        """Send all rows that are ghosts elsewhere, and receive all ghosts."""
        self._check_records()

        def pieces(border: Border, peer: int) -> tuple[list[slice], list[slice]]:
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
        return nullcontext() if self.mean is None else self.mean.later()

    def settle(self) -> None:
        """Wait for all rows of other ranks, and write them into the rows of ghosts."""
        self._arrive(before=self._passes + 1)

    def _arrive(self, before: int) -> None:
        """Write the rows of the passes before one."""
        while self._pending and self._pending[0][0] < before:
            self._pending.popleft()[1].open()

    def answer(self) -> None:
        """See :meth:`Sharing.answer`."""
        self.world.open.answer()

    def finish(self, out: Any) -> None:
        """See :meth:`Sharing.finish`."""
        if not is_capturing():
            self._compare_records()  # also of a model without rows to send
        if self.mean is not None and not self.mean.waits and torch.is_grad_enabled():
            self.world.open.add(self.mean, [each for each in tensors_in(out) if each.requires_grad])

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
        if sys.exc_info()[0] is None:  # otherwise others may not come this far
            self.answer()
        self.settle()
        if self.mean is not None:
            self.world.open.remove(self.mean)
            self.mean.remove()
        self.mean, self._forms = None, {}

    def first_late(self, kind: str) -> int:
        """See :meth:`Sharing.first_late`: own rows come first."""
        return self.shard.kinds[kind].num_own

    def around(self, transfer: Transfer, kind: str) -> Transfer:
        """A transfer of the rows of a type that also keeps ghosts up to date."""
        return RankTransfer(transfer, self, kind)

    def follow(self, records: Callable[[], Records]) -> None:
        """Compare what layers make of edges, the ``records`` of each call, with other ranks when it changes.

        A change may be one of this rank alone, so all ask each other: in the first step of every epoch, and when all
        rows are shared.
        """
        self._records, self._seen, self._compared = records, [], -1

    def _compare_records(self) -> None:
        if self._compared != self.steps.epoch:
            self._compared = self.steps.epoch
            self._check_records()

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
        pieces: Callable[[Border, int], tuple[list[slice], list[slice]]],
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


class _Post(NamedTuple):
    """Rows of other ranks on their way, of each type, and the transfers that move rows of these histories."""

    arrival: Arrival
    letters: list[Letter]
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
