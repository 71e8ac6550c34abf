"""The processes that train together: started from torchrun's environment, and what they say to each other.

All of it is collectives of ``torch.distributed``: nccl between GPUs, gloo otherwise. A collective that fails because a
process is gone raises a :class:`LostRankError`, so that no process waits for another for ever.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gnnautoscale._util import checked, versions
from gnnautoscale.errors import InputError
from gnnautoscale.ranks.open_passes import OpenPasses

T = TypeVar("T")
_HOST = torch.device("cpu")
# Seconds that a rank waits for another one.
_LONGEST_WAIT = 600.0


class LostRankError(RuntimeError):
    """Another process of a distributed run is gone, or did not answer in time."""


class Arrival:
    """Rows that other ranks have sent, ``[count, width]``, on their way."""

    def __init__(self, world: World, rows: Tensor, work: Any) -> None:
        self._world, self._rows, self._work = world, rows, work

    def wait(self) -> Tensor:
        """The rows; the first call waits for them."""
        if self._work is not None:
            self._world.guarded(self._work.wait)
            self._work = None
        return self._rows


class World:
    """The ranks of a run, seen by one of them.

    Every method but the properties is a collective: all ranks have to call it, in the same order.

    Attributes:
        rank: The number of this process.
        size: The number of processes; 1 without torchrun.
        device: Where this rank computes if it has a choice.

    Args:
        timeout: Seconds after which a rank gives up waiting for what another one's host says, beside GPUs.
    """

    @checked(rank={"least": 0}, size={"least": 1}, timeout={"above": 0})
    def __init__(
        self, rank: int = 0, size: int = 1, device: torch.device = _HOST, *, timeout: float = _LONGEST_WAIT
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        nccl = size > 1 and dist.get_backend() == "nccl"
        #: Where tensors that are sent have to be.
        self.wire = device if nccl else _HOST
        # What the host says itself has a way of its own, on which nobody waits for a GPU.
        self._talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if nccl else None
        #: How many ranks share this machine.
        self.on_machine = size
        #: Forward passes whose backward pass may be one of other ranks alone.
        self.open = OpenPasses()
        #: How many bytes of rows this rank has sent to others so far.
        self.sent_bytes = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def guarded(self, call: Callable[[], T]) -> T:
        """Call something that needs the other ranks; that one of them is gone is said in one sentence."""
        try:
            return call()
        except LostRankError:  # torchrun was faster
            raise
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.size} ends, because another rank has failed or did not answer in time "
                f"({_reason(error)}). Look at the first error of the others; a run with checkpoints can be resumed."
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        self.open.answer()
        found: list[Any] = [None] * self.size
        self.guarded(lambda: dist.all_gather_object(found, value, group=self._talk))
        return found

    def add_up(self, *numbers: float) -> list[float]:
        """The sums of numbers over all ranks; the host waits for the others, but not for a GPU.

        Example:
            >>> World().add_up(1, 2.5)
            [1.0, 2.5]
        """
        sums = torch.tensor(numbers, dtype=torch.double)
        if self.size > 1:
            self.guarded(lambda: dist.all_reduce(sums, group=self._talk))
        found: list[float] = sums.tolist()
        return found

    def gather_to_first(self, value: Tensor) -> list[Tensor] | None:
        """The tensors of all ranks, equal but for their first dimension, on the first rank; ``None`` on the others."""
        if self.size == 1:
            return [value]
        sizes = [0] * self.size
        sizes[0] = value.size(0)
        counts = self.gather(value.size(0))
        arrival = self.exchange(value, sizes, counts if self.is_first else [0] * self.size)
        rows = arrival.wait().to(value.device)
        return list(torch.split(rows, counts)) if self.is_first else None

    def rows_of_others(self, *tables: Tensor) -> list[Tensor]:
        """Give all other ranks some rows, and receive theirs, those of the lowest rank first.

        Args:
            tables: Tensors of as many rows each, ``[count, ...]``; other ranks may have other numbers of rows.

        Returns:
            For each of them the rows of the other ranks, on the same device.
        """
        count = tables[0].size(0)
        here = [count if rank == self.rank else 0 for rank in range(self.size)]
        received, sent = [int(each) for each in self.add_up(*here)], [count] * self.size
        sent[self.rank] = received[self.rank] = 0
        rows = [table.detach().contiguous().view(count, table.shape[1:].numel()).view(torch.uint8) for table in tables]
        arrived = self.exchange(torch.cat(rows, dim=1).repeat(self.size - 1, 1), sent, received).wait()
        pieces = torch.split(arrived, [each.size(1) for each in rows], dim=1)
        found = []
        for piece, table in zip(pieces, tables, strict=True):
            aligned = torch.empty(piece.shape, dtype=torch.uint8, device=piece.device).copy_(piece)
            found.append(aligned.view(table.dtype).view(-1, *table.shape[1:]).to(table.device))
        return found

    def broadcast(self, value: Any) -> Any:
        """The value of the first rank."""
        if self.size == 1:
            return value
        self.open.answer()
        box = [value]
        self.guarded(lambda: dist.broadcast_object_list(box, src=0, group=self._talk))
        return box[0]

    def same(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors the values that they have on the first rank, in place."""
        for tensor in tensors if self.size > 1 else ():
            there = tensor.detach().to(self.wire, copy=True).contiguous()
            self.guarded(lambda there=there: dist.broadcast(there, src=0))  # type: ignore[misc]
            tensor.detach().copy_(there)

    def sum(self, tensor: Tensor) -> Arrival:
        """Start to add up a tensor, which must be where :attr:`wire` says, over all ranks, in place."""
        if self.size == 1:
            return Arrival(self, tensor, None)
        return Arrival(self, tensor, self.guarded(lambda: dist.all_reduce(tensor, async_op=True)))

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        """Start to send rows to each rank, and to receive some.

        Args:
            rows: What to send, the rows for rank 0 first, ``[sum(sent), ...]``.
            sent: How many of them each rank gets.
            received: How many rows each rank sends here.
        """
        rows = rows.to(self.wire).contiguous()
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        if self.size == 1:
            return Arrival(self, out.copy_(rows), None)
        self.sent_bytes += rows.nbytes
        given: dict[str, Any] = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
        work = self.guarded(lambda: dist.all_to_all_single(out, rows, async_op=True, **given))
        return Arrival(self, out, work)

    def swap(self, values: Sequence[Any]) -> list[Any]:
        """Give each rank a value of its own, and get one from each.

        Example:
            >>> World().swap(["for myself"])
            ['for myself']
        """
        if self.size == 1:
            return list(values)
        packed = [pickle.dumps(value) for value in values]
        sizes = [len(each) for each in packed]
        received = [each[self.rank] for each in self.gather(sizes)]
        rows = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
        arrived = self.exchange(rows, sizes, received).wait().cpu()
        return [pickle.loads(each.numpy().tobytes()) for each in torch.split(arrived, received)]  # noqa: S301

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all ranks have the same facts, by name, and run the same versions.

        Example:
            >>> World().agree({"seed": 0})
        """
        if self.size == 1:
            return
        given = {**facts, **{f"version of {name}": value for name, value in versions().items()}}
        everyone = self.gather(given)
        for name in {name: None for each in everyone for name in each}:
            values = [each.get(name) for each in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    first, other = _apart(repr(values[0]), repr(value))
                    raise InputError(
                        f"all ranks must have the same {name}",
                        got=f"{first} on rank 0 and {other} on rank {rank}",
                        fix="Start every rank with the same command, data and environment.",
                    )


_world: World | None = None


@checked(timeout={"above": 0})
def start(*, timeout: float = _LONGEST_WAIT) -> World:
    """Join the other processes that torchrun has started; without torchrun there is only this one.

    Ranks with a GPU each talk over nccl, others over gloo. Calling it again returns the same world.

    Args:
        timeout: Seconds after which a rank gives up waiting for another one.

    Example:
        >>> world = start()
        >>> world.rank, world.size
        (0, 1)
    """
    global _world
    if _world is not None and (_world.size == 1 or dist.is_initialized()):
        return _world
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < 1e7:
        raise InputError("timeout must be a positive number of seconds", got=repr(timeout), fix="Leave it out.")
    local, size = _number("LOCAL_RANK", 0), _number("WORLD_SIZE", 1)
    if size == 1 and not dist.is_initialized():
        _world = World(device=torch.device("cuda", 0) if torch.cuda.is_available() else _HOST)
        return _world
    on_node = _number("LOCAL_WORLD_SIZE", size)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local % gpus) if gpus else _HOST
    if gpus:
        torch.cuda.set_device(device)
    _say_errors_once()
    if not dist.is_initialized():
        backend = "nccl" if gpus >= on_node else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise LostRankError(
                f"the {size} ranks could not find each other ({_reason(error)}). Look at the first error of the others."
            ) from error
        atexit.register(_leave)
    _world = World(dist.get_rank(), dist.get_world_size(), device, timeout=timeout)
    _world.on_machine = max(on_node, 1)
    _end_when_asked(_world)
    return _world


def is_first_to_say(text: str) -> bool:
    """Whether no rank has said something yet; it asks no other rank, so that it also works when they are gone.

    Example:
        >>> is_first_to_say("without torchrun there is nobody else")
        True
    """
    if not dist.is_initialized():
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add(f"gnnautoscale: {text}", 1) == 1)
    except (RuntimeError, ValueError):  # the process that keeps it is gone
        return True


def _end_when_asked(world: World) -> None:
    """Let a process that torchrun ends say why, unless its user has decided what it does then."""
    is_main = threading.current_thread() is threading.main_thread()
    if world.size == 1 or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: FrameType | None) -> None:
        who = f"rank {world.rank} of {world.size}"
        raise LostRankError(f"{who} ends, since torchrun asked it to, as it does when another rank has failed")

    signal.signal(signal.SIGTERM, end)


def _say_errors_once() -> None:
    """Let what ends all ranks be said once, and that of a rank that lost another, or was stopped, in one sentence."""
    show = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        if issubclass(kind, LostRankError):
            print(f"error: {error}", file=sys.stderr)
        elif not is_first_to_say(f"{kind.__name__}: {error}"):
            return
        elif issubclass(kind, KeyboardInterrupt):
            print(f"stopped: {error}" if str(error) else "stopped", file=sys.stderr)
        else:
            show(kind, error, place)

    sys.excepthook = say


def current() -> World:
    """The world that was started, or that of this process alone."""
    return World() if _world is None else _world


def _leave() -> None:
    global _world
    _world = None
    if dist.is_initialized():
        dist.destroy_process_group()


def _apart(first: str, other: str, length: int = 80) -> list[str]:
    """Where two texts differ, in pieces of some length."""
    alike = takewhile(lambda both: both[0] == both[1], zip(first, other, strict=False))
    start = max(len([*alike]) - length // 4, 0) if len(first + other) > 2 * length else 0
    return [("..." if start else "") + text[start : start + length] for text in (first, other)]


def _reason(error: Exception) -> str:
    """What gloo or nccl say, in short, without places in their sources."""
    told = re.sub(r"\[\S*/\S*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
    return told[:200] or type(error).__name__


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        raise InputError(f"{name} must be a whole number", got=repr(text), fix="Start the script with torchrun.")
    return int(text)
