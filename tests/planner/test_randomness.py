"""Random numbers that are replaced by constants, each by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.utils import dropout_edge, dropout_node  # type: ignore[import-untyped]

from gnnautoscale.planner.randomness import expected_randomness

X = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def empty(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(2, dtype=dtype)


# What to draw, and what it gives.
DRAWS: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "dropout": (lambda: F.dropout(X, 0.6), X),
    "dropout in place": (lambda: F.dropout(X.clone(), 0.6, inplace=True), X),
    "dropout of everything": (lambda: F.dropout(X, 1.0), torch.zeros(2, 2)),
    "dropout of columns": (lambda: F.dropout1d(X, 0.6), X),
    "dropout module": (lambda: nn.Dropout(0.3)(X), X),
    "bernoulli": (lambda: torch.bernoulli(torch.tensor([0.25, 1.0])), torch.tensor([0.25, 1.0])),
    "bernoulli with a probability": (lambda: torch.bernoulli(X, 0.25), torch.full((2, 2), 0.25)),
    "bernoulli_": (lambda: empty().bernoulli_(0.25), torch.full((2,), 0.25)),
    "bernoulli_ without a probability": (lambda: empty().bernoulli_(), torch.full((2,), 0.5)),
    "bernoulli_ of tensors": (lambda: empty().bernoulli_(torch.tensor([0.0, 0.75])), torch.tensor([0.0, 0.75])),
    "bernoulli_ of flags": (lambda: empty(torch.bool).bernoulli_(0.25), torch.tensor([True, True])),
    "rand": (lambda: torch.rand(2), torch.full((2,), 0.5)),
    "rand with a type": (lambda: torch.rand(2, dtype=torch.double), torch.full((2,), 0.5, dtype=torch.double)),
    "rand with a generator": (lambda: torch.rand(2, generator=torch.Generator()), torch.full((2,), 0.5)),
    "rand_like": (lambda: torch.rand_like(X), torch.full((2, 2), 0.5)),
    "uniform_": (lambda: empty().uniform_(), torch.full((2,), 0.5)),
    "uniform_ in an interval": (lambda: empty().uniform_(-1.0, 4.0), torch.full((2,), 1.5)),
    "randn": (lambda: torch.randn(2), torch.full((2,), 0.3)),
    "randn_like": (lambda: torch.randn_like(X), torch.full((2, 2), 0.3)),
    "normal_": (lambda: empty().normal_(), torch.full((2,), 0.3)),
    "normal_ with mean and deviation": (lambda: empty().normal_(2.0, 10.0), torch.full((2,), 5.0)),
    "normal of means": (lambda: torch.normal(X, 1.0), X + 0.3),
    "normal of deviations": (lambda: torch.normal(1.0, X.abs()), 1.0 + 0.3 * X.abs()),
    "normal of a size": (lambda: torch.normal(2.0, 10.0, (2,)), torch.full((2,), 5.0)),
    "exponential_": (lambda: empty().exponential_(4.0), torch.full((2,), 0.25)),
    "randperm": (lambda: torch.randperm(4), torch.tensor([3, 2, 1, 0])),
    "gumbel softmax": (lambda: F.gumbel_softmax(X, tau=2.0), (X / 2).softmax(-1)),
    "edge dropout": (lambda: dropout_edge(torch.tensor([[0, 1], [1, 0]]), 0.3)[1], torch.tensor([True, True])),
    "node dropout": (lambda: dropout_node(torch.tensor([[0, 1], [1, 0]]), 0.3)[2], torch.tensor([True, True])),
}


@pytest.mark.parametrize("name", DRAWS)
def test_constants_in_place_of_draws(name: str) -> None:
    draw, expected = DRAWS[name]
    before = torch.get_rng_state()
    with expected_randomness():
        found = draw()
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_uniform_numbers_have_the_wanted_level() -> None:
    """A model that compares them with a probability takes both branches."""
    with expected_randomness(0.25):
        assert float(torch.rand(())) == 0.25
        assert torch.equal(torch.rand_like(X), torch.full((2, 2), 0.25))
        assert torch.equal(empty().uniform_(2.0, 4.0), torch.full((2,), 2.5))
        assert torch.equal(F.dropout(X, 0.6), X)
        assert float(torch.randn(())) == pytest.approx(0.3)


def test_gradients_flow() -> None:
    x = X.clone().requires_grad_()
    with expected_randomness():
        noisy = F.dropout(x, 0.6) * torch.rand_like(x) + torch.randn_like(x)
        torch.autograd.backward(noisy.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 2), 0.5))


def test_rows_do_not_depend_on_their_number() -> None:
    with expected_randomness():
        assert torch.equal(F.dropout(X, 0.5)[:1], F.dropout(X[:1], 0.5))
        assert torch.equal(torch.randn(5)[:2], torch.randn(2))


def test_what_is_not_random_is_computed_as_ever() -> None:
    norm = nn.BatchNorm1d(2)
    with expected_randomness():
        out = norm(X) @ torch.eye(2)
    assert torch.equal(out, nn.BatchNorm1d(2)(X))


def test_draws_are_random_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), expected_randomness():
        raise ZeroDivisionError
    assert len(set(torch.rand(20).tolist())) == 20
