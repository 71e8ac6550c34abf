"""Functions of values per edge and head against rows per edge, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.errors import InputError
from gnnautoscale.kernels import (
    Adjacency,
    additive_scores,
    edge_dots,
    max_at_targets,
    rows_at_edges,
    sum_at_nodes,
    weighted_sum,
)
from support import kernels as support
from support.kernels import DEGREES, HALVES, Hubs, RandomEdges, integers

device, interpreter, short_segments = support.device, support.interpreter, support.short_segments

SHAPES = [(1, 1), (3, 5), (2, 16), (1, 130)]


class Case:
    """A function, the same in plain torch with a row per edge, and what goes in.

    That is a row per target, source or head, ``"t"``, ``"s"`` or ``"f"``, or a value per edge and head, ``"e"``.
    """

    def __init__(self, run: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: str) -> None:
        self.run, self.plain, self.inputs = run, plain, inputs

    def given(self, graph: RandomEdges, heads: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        sizes = {"t": graph.num_targets, "s": graph.num_sources, "e": graph.source.numel()}
        shapes = [(sizes[kind], heads, width) if kind in sizes else (heads, width) for kind in self.inputs]
        shapes = [shape[:2] if kind == "e" else shape for kind, shape in zip(self.inputs, shapes, strict=True)]
        made = enumerate(shapes)
        return [integers(*shape, device=str(graph.source.device), dtype=dtype, seed=seed) for seed, shape in made]

    def expected(self, graph: RandomEdges, given: list[Tensor], grad: Tensor) -> list[Tensor]:
        """Result and gradients, in double precision on the CPU."""
        wide = [value.detach().double().cpu().requires_grad_() for value in given]
        out = self.plain(graph.target.cpu(), graph.source.cpu(), graph, *wide)
        return [out.detach(), *torch.autograd.grad(out, wide, grad.double().cpu().view_as(out))]

    def found(self, adjacency: Adjacency, given: list[Tensor], seed: int = 9) -> tuple[list[Tensor], Tensor]:
        leaves = [value.detach().requires_grad_() for value in given]
        out = self.run(adjacency, *leaves)
        grad = integers(*out.shape, device=str(out.device), dtype=out.dtype, seed=seed)
        grads = torch.autograd.grad(out, leaves, grad)
        assert {value.dtype for value in (out, *grads)} == {given[0].dtype}
        return [out.detach(), *grads], grad


def add_up(graph: RandomEdges, messages: Tensor, target: Tensor) -> Tensor:
    return messages.new_zeros(graph.num_targets, *messages.shape[1:]).index_add(0, target, messages)


CASES = {
    "weighted sum": Case(
        weighted_sum, lambda t, s, graph, w, x: add_up(graph, w.unsqueeze(-1) * x[s], t), "e", "s"
    ),
    "dots": Case(edge_dots, lambda t, s, graph, a, b: (a[t] * b[s]).sum(-1), "t", "s"),
    "scores": Case(
        lambda adjacency, a, b, f: additive_scores(adjacency, a, b, f, 0.25),
        lambda t, s, graph, a, b, f: (F.leaky_relu(a[t] + b[s], 0.25) * f).sum(-1),
        "t", "s", "f",
    ),
    "scores of relu": Case(
        lambda adjacency, a, b, f: additive_scores(adjacency, a, b, f, 0.0),
        lambda t, s, graph, a, b, f: (F.relu(a[t] + b[s]) * f).sum(-1),
        "t", "s", "f",
    ),
    "rows of sources": Case(
        lambda adjacency, x: rows_at_edges(adjacency, x, "source"), lambda t, s, graph, x: x[s], "s"
    ),
    "rows of targets": Case(
        lambda adjacency, x: rows_at_edges(adjacency, x, "target"), lambda t, s, graph, x: x[t], "t"
    ),
    "sums at targets": Case(sum_at_nodes, lambda t, s, graph, v: add_up(graph, v, t), "e"),
    "sums at sources": Case(
        lambda adjacency, v: sum_at_nodes(adjacency, v, "source"),
        lambda t, s, graph, v: v.new_zeros(graph.num_sources, v.size(1)).index_add(0, s, v),
        "e",
    ),
}  # fmt: skip


# Two that follow each other have kernels in common, and all shapes between them.
@pytest.mark.parametrize(
    ("name", "heads", "width"),
    [(name, *shape) for number, name in enumerate(CASES) for shape in SHAPES[number % 2 :: 2]],
)
def test_equals_a_row_per_edge(device: str, name: str, heads: int, width: int) -> None:
    """Whole numbers and powers of two, so that nothing is rounded."""
    graph, case = RandomEdges(device, weighted=False), CASES[name]
    given = case.given(graph, heads, width)
    found, grad = case.found(graph.adjacency(), given)
    for got, expected in zip(found, case.expected(graph, given, grad), strict=True):
        assert torch.equal(got.double().cpu(), expected)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("name", "of", "degrees"),
    [
        *((name, "target", "several") for name in CASES if not name.endswith("sources")),  # which add nothing up there
        *((name, "source", "several") for name in ("dots", "rows of sources", "sums at sources")),
        *((name, "source", "as long as a piece") for name in ("weighted sum", "scores")),
    ],
)
def test_long_rows(device: str, name: str, of: str, degrees: str) -> None:
    graph, case = Hubs(device, DEGREES[degrees], weighted=False, of=of), CASES[name]
    given = case.given(graph, 2, 5)
    found, grad = case.found(graph.adjacency(), given)
    for got, expected in zip(found, case.expected(graph, given, grad), strict=True):
        assert torch.equal(got.double().cpu(), expected)


@pytest.mark.parametrize(("name", "dtype"), list(zip(CASES, cycle(HALVES), strict=False)))
def test_half_precision(device: str, name: str, dtype: torch.dtype) -> None:
    graph, case = RandomEdges(device, weighted=False), CASES[name]
    given = case.given(graph, 2, 5, dtype)
    found, grad = case.found(graph.adjacency(), given)
    for got, expected in zip(found, case.expected(graph, given, grad), strict=True):
        torch.testing.assert_close(got.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_no_edges_and_no_nodes(device: str, name: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    for number in (3, 0):
        adjacency = Adjacency.build(none, none, number, number)
        shapes = {"t": (number, 2, 4), "s": (number, 2, 4), "e": (0, 2), "f": (2, 4)}
        given = [torch.ones(shapes[kind], device=device) for kind in CASES[name].inputs]
        found, _ = CASES[name].found(adjacency, given)
        assert not any(value.any() for value in found)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    graph, case = RandomEdges("cpu", weighted=False), CASES[name]
    torch.manual_seed(1)
    given = [torch.randn_like(value, dtype=torch.float64, requires_grad=True) for value in case.given(graph, 2, 3)]
    adjacency = graph.adjacency()
    twice = partial(torch.autograd.gradgradcheck, lambda *values: case.run(adjacency, *values).square(), fast_mode=True)
    assert twice(given)
    constant = [given[0], *(value.detach() for value in given[1:])]
    assert twice(constant)


def test_largest_value_of_each_target(device: str) -> None:
    graph = RandomEdges(device, weighted=False)
    values = integers(122, 3, device=device) - 5
    found = max_at_targets(graph.adjacency(), values)
    for target in range(6):
        own = values[graph.target == target]
        assert torch.equal(found[target], own.amax(0) if own.numel() else torch.zeros(3, device=device))


def test_adjacency_on_another_device_keeps_what_edge_values_need(device: str) -> None:
    graph, case = RandomEdges(device, weighted=False), CASES["scores"]
    whole = graph.adjacency()
    moved = Adjacency.of(whole.tensors(edge_values=True), graph.num_sources)
    assert {"order_t", "target"} <= vars(moved).keys()
    given = case.given(graph, 2, 5)
    for got, expected in zip(case.found(moved, given)[0], case.found(whole, given)[0], strict=True):
        assert torch.equal(got, expected)


def test_no_row_per_edge_is_made() -> None:
    """Ends of edges are taken a few at a time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                value.numel() for value in (out if isinstance(out, tuple) else [out]) if isinstance(value, Tensor)
            )
            return out

    generator = torch.Generator().manual_seed(0)
    target = torch.randint(50, (20_000,), generator=generator).sort().values
    source = torch.randint(50, (20_000,), generator=generator)
    adjacency = Adjacency.build(target, source, 50, 50)
    rows, weight = torch.randn(50, 2, 128, requires_grad=True), torch.randn(20_000, 2, requires_grad=True)
    with Sizes():  # type: ignore[no-untyped-call]
        out = weighted_sum(adjacency, weight, rows).sum() + edge_dots(adjacency, rows, rows).sum()
        (out + additive_scores(adjacency, rows, rows, rows[0]).sum()).backward()  # type: ignore[no-untyped-call]
    assert 20_000 * 2 <= max(sizes) < 20_000 * 2 * 128 / 10


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda a, x, w: weighted_sum(a, w, x[:1]), "x must hold"),
        (lambda a, x, w: weighted_sum(a, w[:, :1], x), "weight must have shape"),
        (lambda a, x, w: edge_dots(a, x[:, :, :1], x), "the same heads"),
        (lambda a, x, w: edge_dots(a, x.long(), x), "targets must hold"),
        (lambda a, x, w: additive_scores(a, x, x, w), "factor must have shape"),
    ],
)
def test_wrong_shapes_are_refused(call: Callable[..., Tensor], rule: str) -> None:
    adjacency = Adjacency.build(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1]), 2, 2)
    with pytest.raises(InputError, match=rule):
        call(adjacency, torch.ones(2, 2, 4), torch.ones(3, 2))
