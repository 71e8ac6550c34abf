"""Calls METIS and KaMinPar on a simple undirected graph."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from gnnautoscale._util import available_cores
from gnnautoscale.errors import InputError
from gnnautoscale.graph.undirected import UndirectedGraph, chunks

_IMBALANCE = 0.03  # the default of METIS


def metis(graph: UndirectedGraph, num_parts: int, seed: int, node_weight: Tensor | None = None) -> Tensor:
    """The part of each node by METIS, ``[num_nodes]``, int64; some parts may be empty."""
    dtype = pymetis.zero_copy_dtype()  # METIS would copy integers of another width
    limit = int(np.iinfo(dtype).max)
    if graph.neighbors.numel() > limit:
        rule = f"this build of METIS takes at most {limit} edges, counting both directions"
        fix = "Use a pymetis built with 64-bit integers, or another method."
        raise InputError(rule, got=str(graph.neighbors.numel()), fix=fix)
    try:
        result = pymetis.part_graph(
            num_parts,
            pymetis.CSRAdjacency(_as(graph.starts, dtype), _as(graph.neighbors, dtype)),
            vweights=None if node_weight is None else _as(integers(node_weight, limit), dtype),
            eweights=None if graph.weight is None else _as(integers(graph.weight, limit), dtype),
            options=pymetis.Options(seed=seed % 2**31),  # fits either width; -1 would be METIS' own default
        )
    except RuntimeError as error:  # the input was checked: METIS has printed that it got no memory
        raise MemoryError("there is not enough memory for METIS to cut the graph") from error
    return torch.from_numpy(np.asarray(result.vertex_part, dtype=np.int64))


def kaminpar(graph: UndirectedGraph, num_parts: int, seed: int) -> Tensor:
    """The part of each node by KaMinPar on all cores, ``[num_nodes]``, int64; some parts may be empty."""
    module = import_kaminpar()
    num_bytes = 24 + 8 * graph.starts.numel() + (4 if graph.weight is None else 12) * graph.neighbors.numel()
    with tempfile.TemporaryDirectory(prefix="gnnautoscale-", dir=_folder_for(num_bytes)) as folder:
        path = Path(folder) / "graph.parhip"
        try:
            _write_parhip(graph, path)
        except OSError as error:
            rule = f"KaMinPar reads the graph from a temporary file of {num_bytes:,} bytes"
            raise InputError(rule, got=str(error), fix="Set TMPDIR to a folder with room for it.") from None
        loaded = module.load_graph(str(path), module.GraphFileFormat.PARHIP)
    module.reseed(seed % 2**31)
    partitioner = module.KaMinPar(available_cores(), module.default_context())
    return torch.tensor(partitioner.compute_partition(loaded, num_parts, _IMBALANCE), dtype=torch.int64)


def import_kaminpar() -> Any:
    """The module ``kaminpar``, which is an optional dependency."""
    try:
        module = importlib.import_module("kaminpar")
    except ImportError:
        rule = "partition 'kaminpar' needs the package kaminpar"
        raise InputError(rule, got="none installed", fix="Run: pip install kaminpar") from None
    if not module.__64bit__:  # it would end the process when it reads the file
        rule = "partition 'kaminpar' needs a kaminpar of 64-bit integers"
        raise InputError(rule, got="one of 32 bits", fix="Install its published wheel: pip install kaminpar")
    return module


def integers(weight: Tensor, limit: int) -> Tensor:
    """Scale weights to positive integers, thousandths of their mean or coarser, whose sum is at most ``limit``."""
    mean = min(1000, limit // (2 * weight.numel()))
    return (weight * (mean / weight.mean())).round().clamp(min=1).long()


def _as(tensor: Tensor, dtype: DTypeLike) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)


def _folder_for(num_bytes: int) -> str | None:
    """A folder in memory if there is one with room, else ``None``: the usual one for temporary files."""
    memory = "/dev/shm"  # noqa: S108  # the file gets a folder of its own
    return memory if os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 * num_bytes else None


def _write_parhip(graph: UndirectedGraph, path: Path) -> None:
    """Write ParHIP's binary format: a header of flags and sizes, where lists begin in the file, neighbours, weights."""
    num_nodes, num_neighbors = graph.starts.numel() - 1, graph.neighbors.numel()
    if num_nodes > 2**32:
        raise InputError("KaMinPar takes at most 2^32 nodes", got=str(num_nodes), fix="Use another method.")
    # Flags of what is missing or narrow: weights of edges, weights of nodes, 64-bit numbers of nodes.
    flags = (graph.weight is None) * 1 + 2 + 8
    with path.open("wb") as file:
        np.array([flags, num_nodes, num_neighbors], dtype=np.uint64).tofile(file)
        (graph.starts * 4 + 24 + 8 * (num_nodes + 1)).numpy().tofile(file)
        for part in chunks(num_neighbors):
            graph.neighbors[part].numpy().astype(np.uint32).tofile(file)
        if graph.weight is not None:
            integers(graph.weight, np.iinfo(np.int64).max).numpy().tofile(file)
