"""Lazy edges: the same values and gradients as on plain edges, without a row per edge where that is possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.utils import scatter, softmax  # type: ignore[import-untyped]

from gnnautoscale.forward.lazy import LazyEdges, LazyTensor
from gnnautoscale.kernels import Adjacency

ROWS, TARGETS, EDGES, HEADS, WIDTH = 11, 7, 40, 2, 3


class Rows:
    """Edges into the first rows, a node without any among them, and what layers compute with."""

    def __init__(self, num_edges: int = EDGES, num_rows: int = ROWS, num_targets: int = TARGETS) -> None:
        draw = torch.Generator().manual_seed(2)
        target = torch.randint(num_targets - 1, (num_edges,), generator=draw).sort().values
        source = torch.randint(num_rows, (num_edges,), generator=draw)
        self.edge_index, self.num_targets = torch.stack([source, target]), num_targets
        self.adjacency = Adjacency.build(target, source, num_targets, num_rows)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

        self.x, self.y = randn(num_rows, HEADS, WIDTH), randn(num_rows, HEADS, WIDTH)
        self.weight, self.factor = randn(num_edges, HEADS), randn(1, HEADS, WIDTH)
        self.matrix = randn(5, WIDTH)

    @property
    def given(self) -> list[Tensor]:
        return [self.x, self.y, self.weight, self.factor, self.matrix]

    def edges(self, *, short: bool = False) -> LazyEdges:
        return LazyEdges.of(self.edge_index, self.adjacency, 1, short=short)


# What layers may do with the rows of sources, of targets, a weight per edge and head, a factor and a matrix; and
# whether the result is lazy, calculated by a kernel, or takes a row per edge on the way.
LAZY, KERNEL, DENSE = "lazy", "kernel", "dense"
OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "source": (lambda s, t, w, f, m: s, LAZY),
    "factor": (lambda s, t, w, f, m: f * s, LAZY),
    "halves": (lambda s, t, w, f, m: s / 2, LAZY),
    "moved": (lambda s, t, w, f, m: 1 - s, LAZY),
    "moved back": (lambda s, t, w, f, m: (s - 1) - f, LAZY),
    "same end": (lambda s, t, w, f, m: s * s + s, LAZY),
    "linear": (lambda s, t, w, f, m: F.linear(s, m), LAZY),
    "tanh": (lambda s, t, w, f, m: s.tanh(), LAZY),
    "elu": (lambda s, t, w, f, m: F.elu(s), LAZY),
    "relu": (lambda s, t, w, f, m: F.relu(t), LAZY),
    "scores of one end": (lambda s, t, w, f, m: (s * f).sum(-1), LAZY),
    "view": (lambda s, t, w, f, m: s.view(-1, HEADS * WIDTH), LAZY),
    "reshape": (lambda s, t, w, f, m: s.reshape(EDGES, WIDTH, HEADS).unsqueeze(-1), LAZY),
    "edges last": (lambda s, t, w, f, m: s.reshape(HEADS * WIDTH, -1), DENSE),
    "sum of ends": (lambda s, t, w, f, m: t + s, LAZY),
    "difference": (lambda s, t, w, f, m: t - s, LAZY),
    "three": (lambda s, t, w, f, m: s + (t + s) + t, LAZY),
    "bias": (lambda s, t, w, f, m: F.leaky_relu(t + s + f, 0.2), LAZY),
    "GATv2": (lambda s, t, w, f, m: (F.leaky_relu(t + s, 0.2) * f).sum(dim=-1), KERNEL),
    "GATv2 relu": (lambda s, t, w, f, m: (torch.relu(s - t) * f / 3).sum(-1, keepdim=True), KERNEL),
    "GATv2 plain": (lambda s, t, w, f, m: (s + t).sum((-1,)), KERNEL),
    "activated twice": (lambda s, t, w, f, m: F.relu(F.leaky_relu(t + s)), DENSE),
    "activated in place": (lambda s, t, w, f, m: F.leaky_relu(t + s, inplace=True), DENSE),
    "tanh of sum": (lambda s, t, w, f, m: (t + s).tanh(), DENSE),
    "scaled, then activated": (lambda s, t, w, f, m: F.relu((t + s) * f), DENSE),
    "product": (lambda s, t, w, f, m: s * t, LAZY),
    "dots": (lambda s, t, w, f, m: (t * s).sum(-1) / 2, KERNEL),
    "scaled dots": (lambda s, t, w, f, m: torch.sum(t * s * f / 2, dim=2), KERNEL),
    "broadcast": (lambda s, t, w, f, m: (s * t[:, :, :1]).sum(-1), DENSE),
    "broadcast gate": (lambda s, t, w, f, m: (s * t.sum(-1, keepdim=True)).sum(-1), KERNEL),
    "sum over heads": (lambda s, t, w, f, m: (t * s).sum(1), DENSE),
    "weighted": (lambda s, t, w, f, m: w.unsqueeze(-1) * s, LAZY),
    "weighted twice": (lambda s, t, w, f, m: w[:, :1, None] * (s * w.view(-1, HEADS, 1)) * f, LAZY),
    "weighted view": (lambda s, t, w, f, m: (w.unsqueeze(-1) * s).view(-1, HEADS * WIDTH) * w[:, :1], LAZY),
    "weighted target": (lambda s, t, w, f, m: w.unsqueeze(-1) * t, DENSE),
    "weighted by column": (lambda s, t, w, f, m: s * w[:, :, None].expand(-1, -1, WIDTH), DENSE),
    "weighted by view": (lambda s, t, w, f, m: (w.unsqueeze(-1) * s).view(-1, WIDTH, HEADS) * w[:, :1, None], LAZY),
    "edge features": (lambda s, t, w, f, m: s + w.unsqueeze(-1), DENSE),
    "concatenated": (lambda s, t, w, f, m: torch.cat([s, t], -1), DENSE),
    "alpha": (lambda s, t, w, f, m: torch.add(s, t, alpha=2), DENSE),
    "dropout": (lambda s, t, w, f, m: F.dropout(s, 0.5, training=False), DENSE),
    "written to": (lambda s, t, w, f, m: s.mul_(2.0) + s, DENSE),
}


def computed(rows: Rows, run: Callable[..., Any], edge_index: Tensor) -> Any:
    at = (rows.x.index_select(0, edge_index[0]), rows.y[edge_index[1]])
    return run(*at, rows.weight, rows.factor, rows.matrix)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_the_same(name: str) -> None:
    rows = Rows()
    run, kind = OPERATIONS[name]
    expected, found = (computed(rows, run, edges) for edges in (rows.edge_index, rows.edges()))
    assert isinstance(found, LazyTensor) == (kind == LAZY)
    assert found.shape == expected.shape
    assert found.dim() == expected.dim()
    assert found.dtype == expected.dtype
    assert found.requires_grad
    if kind == LAZY:
        assert found.term is not None
    grad = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(found + 0.0 * grad, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out * grad, rows.given, grad, allow_unused=True) for out in (found, expected)]
    for got, wanted in zip(*grads, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_messages_add_up_to_the_same(name: str, reduce: str) -> None:
    rows = Rows()

    def run(edge_index: Tensor) -> Tensor:
        messages = computed(rows, OPERATIONS[name][0], edge_index)
        if messages.size(0) != EDGES:
            pytest.skip("no row per edge")
        out: Tensor = scatter(messages, edge_index[1], 0, ROWS, reduce)
        return out

    expected, found = run(rows.edge_index), run(rows.edges())
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), rows.given, allow_unused=True) for out in (found, expected)]
    for got, wanted in zip(*grads, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
def test_sides_follow_the_flow_of_messages(reverse: bool) -> None:
    rows = Rows()
    plain = rows.edge_index.flip(0) if reverse else rows.edge_index
    edges = LazyEdges.of(plain, rows.adjacency, 0 if reverse else 1)
    first, second = (row for row in edges if isinstance(row, LazyEdges))
    sides = ["target", "source"] if reverse else ["source", "target"]
    assert [first.side, second.side] == [edges.row(0).side, edges.row(-1).side] == sides
    assert [row.side for row in edges.unbind() if isinstance(row, LazyEdges)] == sides
    assert [row.side for row in (edges[0], edges[-1]) if isinstance(row, LazyEdges)] == sides
    assert torch.equal(rows.x.index_select(0, first) + 0, rows.x[plain[0]])
    assert type(edges[:, :3]) is type(first < 3) is type(first.float()) is Tensor


def test_softmax_over_targets() -> None:
    rows = Rows()
    for num_nodes in (ROWS, TARGETS):
        expected, found = (
            softmax(rows.weight, edge_index[1], num_nodes=num_nodes) for edge_index in (rows.edge_index, rows.edges())
        )
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grad = torch.randn_like(found)
        got, wanted = (torch.autograd.grad(out, rows.weight, grad)[0] for out in (found, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_maxima_keep_rows_without_edges() -> None:
    rows, values = Rows(), torch.arange(EDGES, dtype=torch.float64)
    results = [
        torch.full((ROWS,), -5.0, dtype=torch.float64).scatter_reduce_(0, edges[1], values, "amax", include_self=False)
        for edges in (rows.edge_index, rows.edges())
    ]
    assert torch.equal(*results)
    assert results[0].tolist()[TARGETS - 1 :] == [-5.0] * (ROWS - TARGETS + 1)


def test_short_sums_have_a_row_per_target() -> None:
    rows = Rows()
    whole, short = rows.edges(), rows.edges(short=True)
    for messages in (rows.x.index_select(0, short[0]), rows.x.index_select(0, short[0]) * rows.weight.unsqueeze(-1)):
        out = scatter(messages, short[1], 0, ROWS)
        assert out.shape == (TARGETS, HEADS, WIDTH)
        torch.testing.assert_close(out, scatter(messages + 0.0, whole[1], 0, ROWS)[:TARGETS])
        # What the sum was to be written to has all rows.
        base = messages.new_zeros(ROWS, HEADS, WIDTH)
        base.index_add_(0, short[1], messages)
        torch.testing.assert_close(base[:TARGETS] + 0.0, out)
        assert base.shape == (ROWS, HEADS, WIDTH)
        assert not bool(base[TARGETS:].any())


def test_sums_are_added_to_what_is_there() -> None:
    rows = Rows()
    edges = rows.edges()
    messages = rows.x.index_select(0, edges[0])
    for function in ("index_add", "index_add_"):
        base = torch.ones(ROWS, HEADS, WIDTH, dtype=torch.float64)
        expected = base.index_add(0, rows.edge_index[1], rows.x[rows.edge_index[0]])
        out = getattr(base, function)(0, edges[1], messages)
        torch.testing.assert_close(out, expected)
        assert (out is base) == (function == "index_add_")
        added = getattr(messages.new_zeros(ROWS, HEADS, WIDTH), function)(0, edges[1], messages)
        torch.testing.assert_close(added + 1.0, expected)


def test_a_changed_tensor_stays_changed() -> None:
    rows = Rows()
    edges = rows.edges()
    lazy = rows.x.detach().index_select(0, edges[0])
    lazy.zero_()
    assert not bool((lazy * rows.weight.unsqueeze(-1)).any())
    assert not bool(scatter(lazy, edges[1], 0, ROWS).any())


def test_lazy_tensors_copy_as_plain_ones() -> None:
    rows = Rows()
    with torch.no_grad():
        lazy = rows.x.index_select(0, rows.edges()[0])
        assert type(copy.deepcopy(lazy)) is type(copy.deepcopy(rows.edges())) is Tensor
        assert torch.equal(copy.deepcopy(lazy), rows.x[rows.edge_index[0]])


def test_what_gets_past_torch_functions_fails() -> None:
    """It would lose the gradient."""
    lazy = Rows().x.index_select(0, Rows().edges()[0])
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="no values yet"):
        lazy.sin()


def test_rows_of_another_number_or_type_are_gathered_as_usual() -> None:
    rows = Rows()
    source, target = rows.edges()
    larger = torch.randn(ROWS + 1, 2)
    for x, index in (
        (larger, source),
        (rows.x.long(), source),
        (torch.arange(ROWS), target),
        (rows.x[:, 0, 0], target),
    ):
        found = x.index_select(0, index)
        assert type(found) is Tensor
        assert torch.equal(found, x[index.plain])
    assert torch.equal(larger.t().index_select(1, source), larger.t()[:, source.plain])
    with pytest.raises(IndexError):
        rows.x[:3].index_select(0, target)


# Layers ##############################################################################################################


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most values of a tensor in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self.values = max(self.values, value.untyped_storage().nbytes() // value.element_size())
        return out


C = 32


class DotProduct(pyg.MessagePassing):  # type: ignore[misc]
    """A layer of one's own, with the scores in its messages."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, query=self.query(x), key=self.key(x), x=x)

    def message(self, query_i: Tensor, key_j: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        scores = (query_i * key_j / C**0.5).sum(-1, keepdim=True)
        return F.dropout(softmax(scores, index, num_nodes=size_i), 0.0) * x_j


class Additive(pyg.MessagePassing):  # type: ignore[misc]
    """Another one, whose projections are in the message."""

    def __init__(self) -> None:
        super().__init__(aggr="mean", node_dim=0)
        self.left, self.right, self.score = nn.Linear(C, C), nn.Linear(C, C), nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        scores = (F.relu(self.left(x_i) - self.right(x_j)) * self.score).sum(-1)
        messages: Tensor = softmax(scores, index, num_nodes=size_i).view(-1, 1) * self.right(x_j)
        return messages


class Gated(pyg.MessagePassing):  # type: ignore[misc]
    """One that needs a row per edge."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j).sigmoid() * x_j


LAYERS: dict[str, Callable[[], Any]] = {
    "GAT": lambda: pyg.GATConv(C, C, 2, add_self_loops=False),
    "GAT averaged": lambda: pyg.GATConv(C, C, 2, add_self_loops=False, concat=False),
    "GATv2": lambda: pyg.GATv2Conv(C, C, 2, add_self_loops=False),
    "GATv2 shared": lambda: pyg.GATv2Conv(C, C, 1, add_self_loops=False, share_weights=True),
    "Transformer": lambda: pyg.TransformerConv(C, C, 2),
    "SuperGAT": lambda: pyg.SuperGATConv(C, C, 2, add_self_loops=False, attention_type="MX"),
    "SuperGAT dots": lambda: pyg.SuperGATConv(C, C, 2, add_self_loops=False, attention_type="SD"),
    "AGNN": lambda: pyg.AGNNConv(add_self_loops=False),
    "dot product": DotProduct,
    "additive": Additive,
    "gated": Gated,
    "GEN": lambda: pyg.GENConv(C, C),
    "ResGated": lambda: pyg.ResGatedGraphConv(C, C),
}
WITH_ROWS = {"gated", "GEN", "ResGated"}
# They add, or divide by, something with a row for all.
NOT_SHORT = {"Transformer", "additive"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_same_without_a_row_per_edge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, num_edges = 150, 20_000
    rows = Rows(num_edges, num_rows, 140)
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    x = torch.randn(num_rows, C, dtype=torch.float64, requires_grad=True)
    given = [x, *layer.parameters()]

    def run() -> tuple[Tensor, ...]:
        out = layer(x, rows.edge_index)[: rows.num_targets]
        grads = torch.autograd.grad(out.square().sum(), given, allow_unused=True)
        return out.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)

    expected = run()
    edges = rows.edges(short=name not in NOT_SHORT)
    for method in ("propagate", "edge_updater"):
        plain = getattr(layer, method)
        monkeypatch.setitem(layer.__dict__, method, lambda edge_index, plain=plain, **given: plain(edges, **given))
    monkeypatch.setattr("gnnautoscale.kernels.plain_attention._CPU_VALUES", 4096)
    with Largest() as largest:
        found = run()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert (largest.values >= C * num_edges) == (name in WITH_ROWS)
    assert name in WITH_ROWS or largest.values <= 2 * num_edges
