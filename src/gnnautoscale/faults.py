"""Says where training failed and what to change, for failures that have a known remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gnnautoscale.history.choice import available_memory
from gnnautoscale.modes import OnSubgraphs, WithHistories
from gnnautoscale.recipe import CALM_DOWN


@contextmanager
def explained(way: WithHistories | OnSubgraphs, epoch: int, *, parts: int, batch_size: int) -> Iterator[None]:
    """Say more about what goes wrong in an epoch of training.

    Args:
        way: What is trained.
        epoch: Its number.
        parts: Number of parts of the graph.
        batch_size: Number of parts in a batch.
    """
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{error} in batch {way.done + 1} of epoch {epoch}: {CALM_DOWN}") from None
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryError(_smaller(error, parts, batch_size)) from error
    except RuntimeError as error:
        if "not enough memory" in str(error):  # what PyTorch says of host memory
            raise MemoryError(_smaller(error, parts, batch_size)) from error
        if "DataLoader worker" in str(error):
            raise RuntimeError(
                f"A process that prepares batches has died in epoch {epoch} ({error}). Most often the system has ended "
                "it for lack of memory: lower num_workers."
            ) from error
        raise


def _smaller(error: BaseException, parts: int, batch_size: int) -> str:
    """What to lower, and by how much, after an allocation has failed."""
    text = str(error).splitlines()[0]
    wanted = _bytes(text)
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        used = torch.cuda.memory_allocated()
        free += torch.cuda.memory_reserved() - used
    else:
        free, used = available_memory(), 0
    # What a batch takes grows with its nodes. Without knowing more, half of it is a good guess.
    share = 0.5 if wanted is None or wanted + used <= 0 else min(0.9 * (free + used) / (wanted + used), 0.9)
    if batch_size > 1:
        smaller = max(1, int(batch_size * share))
        return f"There is not enough memory ({text}). Lower batch_size from {batch_size} to {smaller}, or raise parts."
    return f"There is not enough memory ({text}). Raise parts from {parts} to {math.ceil(parts / share)}."


def _bytes(text: str) -> int | None:
    """How much memory was asked for, as far as an error says so.

    Example:
        >>> _bytes("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 ...")
        1610612736
    """
    found = re.search(r"allocate ([\d.]+) ?(bytes|[KMG]iB)", text)
    if found is None:
        return None
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return int(float(found[1].rstrip(".")) * units[found[2]])
