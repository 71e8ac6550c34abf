"""Splits the nodes of a graph into parts, and measures how many edges a split cuts."""

import warnings
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pymetis
import torch
from torch import Tensor

from gnnautoscale._util import checked, open_npz, reason_of, write_atomically
from gnnautoscale.errors import InputError
from gnnautoscale.graph.balancing import balanced
from gnnautoscale.graph.hashing import fingerprint
from gnnautoscale.graph.partitioners import import_kaminpar, kaminpar, metis
from gnnautoscale.graph.undirected import chunks, undirected

Partitioner = Literal["metis", "kaminpar", "random"]
PARTITIONERS = get_args(Partitioner)


@checked(num_nodes={"least": 1}, num_parts={"least": 1})
def partition(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    method: Partitioner = "metis",
    edge_weight: Tensor | None = None,
    node_weight: Tensor | None = None,
    groups: Tensor | None = None,
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> Tensor:
    r"""Assign every node to a part; no part is empty.

    ``"metis"`` and ``"kaminpar"`` look for parts of about equal size (3 % above the mean or less) that minimize the cut

    .. math::
        \sum_{\{u, v\}: \, \mathrm{part}(u) \neq \mathrm{part}(v)} w_{uv},

    where :math:`w_{uv}` sums the weights of all edges between the two nodes, in either direction. Without weights each
    connected pair of nodes counts once. Self-loops never count. METIS uses one core; KaMinPar uses all of them and less
    memory, and needs ``pip install kaminpar``. ``"random"`` ignores the edges and draws parts whose
    sizes differ by at most one.

    Args:
        edge_index: Edges from ``edge_index[0]`` to ``edge_index[1]``, directed or not, in any order,
            ``[2, num_edges]``, int32 or int64.
        num_nodes: The number of nodes.
        num_parts: The number of parts, between 1 and ``num_nodes``.
        method: How to choose the parts.
        edge_weight: The cost of cutting each edge, finite and not negative, ``[num_edges]``. Only proportions matter:
            they are rounded to thousandths of their mean, and at least 1.
        node_weight: How much each node adds to the size of its part, finite and not negative, ``[num_nodes]``, with
            METIS; rounded likewise.
        groups: The group of each node, such as its type, ``[num_nodes]``, numbered from 0: each part gets about equally
            many nodes of each group. Partitioners balance all nodes together; nodes are moved afterwards, which cuts
            more edges.
        seed: The same seed gives the same parts, whatever the global random state; but KaMinPar's threads race, so that
            on several cores its parts differ from call to call, about equally good. Use ``cache_dir``, or keep the
            labels, to have the same again. METIS gives small graphs the same parts for any seed.
        cache_dir: A folder that keeps what METIS and KaMinPar found for the next call with the same arguments; created
            if missing.

    Returns:
        The part of each node, ``[num_nodes]``, int64 on the CPU.

    Example:
        >>> import torch
        >>> edge_index = torch.tensor([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])  # two triangles and a bridge
        >>> labels = partition(edge_index, num_nodes=6, num_parts=2)
        >>> bool((labels[:3] == labels[0]).all() and (labels[3:] == 1 - labels[0]).all())
        True
    """
    if not 1 <= num_parts <= num_nodes:
        fix = f"Ask for 1 to {num_nodes} parts, so that each part has a node."
        raise InputError("num_parts must be between 1 and num_nodes", got=f"{num_parts} for {num_nodes} nodes", fix=fix)
    edges = _check_edges(edge_index, num_nodes)
    weight = None if edge_weight is None else _check_weight(edge_weight, edges.size(1))
    groups = None if groups is None else _check_groups(groups, num_nodes)
    if node_weight is not None:
        node_weight = _check_weight(node_weight, num_nodes, "node")
        if method != "metis":
            raise InputError("node_weight belongs to METIS", got=f"method={method!r}", fix="Leave it out.")

    if method == "random":
        order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
        if groups is not None:  # one group after the other, each in random order, dealt out in turn
            order = order[groups[order].argsort(stable=True)]
            return torch.empty_like(order).index_copy(0, order, torch.arange(num_nodes) % num_parts)
        return _blocks(num_nodes, num_parts)[order]
    version = pymetis.version if method == "metis" else import_kaminpar().__version__
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if cache_dir is None:
        return _cut(edges, num_nodes, num_parts, method, weight, seed, groups, node_weight)

    setting = {"num_nodes": num_nodes, "num_parts": num_parts, "method": method, "version": version, "seed": seed}
    further = [each for each in (groups, node_weight) if each is not None]
    path = Path(cache_dir) / f"{fingerprint(edges, weight, *further, **setting)}.npz"
    labels = _load(path, num_nodes, num_parts)
    if labels is None:
        labels = _cut(edges, num_nodes, num_parts, method, weight, seed, groups, node_weight)
        _save(path, labels)
    return labels


@checked(labels={"fix": "Pass a tensor with one label per node."})
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


@checked()
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
    edges = _check_edges(edge_index, num_nodes)
    sizes = torch.bincount(labels)
    return halo_sizes(edges, labels, labels, sizes.numel()).double() / sizes


def halo_sizes(edges: Tensor, sources: Tensor, targets: Tensor, num_parts: int) -> Tensor:
    """The number of nodes outside each part that have an edge into it, ``[num_parts]``.

    ``sources`` and ``targets`` are the parts of the nodes that edges, ``[2, num_edges]``, come from and point to.
    """
    # A node counts once for each part it has edges into, however many edges.
    num_nodes, halo, found = max(sources.numel(), 1), targets.new_empty(0), []
    for chunk in chunks(edges.size(1)):
        source, target = edges[:, chunk]
        part = targets[target]
        outside = sources[source] != part
        found.append(_distinct(part[outside] * num_nodes + source[outside]))
        if sum(each.numel() for each in found) > halo.numel():
            halo, found = _distinct(torch.cat([halo, *found])), []
    halo = _distinct(torch.cat([halo, *found]))
    return torch.bincount(halo // num_nodes, minlength=num_parts)


def _distinct(values: Tensor) -> Tensor:
    distinct: Tensor = torch.unique_consecutive(values.sort().values)  # faster than torch.unique
    return distinct


def _check_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Returns the edges on the CPU."""
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
    return edge_index.cpu()


def _check_weight(given: Tensor, count: int, kind: str = "edge") -> Tensor:
    """Returns the weights of edges or nodes as float64 on the CPU."""
    if given.shape != (count,) or given.is_complex():
        rule = f"{kind}_weight must be real with shape [num_{kind}s] = [{count}]"
        got = f"{given.dtype} with shape {list(given.shape)}"
        per = "column of edge_index" if kind == "edge" else "node"
        raise InputError(rule, got=got, fix=f"Pass one number per {per}.")
    weight = given.detach().to("cpu", torch.float64)
    wrong = ~(weight.isfinite() & (weight >= 0))
    if wrong.any():
        got = f"{weight[wrong][0].item()} for {kind} {int(wrong.nonzero()[0])}"
        what = "the cost of cutting each edge" if kind == "edge" else "the size of each node"
        fix = f"Pass {what}, or leave {kind}_weight out."
        raise InputError(f"{kind} weights must be finite and not negative", got=got, fix=fix)
    return weight


def _check_groups(groups: Tensor, num_nodes: int) -> Tensor:
    """Returns the groups as int64 on the CPU."""
    whole = groups.dtype in (torch.int32, torch.int64) and groups.shape == (num_nodes,)
    if not whole or int(groups.min()) < 0:
        rule, got = f"groups must be integers from 0, [{num_nodes}]", f"{groups.dtype} {list(groups.shape)}"
        raise InputError(rule, got=got, fix="Number them with groups.unique(return_inverse=True)[1].")
    return groups.to("cpu", torch.int64)


def _blocks(num_nodes: int, num_parts: int) -> Tensor:
    """Contiguous parts whose sizes differ by at most one."""
    return torch.arange(num_nodes) * num_parts // num_nodes


def _cut(
    edges: Tensor,
    num_nodes: int,
    num_parts: int,
    method: Partitioner,
    weight: Tensor | None,
    seed: int,
    groups: Tensor | None,
    node_weight: Tensor | None,
) -> Tensor:
    graph = undirected(edges, num_nodes, weight)
    if graph.neighbors.numel() == 0:
        labels = _blocks(num_nodes, num_parts)
    elif method == "metis":
        labels = _fill(metis(graph, num_parts, seed, node_weight), num_parts)
    else:
        labels = _fill(kaminpar(graph, num_parts, seed), num_parts)
    return labels if groups is None else _fill(balanced(graph, labels, groups, num_parts), num_parts)


def _fill(labels: Tensor, num_parts: int) -> Tensor:
    """Move nodes from the largest parts into empty ones, which partitioners leave when parts are small."""
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
    """Labels from the cache, or ``None`` if the file is missing or wrong; the archive has a checksum."""
    try:
        with open_npz(path) as archive:
            labels = check_labels(torch.from_numpy(archive["labels"]), num_nodes)
        if int(labels.max()) == num_parts - 1:
            return labels
        reason = f"it has {int(labels.max()) + 1} parts"
    except OSError:  # most often there is none yet; if the folder is at fault, writing to it says so
        return None
    except Exception as error:  # a damaged file may raise anything
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"the cached partition {path} is damaged ({reason}) and is made again", stacklevel=3)
    return None


def _save(path: Path, labels: Tensor) -> None:
    rule = "cache_dir must be a writable folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(rule, got=f"{path.parent} ({reason_of(error)})", fix="Choose another.") from None
    write_atomically(path, lambda stream: np.savez(stream, labels=labels.numpy()), rule=rule)
