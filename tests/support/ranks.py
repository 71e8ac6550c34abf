"""Runs a function in several processes that know each other, forked from this one, so that they start at once.

A fork cannot use a GPU, so processes that need one start anew.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gnnautoscale.ranks.world as world_module

_LONGEST = 60.0
_LONGEST_ON_GPU = 420.0


class Normed(nn.Module):
    """Three layers, the first of which has a norm; defined here so that ranks share the plan of an equal model."""

    def __init__(self, layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second, last = self.layers
        x = self.norm(first(x, edge_index)).relu()
        out: Tensor = last(second(x, edge_index).tanh(), edge_index)
        return out


def run_ranks(size: int, work: Callable[..., Any], *args: Any, timeout: float = 30.0, **options: Any) -> list[Any]:
    """What ``work(*args)`` returns on each rank; an error of one of them is raised here, the first rank's first."""
    return _returned(outcomes(size, partial(work, **options), *args, timeout=timeout))


def run_ranks_on_gpu(size: int, work: Callable[[], Any], *, backend: str = "gloo") -> list[Any]:
    """What ``work()`` returns on each of some ranks that share a GPU; ``work`` must be a function of some module."""
    return _returned(outcomes(size, work, timeout=120.0, on_gpu=True, backend=backend))


def _returned(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def outcomes(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 30.0,
    on_gpu: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """What ``work(*args)`` returns or raises on each rank; ``None`` of one that was killed."""
    with tempfile.TemporaryDirectory() as folder:
        context: Any = torch.multiprocessing.get_context("spawn" if on_gpu else "fork")
        given = (Path(folder), size, work, args, timeout, on_gpu, backend)
        processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_LONGEST_ON_GPU if on_gpu else _LONGEST)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} of {size} ranks did not end"
        paths = [Path(folder) / f"rank-{rank}" for rank in range(size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]  # noqa: S301


def _rank(
    rank: int,
    folder: Path,
    size: int,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    on_gpu: bool,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    world_module._world = None
    if not on_gpu:
        torch.cuda.is_available = lambda: False
    if backend == "nccl":
        # It refuses ranks that share a GPU, unless it takes them for ranks on different machines.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(0)
    try:
        if size > 1:
            store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            dist.barrier()  # a rank that fails at once must not be gone before the others have found it
        world_module.start()
        found: Any = work(*args)
    except BaseException as error:  # sent to the test
        traceback.print_exc()
        found = error
    temporary = folder / f"part-{rank}"
    temporary.write_bytes(pickle.dumps(found))
    temporary.rename(folder / f"rank-{rank}")
    os._exit(0)
