"""Partitions: what METIS and KaMinPar get and give, what is refused, and what the cache keeps."""

import os
import shutil
import sys
import tempfile
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
import pytest
import torch
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.graph import partitioners
from gnnautoscale.graph.partitioning import Partitioner, check_labels, connectivity, partition

# Two triangles, 0-1-2 and 3-4-5, and the bridge 2-3: each edge in one direction.
TRIANGLES = torch.tensor([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])
RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)
METHODS: list[Partitioner] = ["metis", "kaminpar"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Partitioner:
    """A partitioner that looks at edges."""
    if request.param == "kaminpar":
        pytest.importorskip("kaminpar")
    return request.param  # type: ignore[no-any-return]


def both_ways(edge_index: Tensor) -> Tensor:
    return torch.cat([edge_index, edge_index.flip(0)], dim=1)


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def groups(labels: Tensor) -> set[frozenset[int]]:
    return {frozenset((labels == part).nonzero().view(-1).tolist()) for part in set(labels.tolist())}


@pytest.fixture
def metis_graph(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call handed to METIS; calls of it are counted under "calls"."""
    seen: dict[str, Any] = {"calls": 0}
    original = pymetis.part_graph

    def spy(num_parts: int, graph: pymetis.CSRAdjacency, **options: Any) -> Any:
        starts, neighbors = np.asarray(graph.adj_starts), np.asarray(graph.adjacent)
        seen["neighbors"] = [neighbors[a:b].tolist() for a, b in pairwise(starts)]
        seen["weights"] = None if options["eweights"] is None else options["eweights"].tolist()
        seen["calls"] += 1
        return original(num_parts, graph, **options, warn_on_copies=True)  # a copy warns, and a warning is an error

    monkeypatch.setattr(pymetis, "part_graph", spy)
    return seen


# --- METIS and KaMinPar -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edge_index",
    [
        TRIANGLES.int(),
        TRIANGLES.flip(0),
        both_ways(TRIANGLES),
        torch.cat([TRIANGLES, torch.tensor([[4, 4, 0], [4, 4, 0]])], dim=1),
    ],
    ids=["directed", "reversed", "symmetric", "self-loops"],
)
def test_the_bridge_is_cut(edge_index: Tensor, method: Partitioner) -> None:
    labels = partition(edge_index, 6, 2, method=method)
    assert labels.dtype == torch.int64
    assert labels.device.type == "cpu"
    assert groups(labels) == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}


@pytest.mark.parametrize(
    ("edges", "neighbors"),
    [
        ([[0, 1], [1, 2]], [[1], [0, 2], [1]]),
        ([[0, 1, 1, 2], [1, 0, 2, 1]], [[1], [0, 2], [1]]),
        ([[2, 1, 0, 1], [1, 2, 1, 0]], [[1], [0, 2], [1]]),
        ([[0, 0, 1, 1], [1, 1, 2, 1]], [[1], [0, 2], [1]]),
        ([[0, 0, 1, 1], [1, 1, 0, 0]], [[1], [0], []]),
        ([[0, 1, 2], [1, 1, 2]], [[1], [0], []]),
        ([[0, 0, 1], [1, 2, 0]], [[1, 2], [0], [0]]),
    ],
    ids=[
        "directed",
        "finished",
        "unsorted",
        "duplicates",
        "sorted duplicates",
        "self-loops",
        "sorted but half directed",
    ],
)
def test_metis_gets_a_simple_undirected_graph(
    edges: list[list[int]], neighbors: list[list[int]], metis_graph: dict[str, Any]
) -> None:
    partition(torch.tensor(edges), 3, 2)
    assert metis_graph["neighbors"] == neighbors
    assert metis_graph["weights"] is None


def test_order_of_edges_does_not_matter() -> None:
    edges = random_graph(300, 2000)
    finished = torch.unique(both_ways(edges[:, edges[0] != edges[1]]), dim=1)
    shuffled = finished[:, torch.randperm(finished.size(1), generator=torch.Generator().manual_seed(0))]
    expected = partition(finished, 300, 10)
    assert torch.equal(partition(shuffled, 300, 10), expected)
    assert torch.equal(partition(edges, 300, 10), expected)


def test_parts_follow_communities(method: Partitioner) -> None:
    node = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    edges = random_graph(40, 4000) + 40 * torch.arange(10).repeat(400)  # ten communities without edges between them
    found, random = partition(node[edges], 400, 10, method=method), partition(node[edges], 400, 10, method="random")
    assert connectivity(node[edges], found).mean() < 0.1 * connectivity(node[edges], random).mean()
    assert found.bincount().max() <= 44


@pytest.mark.parametrize("num_parts", [4, 20])  # METIS bisects recursively up to 8 parts
def test_seed_decides(num_parts: int, method: Partitioner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "available_cores", lambda: 1)  # KaMinPar is reproducible on one core only
    edges = random_graph(3000, 10000)
    first = partition(edges, 3000, num_parts, method=method, seed=1)
    torch.rand(1)
    assert torch.equal(partition(edges, 3000, num_parts, method=method, seed=1), first)
    assert not torch.equal(partition(edges, 3000, num_parts, method=method, seed=2), first)


def test_any_seed_works(method: Partitioner) -> None:
    for seed in (-1, 2**40):
        assert groups(partition(both_ways(RING), 4, 4, method=method, seed=seed)) == {frozenset({i}) for i in range(4)}


def test_one_part_without_metis(metis_graph: dict[str, Any]) -> None:
    assert partition(RING, 4, 1).tolist() == [0, 0, 0, 0]
    assert metis_graph["calls"] == 0


def test_no_edges_give_contiguous_blocks(method: Partitioner) -> None:
    for edge_index in (NO_EDGES, torch.tensor([[1, 3], [1, 3]])):
        for weight in (None, torch.ones(edge_index.size(1))):
            labels = partition(edge_index, 7, 3, method=method, edge_weight=weight)
            assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_no_part_is_empty(method: Partitioner) -> None:
    # Isolated nodes and several components, down to one node per part: raw METIS leaves parts empty in many of these.
    for seed in range(20):
        num_nodes, num_parts = 12 + seed, 12
        labels = partition(random_graph(num_nodes, 10, seed), num_nodes, num_parts, method=method)
        assert labels.bincount(minlength=num_parts).min() >= 1
        assert labels.numel() == num_nodes
        assert labels.max() == num_parts - 1


def test_empty_parts_are_filled_from_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    result = pymetis.GraphPartition(0, [3, 3, 3, 3, 1, 1, 3])
    monkeypatch.setattr(pymetis, "part_graph", lambda *_, **__: result)
    labels = partition(RING, 7, 4)
    assert labels.bincount().tolist() == [1, 2, 1, 3]
    assert labels[4:6].tolist() == [1, 1]


def test_more_edges_than_metis_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymetis, "zero_copy_dtype", lambda: np.dtype(np.int8))
    with pytest.raises(InputError, match="at most 127 edges"):
        partition(random_graph(50, 200), 50, 2)


def test_kaminpar_uses_all_cores_and_keeps_the_balance_of_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    kaminpar = pytest.importorskip("kaminpar")
    seen: list[Any] = []

    class Spy:
        def __init__(self, num_threads: int, _: Any) -> None:
            seen.append(num_threads)

        def compute_partition(self, _: Any, *arguments: Any) -> list[int]:
            seen.extend(arguments)
            return [0, 0, 0, 0]

    monkeypatch.setattr(kaminpar, "KaMinPar", Spy)
    monkeypatch.setattr(partitioners, "available_cores", lambda: 7)
    assert partition(RING, 4, 2, method="kaminpar").tolist() == [0, 0, 0, 1]
    assert seen == [7, 2, 0.03]


def test_kaminpar_reads_what_metis_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    kaminpar = pytest.importorskip("kaminpar")
    read, load = [], kaminpar.load_graph

    def spy(path: str, kind: Any) -> Any:
        graph = load(path, kind)
        read.append([graph.neighbors(node) for node in range(graph.n())])
        return graph

    monkeypatch.setattr(kaminpar, "load_graph", spy)
    edges = torch.tensor([[0, 1, 1, 1, 2, 2, 2], [1, 0, 2, 2, 2, 0, 3]])
    for weight in (None, torch.tensor([1, 3, 1, 1, 90, 2, 0])):
        partition(edges, 5, 2, method="kaminpar", edge_weight=weight)
    assert read[0] == [[(1, 1), (2, 1)], [(0, 1), (2, 1)], [(0, 1), (1, 1), (3, 1)], [(2, 1)], []]
    assert read[1] == [[(1, 2000), (2, 1000)], [(0, 2000), (2, 1000)], [(0, 1000), (1, 1000), (3, 1)], [(2, 1)], []]


def test_kaminpar_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaminpar = pytest.importorskip("kaminpar")
    paths, load = [], kaminpar.load_graph

    def spy(path: str, kind: Any) -> Any:
        paths.append(Path(path))
        return load(path, kind)

    monkeypatch.setattr(kaminpar, "load_graph", spy)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    partition(RING, 4, 2, method="kaminpar")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
    partition(RING, 4, 2, method="kaminpar")
    assert paths[1].is_relative_to(tmp_path)  # where there is no room in memory
    assert not any(path.parent.exists() for path in paths)


def test_no_room_for_kaminpars_file(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaminpar")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(partitioners, "_write_parhip", full)
    with pytest.raises(InputError, match=r"a temporary file of 96 bytes, but got .*No space left.*Set TMPDIR"):
        partition(RING, 4, 2, method="kaminpar")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "needs the package kaminpar, but got none.*pip install kaminpar"),
        (types.SimpleNamespace(__64bit__=False), "64-bit integers, but got one of 32 bits"),
    ],
)
def test_kaminpar_must_be_installed(module: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaminpar", module)
    for num_parts in (1, 2):
        with pytest.raises(InputError, match=message):
            partition(RING, 4, num_parts, method="kaminpar")


# --- Edge weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 1e-300, 1e307])
def test_heavy_edges_are_kept(factor: float, method: Partitioner) -> None:
    weight = torch.tensor([10.0, 1.0, 10.0, 1.0], dtype=torch.float64) * factor
    for shift, expected in ((0, {frozenset({0, 1}), frozenset({2, 3})}), (1, {frozenset({1, 2}), frozenset({3, 0})})):
        assert groups(partition(RING, 4, 2, method=method, edge_weight=weight.roll(shift))) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_weights_become_positive_integers(dtype: torch.dtype, metis_graph: dict[str, Any]) -> None:
    # Between 0 and 1: 1 + 3 in two directions. Between 1 and 2: 2 as a duplicate. The self-loop weighs nothing.
    edges = torch.tensor([[0, 1, 1, 1, 2, 2, 2], [1, 0, 2, 2, 2, 0, 3]])
    partition(edges, 4, 2, edge_weight=torch.tensor([1, 3, 1, 1, 90, 2, 0], dtype=dtype))
    assert metis_graph["neighbors"] == [[1, 2], [0, 2], [0, 1, 3], [2]]
    assert metis_graph["weights"] == [2000, 1000, 2000, 1000, 1000, 1000, 1, 1]


def test_narrow_metis_gets_weights_whose_sum_fits() -> None:
    scaled = partitioners.integers(torch.tensor([1.0, 3.0]), limit=127)
    assert scaled.tolist() == [16, 46]


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_equal_weights_are_no_weights(value: float, metis_graph: dict[str, Any]) -> None:
    partition(both_ways(RING), 4, 2, edge_weight=torch.full((8,), value))
    assert metis_graph["weights"] is None


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(bad: float) -> None:
    methods: list[Any] = ["metis", "random"]
    for method in methods:
        with pytest.raises(InputError, match=f"finite and not negative, but got {bad} for edge 2"):
            partition(RING, 4, 2, edge_weight=torch.tensor([1.0, 1.0, bad, 1.0]), method=method)


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(4, 1), torch.ones(4, dtype=torch.complex64)])
def test_weights_must_match_edges(weight: Tensor) -> None:
    with pytest.raises(InputError, match=r"real with shape \[num_edges\] = \[4\]"):
        partition(RING, 4, 2, edge_weight=weight)


# --- Random -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "num_parts"), [(10, 1), (10, 3), (10, 10), (1000, 7)])
def test_random_is_balanced(num_nodes: int, num_parts: int) -> None:
    sizes = partition(NO_EDGES, num_nodes, num_parts, method="random").bincount()
    assert sizes.numel() == num_parts
    assert sizes.max() - sizes.min() <= 1


def test_random_depends_on_its_seed_only() -> None:
    torch.manual_seed(1)
    first = partition(NO_EDGES, 100, 5, method="random", seed=3)
    state = torch.manual_seed(2).get_state()
    assert torch.equal(partition(RING, 100, 5, method="random", seed=3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(partition(RING, 100, 5, method="random", seed=4), first)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "num_parts", "message"),
    [
        (RING, 0, 1, "num_nodes must be an integer of at least 1, but got 0"),
        (RING, 4, 0, "num_parts must be an integer of at least 1, but got 0"),
        (RING, 4, 5, "but got 5 for 4 nodes. Ask for 1 to 4 parts"),
        (RING.float(), 4, 2, "int32 or int64, but got torch.float32"),
        (RING.bool(), 4, 2, "int32 or int64, but got torch.bool"),
        (RING.t(), 4, 2, r"shape \[2, num_edges\], but got shape \[4, 2\]"),
        (RING[0], 4, 2, r"shape \[2, num_edges\], but got shape \[4\]"),
        (RING, 3, 2, "between 0 and 2, but got values from 0 to 3"),
        (RING - 1, 4, 2, "between 0 and 3, but got values from -1 to 2"),
    ],
)
def test_bad_input_is_refused(edge_index: Tensor, num_nodes: int, num_parts: int, message: str) -> None:
    methods: list[Any] = ["metis", "random"]
    for method in methods:
        with pytest.raises(InputError, match=message):
            partition(edge_index, num_nodes, num_parts, method=method)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match="one of metis, kaminpar, random, but got 'louvain'"):
        partition(RING, 4, 1, method="louvain")  # type: ignore[arg-type]


# --- Given labels -----------------------------------------------------------------------------------------------------


def test_good_labels_pass() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        labels = check_labels(torch.tensor([2, 0, 1, 0], dtype=dtype), 4)
        assert labels.dtype == torch.int64
        assert labels.tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.0, 2.0]), "must be integers, but got torch.float32"),
        (torch.tensor([True, False, True]), "must be integers, but got torch.bool"),
        (torch.tensor([[0, 1, 2]]), r"got shape \[1, 3\]"),
        (torch.tensor([0, 1]), r"num_nodes = 3 at least 1, but got shape \[2\]"),
        (torch.tensor([0, -1, 1]), "must not be negative, but got -1"),
        (torch.tensor([0, 2, 2]), r"without gaps.*labels\.unique\(return_inverse=True\)\[1\]"),
        (torch.tensor([0, 1, 2**60]), "without gaps"),
    ],
)
def test_bad_labels_are_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(labels, 3)


def test_no_labels_are_refused() -> None:
    with pytest.raises(InputError, match="num_nodes = 0 at least 1"):
        check_labels(torch.empty(0, dtype=torch.int64), 0)


# --- Connectivity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "labels", "expected"),
    [
        ([[2], [0]], [0, 0, 1], [0.5, 0.0]),  # only the target's part has a halo
        ([[2, 2, 2], [0, 1, 0]], [0, 0, 1], [0.5, 0.0]),  # a halo node counts once
        ([[0, 1], [2, 2]], [0, 0, 1], [0.0, 2.0]),
        ([[0, 0], [1, 2]], [0, 1, 2], [0.0, 1.0, 1.0]),  # but once for each part
        ([[0, 1, 2], [1, 0, 2]], [0, 0, 1], [0.0, 0.0]),
        ([[], []], [0, 1], [0.0, 0.0]),
    ],
)
def test_connectivity(edges: list[list[int]], labels: list[int], expected: list[float]) -> None:
    ratio = connectivity(torch.tensor(edges, dtype=torch.int64), torch.tensor(labels))
    assert ratio.dtype == torch.float64
    assert ratio.tolist() == expected


def test_connectivity_of_a_random_graph() -> None:
    edges, labels = random_graph(60, 400), partition(NO_EDGES, 60, 5, method="random")
    part = labels.tolist()
    halos: list[set[int]] = [set() for _ in range(5)]
    for source, target in edges.t().tolist():
        if part[source] != part[target]:
            halos[part[target]].add(source)
    assert connectivity(edges, labels).tolist() == [len(halo) / 12 for halo in halos]


def test_connectivity_checks_its_input() -> None:
    with pytest.raises(InputError, match="without gaps"):
        connectivity(RING, torch.tensor([0, 0, 2, 2]))
    with pytest.raises(InputError, match="between 0 and 2"):
        connectivity(RING, torch.tensor([0, 0, 1]))


# --- Cache ------------------------------------------------------------------------------------------------------------


def test_cache_is_used(tmp_path: Path, metis_graph: dict[str, Any]) -> None:
    folder = tmp_path / "made" / "here"
    first = partition(RING, 4, 2, cache_dir=folder)
    assert torch.equal(partition(RING, 4, 2, cache_dir=str(folder)), first)
    assert metis_graph["calls"] == 1
    (file,) = folder.iterdir()  # no temporary file stays
    assert file.suffix == ".npz"
    assert np.load(file, allow_pickle=False)["labels"].tolist() == first.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"edge_index": RING.roll(1)},
        {"num_nodes": 5},
        {"num_parts": 3},
        {"seed": 1},
        {"edge_weight": torch.ones(4)},
        {"edge_weight": torch.tensor([1.0, 2.0, 1.0, 1.0])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_cache_tells_arguments_apart(change: dict[str, Any], tmp_path: Path, metis_graph: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"edge_index": RING, "num_nodes": 4, "num_parts": 2}
    partition(**arguments, cache_dir=tmp_path)
    partition(**arguments | change, cache_dir=tmp_path)
    assert metis_graph["calls"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_cache_tells_methods_and_versions_of_kaminpar_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaminpar = pytest.importorskip("kaminpar")
    partition(RING, 4, 2, cache_dir=tmp_path)
    first = partition(RING, 4, 2, method="kaminpar", cache_dir=tmp_path)
    monkeypatch.setattr(kaminpar, "KaMinPar", None)  # fails if called
    assert torch.equal(partition(RING, 4, 2, method="kaminpar", cache_dir=tmp_path), first)
    monkeypatch.undo()
    monkeypatch.setattr(kaminpar, "__version__", "another")
    partition(RING, 4, 2, method="kaminpar", cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_cache_tells_metis_versions_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition(RING, 4, 2, cache_dir=tmp_path)
    monkeypatch.setattr(pymetis, "version", "another")
    partition(RING, 4, 2, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def damage_nothing_left(file: Path) -> None:
    file.write_bytes(b"")


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def damage_other_bytes(file: Path) -> None:
    file.write_bytes(b"PK\x03\x04 not an array")


def damage_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(b"labels.npy") + 10 + 64 + 70] ^= 1  # in the labels, behind the header
    file.write_bytes(content)


def damage_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"{", b"(", 1))


def damage_other_graph(file: Path) -> None:
    np.savez(file, labels=np.array([0, 1, 0]))


def damage_other_parts(file: Path) -> None:
    np.savez(file, labels=np.array([0, 1, 2, 0]))


def damage_empty_part(file: Path) -> None:
    np.savez(file, labels=np.array([1, 1, 1, 1]))


@pytest.mark.parametrize(
    "damage",
    [
        damage_nothing_left,
        damage_truncated,
        damage_other_bytes,
        damage_one_bit,
        damage_header,
        damage_other_graph,
        damage_other_parts,
        damage_empty_part,
    ],
)
def test_damaged_cache_is_rewritten(damage: Any, tmp_path: Path, metis_graph: dict[str, Any]) -> None:
    expected = partition(RING, 4, 2, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    damage(file)
    with pytest.warns(UserWarning, match=f"cached partition {file} is damaged .* and is made again"):
        assert torch.equal(partition(RING, 4, 2, cache_dir=tmp_path), expected)
    assert metis_graph["calls"] == 2
    assert torch.equal(partition(RING, 4, 2, cache_dir=tmp_path), expected)
    assert metis_graph["calls"] == 2


def test_cache_never_unpickles(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    partition(RING, 4, 2, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    with file.open("wb") as stream:
        np.savez(stream, labels=np.array([Trap()]))
    with pytest.warns(UserWarning, match="is damaged"):
        partition(RING, 4, 2, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cache_dir must be a writable folder"):
        partition(RING, 4, 2, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_metis_is_cached(tmp_path: Path) -> None:
    partition(RING, 4, 2, method="random", cache_dir=tmp_path)
    partition(RING, 4, 1, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
