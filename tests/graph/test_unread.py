"""Rows that are read on first use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gnnautoscale as gas
from conftest import undirected_graph
from gnnautoscale.graph import UnreadRows

TABLE = torch.arange(12.0).view(6, 2)


@pytest.fixture
def reads() -> list[list[int]]:
    return []


@pytest.fixture
def unread(reads: list[list[int]]) -> UnreadRows:
    def read(nodes: Tensor, out: Tensor | None) -> Tensor:
        reads.append(nodes.tolist())
        return TABLE[nodes]

    return UnreadRows.of(torch.Size([3, 2]), torch.float32, torch.tensor([4, 0, 5]), read)


def test_questions_about_their_form_read_nothing(unread: UnreadRows, reads: list[list[int]]) -> None:
    assert (unread.shape, unread.size(0), unread.dim(), len(unread), unread.numel()) == ((3, 2), 3, 2, 3, 6)
    assert (unread.dtype, unread.device.type, unread.requires_grad) == (torch.float32, "cpu", False)
    assert unread.is_floating_point()
    assert (reads, unread.was_read) == ([], False)


def test_anything_computed_from_them_is_that_of_plain_rows(unread: UnreadRows, reads: list[list[int]]) -> None:
    plain, weight = TABLE[[4, 0, 5]], torch.randn(2, 2, requires_grad=True)
    for compute in (lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: F.linear(x, weight), lambda x: x[1:]):
        out = compute(unread)
        assert type(out) is Tensor
        assert torch.equal(out, compute(plain))
    assert reads == [[4, 0, 5]]
    assert unread.was_read
    F.linear(unread, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.equal(weight.grad, plain.sum(0).expand(2, 2))


def test_what_does_not_ask_for_rows_gets_none(unread: UnreadRows) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        assert unread.as_subclass(Tensor).isnan().all()


def test_what_is_written_stays(unread: UnreadRows) -> None:
    unread.mul_(2)
    assert torch.equal(unread + 0, 2 * TABLE[[4, 0, 5]])


@pytest.mark.gpu
def test_a_gpu_reads_features_when_they_are_used() -> None:
    data = undirected_graph()
    loader = gas.HaloLoader(data, 4, device="cuda")
    for unread, plain in zip(loader.in_order(unread=True), loader.in_order(), strict=True):
        assert isinstance(unread.x, UnreadRows)
        assert not unread.x.was_read
        assert torch.equal(unread.x + 0, plain.x)
