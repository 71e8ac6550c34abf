"""Tensors, and everything else, in nested values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnautoscale._util import map_others, map_tensors, others_in, tensors_in

A, B, D = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


class Pair(NamedTuple):
    left: Any
    right: Any


class Row(list[Any]):
    """A list of one's own."""


NESTED = ((A, [1, None], "text"), {"x": Pair(B, 2.5), "y": Row([D])})


def test_tensors_come_in_order() -> None:
    assert [float(value) for value in tensors_in(NESTED)] == [1.0, 2.0, 3.0]
    assert tensors_in("text") == tensors_in(3) == []
    assert tensors_in(A) == [A]


def test_all_that_is_no_tensor_comes_in_order() -> None:
    assert others_in(NESTED) == [1, None, "text", 2.5]
    assert others_in(A) == []


def test_containers_keep_their_kind() -> None:
    def doubled(value: Tensor) -> Tensor:
        return 2 * value

    found: Any = map_tensors(doubled, NESTED)
    assert [float(value) for value in tensors_in(found)] == [2.0, 4.0, 6.0]
    assert others_in(found) == others_in(NESTED)
    assert type(found[1]["x"]) is Pair
    assert type(found[1]["y"]) is Row
    assert found[1]["x"].right == 2.5


def test_everything_else_is_replaced_in_order() -> None:
    numbers = iter(range(10))
    found: Any = map_others(lambda value: next(numbers), NESTED)
    assert others_in(found) == [0, 1, 2, 3]
    assert tensors_in(found) == tensors_in(NESTED)
    assert type(found[1]["x"]) is Pair
