"""Says where training failed and what to change, for failures that have a known remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gnnautoscale._util import available_memory
from gnnautoscale.training.strategies import HistoryStrategy, SubgraphStrategy

# What errors say that are no MemoryError by their type.
_NO_ROOM = ("not enough memory", "can't allocate memory", "CUDA error: out of memory")
# However little is free, a batch is not advised to be smaller than by this factor at once.
_LEAST_SHARE = 0.1


@contextmanager
def explained(
    strategy: HistoryStrategy | SubgraphStrategy,
    epoch: int,
    *,
    num_parts: int,
    batch_size: int,
    evaluate_parts: int | None = None,
) -> Iterator[None]:
    """Say more about what goes wrong in an epoch of training.

    Args:
        strategy: What is trained.
        epoch: Its number.
        num_parts: Number of parts of the graph.
        batch_size: Number of parts in a batch.
        evaluate_parts: Number of batches to evaluate in, if they are not those of training.
    """

    def smaller(error: BaseException) -> str:
        if not strategy.between:
            return _smaller(error, num_parts, batch_size)
        if strategy.evaluates_at_once:
            return f"{_no_room(error)} to evaluate on the whole graph at once."
        return _smaller(error, num_parts, batch_size) if evaluate_parts is None else _more_parts(error, evaluate_parts)

    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error} {_place(strategy, epoch)}: lower lr, or clip gradients with grad_norm"
        ) from None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryError(smaller(error)) from error
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_ROOM):
            raise MemoryError(smaller(error)) from error
        if "DataLoader worker" in str(error):
            raise RuntimeError(
                f"A process that prepares batches has died in epoch {epoch} ({error}). Most often the system has ended "
                "it for lack of memory: lower num_workers."
            ) from error
        raise


def _place(strategy: HistoryStrategy | SubgraphStrategy, epoch: int) -> str:
    if not strategy.between:
        return f"in batch {strategy.done + 1} of epoch {epoch}"
    return f"after batch {strategy.done} of epoch {epoch}" if strategy.done else f"after epoch {epoch}"


def _smaller(error: BaseException, num_parts: int, batch_size: int) -> str:
    """What to lower, and by how much, after an allocation has failed."""
    if batch_size == 1:
        return _more_parts(error, num_parts, "num_parts")
    smaller = max(1, int(batch_size * _share(error)))
    return f"{_no_room(error)}. Lower batch_size from {batch_size} to {smaller}, or raise num_parts."


def _more_parts(error: BaseException, count: int, name: str = "evaluate_parts") -> str:
    return f"{_no_room(error)}. Raise {name} from {count} to {math.ceil(count / _share(error))}."


def _no_room(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return f"There is not enough memory ({text})"


def _share(error: BaseException) -> float:
    """How large a batch should be, as a share of what it was when an allocation failed."""
    wanted = _bytes(str(error))
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        used = torch.cuda.memory_allocated()
        free: int | None = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
    else:
        free, used = available_memory(), 0
    # What a batch takes grows with its nodes. Without knowing more, half of it is a good guess.
    if free is None or wanted is None or wanted + used <= 0:
        return 0.5
    return max(min(0.9 * (free + used) / (wanted + used), 0.9), _LEAST_SHARE)


def _bytes(text: str) -> int | None:
    """How much memory was asked for, as far as an error says so.

    Example:
        >>> _bytes("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 ...")
        1610612736
    """
    found = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", text)
    if found is None:
        return None
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    return int(float(found[1]) * units[found[2]])
