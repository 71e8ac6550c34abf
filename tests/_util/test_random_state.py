"""Going back to an earlier random state."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from gnnautoscale._util.nested import tensors_in
from gnnautoscale._util.random_state import RandomState, random_states, set_random_states, undisturbed

CPU = torch.device("cpu")


def drawn() -> list[Any]:
    """Numbers from everywhere; an odd number of normal ones, which are drawn in pairs."""
    return [
        random.random(), random.gauss(0, 1), random.randrange(10**9), random.sample(range(99), 5),
        *np.random.rand(2), float(np.random.randn()), int(np.random.randint(10**9)),  # noqa: NPY002
        *torch.rand(3).tolist(), *torch.randperm(5).tolist(), float(torch.randn(())),
    ]  # fmt: skip


def test_the_same_numbers_come_again_and_then_new_ones() -> None:
    state = RandomState(CPU)
    first = torch.rand(3)
    with state.again():
        assert torch.equal(torch.rand(3), first)
    second = torch.rand(3)
    assert not torch.equal(second, first)
    torch.manual_seed(12)  # as before the test
    torch.rand(3)
    assert torch.equal(torch.rand(3), second)


def test_drawing_is_noticed() -> None:
    state = RandomState(CPU)
    torch.ones(3).sum()
    assert not state.has_moved
    torch.rand(1)
    assert state.has_moved


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@pytest.mark.parametrize("before", range(4))
def test_everything_goes_on_from_a_state_that_went_through_a_file(before: int) -> None:
    seed_all(3)
    for _ in range(before):
        drawn()
    file = io.BytesIO()
    torch.save(random_states(CPU), file)
    expected = [drawn() for _ in range(3)]
    seed_all(4)
    assert drawn() != expected[0]
    file.seek(0)
    states = torch.load(file, weights_only=True)
    set_random_states(states, CPU)
    assert [drawn() for _ in range(3)] == expected
    # A state can be taken up more than once.
    set_random_states(states, CPU)
    assert drawn() == expected[0]


def test_a_state_is_not_changed_by_what_is_drawn_later() -> None:
    states = random_states(CPU)
    copies = [value.clone() for value in tensors_in(states)]
    drawn()
    assert copies
    assert all(torch.equal(copy, value) for copy, value in zip(copies, tensors_in(states), strict=True))


def test_states_of_a_gpu_are_left_out_on_the_host() -> None:
    states = random_states(CPU)
    assert states["cuda"] is None
    set_random_states({**states, "cuda": torch.zeros(16, dtype=torch.uint8)}, CPU)


@pytest.mark.gpu
def test_a_gpu_goes_on_too() -> None:
    device = torch.device("cuda", 0)
    states = random_states(device)
    first = torch.rand(3, device=device)
    torch.rand(7, device=device)
    set_random_states(states, device)
    assert torch.equal(torch.rand(3, device=device), first)


def test_what_is_undisturbed_goes_on_as_if_nothing_had_happened() -> None:
    seed_all(5)
    expected = drawn()
    seed_all(5)
    with undisturbed(CPU):
        seed_all(6)
        drawn()
    assert drawn() == expected
    seed_all(5)
    with pytest.raises(KeyError), undisturbed(CPU):
        raise KeyError(drawn())
    assert drawn() == expected
