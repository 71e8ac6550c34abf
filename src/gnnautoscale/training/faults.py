"""Explains failures of training: where they happened and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gnnautoscale._util import available_memory, lacks_memory
from gnnautoscale.training.options import FitOptions
from gnnautoscale.training.strategies import Strategy

# The advice never shrinks a batch further than this at once, however little memory is free.
_LEAST_SHARE = 0.1


@contextmanager
def explained(strategy: Strategy, epoch: int, options: FitOptions) -> Iterator[None]:
    """Add place and remedy to the known failures of an epoch; the options have the effects of the mode."""
    try:
        yield
    except FloatingPointError as error:
        place = _place(strategy, epoch)
        raise FloatingPointError(f"{error} {place}: lower lr, or clip gradients with grad_norm") from None
    except ChildProcessError as error:
        raise ChildProcessError(f"in epoch {epoch}, {error}") from error
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            raise MemoryError(_remedy(error, strategy, options)) from error
        raise


def _place(strategy: Strategy, epoch: int) -> str:
    if not strategy.between:
        return f"in batch {strategy.done + 1} of epoch {epoch}"
    return f"after batch {strategy.done} of epoch {epoch}" if strategy.done else f"after epoch {epoch}"


def _remedy(error: BaseException, strategy: Strategy, options: FitOptions) -> str:
    """What to change, and by how much, after an allocation failed."""
    cause = error.__cause__ or error  # which says so in PyTorch's words
    reason = (str(cause) or type(cause).__name__).splitlines()[0]
    problem, share = f"There is not enough memory ({reason})", _share(error)
    if strategy.between and strategy.evaluates_at_once:
        return f"{problem} to evaluate on the whole graph at once."
    if strategy.between and options.evaluate_parts is not None:
        name, count = "evaluate_parts", options.evaluate_parts
    elif options.batch_size == 1:
        name, count = "num_parts", options.num_parts
    else:
        smaller = max(1, int(options.batch_size * share))
        return f"{problem}. Lower batch_size from {options.batch_size} to {smaller}, or raise num_parts."
    return f"{problem}. Raise {name} from {count} to {math.ceil(count / share)}."


def _share(error: BaseException) -> float:
    """The size of a batch that would fit, as a share of the one whose allocation failed."""
    wanted = _bytes(str(error))
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        used = torch.cuda.memory_allocated()
        free: int | None = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
    else:
        free, used = available_memory(), 0
    # Memory grows with the nodes of a batch. Without numbers, half of it is a good guess.
    if free is None or wanted is None or wanted + used <= 0:
        return 0.5
    return max(min(0.9 * (free + used) / (wanted + used), 0.9), _LEAST_SHARE)


def _bytes(text: str) -> int | None:
    """The bytes that could not be allocated, if an error names them: ``Tried to allocate 1.50 GiB``."""
    found = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", text)
    if found is None:
        return None
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    return int(float(found[1]) * units[found[2]])
