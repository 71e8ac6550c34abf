"""Rows that are exchanged once it is known what is added to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnnautoscale.forward.pending import PendingRows, exchanged


class Noted:
    """Exchanges rows by adding a hundred, and writes down of which calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, kind: str, calls: tuple[str, ...], rows: Tensor) -> Tensor:
        assert type(rows) is Tensor
        self.calls.append(calls)
        return rows + 100.0

    def pending(self, value: float, call: str, kind: str = "paper") -> PendingRows:
        return PendingRows.of(torch.full((2, 3), value), self, kind, (call,))


Combine = Callable[[Tensor, Tensor], Tensor]

COMBINED: dict[str, tuple[Combine, float]] = {
    "+": (lambda a, b: a + b, 5.0),
    "built-in sum": (lambda a, b: 0 + a + b, 5.0),
    "stack, sum": (lambda a, b: torch.stack([a, b], dim=0).sum(dim=0), 5.0),
    "stack, mean": (lambda a, b: torch.mean(torch.stack([a, b], dim=0), dim=0), 2.5),
    "stack, max": (lambda a, b: torch.max(torch.stack([a, b], dim=0), dim=0)[0], 3.0),
    "maximum": (lambda a, b: torch.maximum(a, b), 3.0),
    "max": (lambda a, b: torch.max(a, b), 3.0),
    "scaled": (lambda a, b: (a + b) / 2, 2.5),
    "in place": (lambda a, b: a.add_(b), 5.0),
}


@pytest.mark.parametrize("name", COMBINED)
def test_combined_rows_are_exchanged_together(name: str) -> None:
    noted = Noted()
    combine, want = COMBINED[name]
    rows = combine(noted.pending(2.0, "one"), noted.pending(3.0, "two"))
    assert isinstance(rows, PendingRows)
    assert not noted.calls
    assert torch.equal(F.relu(rows), torch.full((2, 3), want + 100.0))
    assert torch.equal(rows * torch.ones(1), torch.full((2, 3), want + 100.0))  # and once only
    assert noted.calls == [("one", "two")]


def test_rows_side_by_side_are_combined() -> None:
    noted = Noted()
    rows = torch.cat([noted.pending(1.0, "one"), noted.pending(2.0, "two")], dim=-1)
    assert exchanged(rows).tolist() == [[101.0] * 3 + [102.0] * 3] * 2
    assert noted.calls == [("one", "two")]
    stacked = torch.stack([noted.pending(1.0, "one"), noted.pending(2.0, "two")], dim=1)
    assert exchanged(stacked).shape == (2, 2, 3)
    assert noted.calls[1:] == [("one", "two")]


def test_anything_else_exchanges_first() -> None:
    noted = Noted()
    one, two = noted.pending(1.0, "one"), noted.pending(2.0, "two")
    assert (one + torch.ones(3)).tolist() == [[102.0] * 3] * 2  # a residual is no layer's rows
    assert torch.cat([one, two], dim=0).shape == (4, 3)
    assert noted.calls == [("one",), ("two",)]
    assert (noted.pending(1.0, "a") + noted.pending(1.0, "b", kind="author")).tolist() == [[202.0] * 3] * 2
    stacked = torch.stack([noted.pending(1.0, "c"), noted.pending(2.0, "d")], dim=0)
    assert stacked[1].tolist() == [[102.0] * 3] * 2
    assert noted.calls[2:] == [("a",), ("b",), ("c",), ("d",)]


def test_a_look_at_the_shape_exchanges_nothing() -> None:
    noted = Noted()
    rows = noted.pending(1.0, "one")
    assert (rows.shape, rows.size(0), rows.dtype, rows.dim(), rows.requires_grad) == (
        (2, 3),
        2,
        torch.float32,
        2,
        False,
    )
    assert not noted.calls


def test_what_was_added_to_is_forgotten() -> None:
    noted = Noted()
    before: Tensor = noted.pending(1.0, "one")
    rows = before
    rows += noted.pending(2.0, "two")
    assert before.relu().tolist() == rows.relu().tolist() == [[103.0] * 3] * 2
    assert noted.calls == [("one", "two")]


def test_gradients_flow() -> None:
    noted, weight = Noted(), torch.ones(2, 3, requires_grad=True)
    rows = PendingRows.of(2 * weight, noted, "paper", ("one",)) + PendingRows.of(3 * weight, noted, "paper", ("two",))
    rows.relu().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[5.0] * 3] * 2
