"""Splits the nodes of a graph into parts, and measures how many edges a split cuts."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import pymetis
import torch
from torch import Tensor

from gnnautoscale._util import write_atomically
from gnnautoscale.errors import InputError


def partition(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    method: Literal["metis", "random"] = "metis",
    edge_weight: Tensor | None = None,
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> Tensor:
    r"""Assign every node to a part; no part is empty.

    ``"metis"`` looks for parts of nearly equal size that minimize the cut

    .. math::
        \sum_{\{u, v\}: \, \mathrm{part}(u) \neq \mathrm{part}(v)} w_{uv},

    where :math:`w_{uv}` sums the weights of all edges between the two nodes, in either direction. Without weights each
    connected pair of nodes counts once. Self-loops never count. ``"random"`` ignores the edges and draws parts whose
    sizes differ by at most one.

    Args:
        edge_index: Edges from ``edge_index[0]`` to ``edge_index[1]``, directed or not, in any order,
            ``[2, num_edges]``, int32 or int64.
        num_nodes: The number of nodes.
        num_parts: The number of parts, between 1 and ``num_nodes``.
        method: How to choose the parts.
        edge_weight: The cost of cutting each edge, finite and not negative, ``[num_edges]``. Only proportions matter:
            METIS gets weights rounded to thousandths of their mean, and at least 1.
        seed: The same seed gives the same parts, whatever the global random state. METIS gives small graphs the same
            parts for any seed.
        cache_dir: A folder that keeps METIS results for the next call with the same arguments; created if missing.

    Returns:
        The part of each node, ``[num_nodes]``, int64 on the CPU.

    Example:
        >>> import torch
        >>> edge_index = torch.tensor([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])  # two triangles and a bridge
        >>> labels = partition(edge_index, num_nodes=6, num_parts=2)
        >>> bool((labels[:3] == labels[0]).all() and (labels[3:] == 1 - labels[0]).all())
        True
    """
    if num_nodes < 1:
        raise InputError("num_nodes must be at least 1", got=str(num_nodes), fix="Pass the number of nodes.")
    if not 1 <= num_parts <= num_nodes:
        fix = f"Ask for 1 to {num_nodes} parts, so that each part has a node."
        raise InputError("num_parts must be between 1 and num_nodes", got=f"{num_parts} for {num_nodes} nodes", fix=fix)
    edges = _check_edges(edge_index, num_nodes)
    weight = None if edge_weight is None else _check_weight(edge_weight, edges.size(1))

    if method == "random":
        order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
        return _blocks(num_nodes, num_parts)[order]
    if method != "metis":
        raise InputError("method must be 'metis' or 'random'", got=repr(method), fix="Choose one of the two.")
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if cache_dir is None:
        return _metis(edges, num_nodes, num_parts, weight, seed)

    setting: dict[str, str | int] = {"num_nodes": num_nodes, "num_parts": num_parts, "method": method, "seed": seed}
    path = Path(cache_dir) / f"{fingerprint(edges, weight, pymetis=pymetis.version, **setting)}.npy"
    labels = _load(path, num_nodes, num_parts)
    if labels is None:
        labels = _metis(edges, num_nodes, num_parts, weight, seed)
        _save(path, labels)
    return labels


def check_labels(labels: Tensor, num_nodes: int) -> Tensor:
    """Check part labels that a user passed.

    Args:
        labels: The part of each node, ``[num_nodes]``, any integer type, numbered from 0 without gaps.
        num_nodes: The number of nodes.

    Returns:
        The same labels, int64 on the CPU.

    Example:
        >>> import torch
        >>> check_labels(torch.tensor([1, 0, 1], dtype=torch.int32), num_nodes=3)
        tensor([1, 0, 1])
    """
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError("part labels must be integers", got=str(labels.dtype), fix="Convert with labels.long().")
    if labels.shape != (num_nodes,) or num_nodes < 1:
        rule = f"part labels must have shape [num_nodes] with num_nodes = {num_nodes} at least 1"
        raise InputError(rule, got=f"shape {list(labels.shape)}", fix="Pass one label per node.")
    labels = labels.to("cpu", torch.int64)
    renumber = "Renumber with labels.unique(return_inverse=True)[1]."
    if (low := int(labels.min())) < 0:
        raise InputError("part labels must not be negative", got=str(low), fix=renumber)
    high = int(labels.max())
    if high >= num_nodes or not torch.bincount(labels).all():  # a huge label would need as many counters
        raise InputError("parts must be numbered without gaps", got=f"empty parts below {high}", fix=renumber)
    return labels


def connectivity(edge_index: Tensor, labels: Tensor) -> Tensor:
    r"""Halo nodes per node of each part.

    This is the paper's inter-/intra-connectivity ratio of a part :math:`\mathcal{B}`,

    .. math::
        \frac{|\bigcup_{v \in \mathcal{B}} \mathcal{N}(v) \setminus \mathcal{B}|}{|\mathcal{B}|},

    the size of its halo over the number of its nodes. The mean over the parts characterizes a partition.

    Args:
        edge_index: Edges from ``edge_index[0]`` to ``edge_index[1]``, ``[2, num_edges]``.
        labels: The part of each node, ``[num_nodes]``.

    Returns:
        One ratio per part, ``[num_parts]``, float64 on the CPU.

    Example:
        >>> import torch
        >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> connectivity(edge_index, torch.tensor([0, 0, 1]))  # node 2 is the halo of {0, 1}, node 1 that of {2}
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    num_nodes = labels.numel()
    labels = check_labels(labels, num_nodes)
    source, target = _check_edges(edge_index, num_nodes)
    part = labels[target]
    outside = labels[source] != part
    # A node counts once for each part it has edges into, however many edges.
    pairs = (part[outside] * num_nodes + source[outside]).sort().values
    pairs = torch.unique_consecutive(pairs)
    sizes = torch.bincount(labels)
    return torch.bincount(pairs // num_nodes, minlength=sizes.numel()).double() / sizes


def fingerprint(*tensors: Tensor | None, **params: str | int | float) -> str:
    """A hash of tensors and settings: 64 hexadecimal digits that depend on every value, type, shape and setting.

    Tensors may be on any device, ``None`` marks a missing one, and the order of the settings does not matter.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"None;")
            continue
        # Type and shape determine how many bytes follow, so different lists never give the same bytes.
        digest.update(f"{tensor.dtype}{list(tensor.shape)};".encode())
        # A byte view, since numpy has no bfloat16; it does not copy.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(repr(sorted(params.items())).encode())
    return digest.hexdigest()


def _check_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Returns the edges as int64 on the CPU."""
    if edge_index.dtype not in (torch.int32, torch.int64):
        fix = "Convert with edge_index.long()."
        raise InputError("edge_index must be int32 or int64", got=str(edge_index.dtype), fix=fix)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        fix = "Pass sources in the first row and targets in the second."
        raise InputError("edge_index must have shape [2, num_edges]", got=f"shape {list(edge_index.shape)}", fix=fix)
    if edge_index.numel() > 0:
        low, high = (int(bound) for bound in edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            rule = f"edge_index must hold nodes between 0 and {num_nodes - 1}"
            fix = "Check num_nodes, and number the nodes from 0."
            raise InputError(rule, got=f"values from {low} to {high}", fix=fix)
    return edge_index.to("cpu", torch.int64)


def _check_weight(edge_weight: Tensor, num_edges: int) -> Tensor:
    """Returns the weights as float64 on the CPU."""
    if edge_weight.shape != (num_edges,) or edge_weight.is_complex():
        rule = f"edge_weight must be real with shape [num_edges] = [{num_edges}]"
        got = f"{edge_weight.dtype} with shape {list(edge_weight.shape)}"
        raise InputError(rule, got=got, fix="Pass one number per column of edge_index.")
    weight = edge_weight.detach().to("cpu", torch.float64)
    wrong = ~(weight.isfinite() & (weight >= 0))
    if wrong.any():
        got = f"{weight[wrong][0].item()} for edge {int(wrong.nonzero()[0])}"
        fix = "Pass the cost of cutting each edge, or leave edge_weight out."
        raise InputError("edge weights must be finite and not negative", got=got, fix=fix)
    return weight


def _blocks(num_nodes: int, num_parts: int) -> Tensor:
    """Contiguous parts whose sizes differ by at most one."""
    return torch.arange(num_nodes) * num_parts // num_nodes


def _metis(edges: Tensor, num_nodes: int, num_parts: int, weight: Tensor | None, seed: int) -> Tensor:
    if (loops := edges[0] == edges[1]).any():
        edges = edges[:, ~loops]
        weight = None if weight is None else weight[~loops]
    if edges.numel() == 0:
        return _blocks(num_nodes, num_parts)
    pairs, weight = _undirected(edges, num_nodes, weight)
    dtype = pymetis.zero_copy_dtype()  # METIS would copy integers of another width
    limit = int(np.iinfo(dtype).max)
    if pairs.numel() > limit:
        rule = f"this build of METIS takes at most {limit} edges, counting both directions"
        fix = "Use a pymetis built with 64-bit integers, or method='random'."
        raise InputError(rule, got=str(pairs.numel()), fix=fix)
    starts = torch.searchsorted(pairs, torch.arange(num_nodes + 1) * num_nodes)
    neighbors = pairs - pairs // num_nodes * num_nodes  # faster than %
    result = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(starts.numpy().astype(dtype, copy=False), neighbors.numpy().astype(dtype, copy=False)),
        eweights=None if weight is None else _integers(weight, limit).numpy().astype(dtype, copy=False),
        options=pymetis.Options(seed=seed % 2**31),  # fits either width; -1 would be METIS' own default
    )
    return _fill(torch.from_numpy(np.asarray(result.vertex_part, dtype=np.int64)), num_parts)


def _undirected(edges: Tensor, num_nodes: int, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each connected pair once per direction, sorted, as ``u * num_nodes + v``, and weights unless all are equal."""
    forward, backward = edges[0] * num_nodes + edges[1], edges[1] * num_nodes + edges[0]
    if weight is None:
        # Most graphs are sorted already, symmetric and free of duplicates; checking that costs half the sorting.
        if (forward[1:] > forward[:-1]).all() and torch.equal(backward.sort().values, forward):
            return forward, None
        return torch.unique_consecutive(torch.cat([forward, backward]).sort().values), None
    keys, order = torch.cat([forward, backward]).sort(stable=True)
    pairs, pair_of = torch.unique_consecutive(keys, return_inverse=True)
    # Relative to the largest weight, since a sum of huge ones could overflow.
    weight = weight / weight.max().clamp(min=torch.finfo(weight.dtype).tiny)
    weight = weight.new_zeros(pairs.numel()).index_add_(0, pair_of, torch.cat([weight, weight])[order])
    return pairs, None if weight.min() == weight.max() else weight


def _integers(weight: Tensor, limit: int) -> Tensor:
    """Scale weights to positive integers whose sum METIS can hold."""
    mean = min(1000, limit // (2 * weight.numel()))
    return (weight * (mean / weight.mean())).round().clamp(min=1).long()


def _fill(labels: Tensor, num_parts: int) -> Tensor:
    """Move nodes from the largest parts into empty ones, which METIS leaves when parts are small."""
    sizes = torch.bincount(labels, minlength=num_parts)
    empty = (sizes == 0).nonzero().view(-1)
    if empty.numel() == 0:
        return labels
    # Number the nodes of each part from 0: the highest numbers are in the largest parts, and node 0 always stays.
    nodes = labels.argsort(stable=True)
    rank = torch.arange(labels.numel()) - (sizes.cumsum(0) - sizes)[labels[nodes]]
    spare = nodes[rank.argsort(descending=True, stable=True)[: empty.numel()]]
    return labels.index_copy(0, spare, empty)


def _load(path: Path, num_nodes: int, num_parts: int) -> Tensor | None:
    """Labels from the cache, or ``None`` if the file is missing or wrong."""
    try:
        with path.open("rb") as file:
            labels = check_labels(torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False)), num_nodes)
    except Exception:  # a missing or damaged file may raise anything; compute again
        return None
    return labels if int(labels.max()) == num_parts - 1 else None


def _save(path: Path, labels: Tensor) -> None:
    rule = "cache_dir must be a writable folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(rule, got=f"{path.parent} ({error})", fix="Choose another.") from None
    write_atomically(path, lambda stream: np.save(stream, labels.numpy(), allow_pickle=False), rule=rule)
