"""An option: declared once, checked and converted in the same way wherever its value comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import gnnautoscale as gas
from gnnautoscale._util import Option, OptionGroup, option, options_of


@pytest.mark.parametrize(
    ("kind", "given", "taken"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (str, Path("a") / "b", "a/b"),
        (bool, False, False),
        (int | None, None, None),
        (Literal["a", "b"], "b", "b"),
        (Literal["a"] | int, "12", 12),
        (Literal["a"] | int, 12, 12),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[str, ...], ("a",), ("a",)),
    ],
)
def test_values_get_the_type_of_their_option(kind: Any, given: Any, taken: Any) -> None:
    value = Option("some", kind).check(given)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("kind", "bounds", "given", "rule"),
    [
        (int, {"least": 1}, 0, "an integer of at least 1"),
        (int, {}, 1.0, "an integer"),
        (int, {}, True, "an integer"),
        (int, {}, "1", "an integer"),
        (int, {}, None, "an integer"),
        (float, {"above": 0}, 0.0, "a number above 0"),
        (float, {"least": 0, "below": 1}, 1, "a number of at least 0 and below 1"),
        (float, {}, float("nan"), "a number"),
        (int, {}, 2**70, "an integer in 64 bits"),
        (bool, {}, 1, "true or false"),
        (str, {}, 1, "text"),
        (Literal["a", "b"], {}, "c", "one of a, b"),
        (Literal["a"] | int, {"least": 1}, "0", "one of a, or an integer of at least 1"),
        (tuple[int, ...], {}, "1", "a list of integers"),
        (tuple[int, ...], {}, [True], "a list of integers"),
        (tuple[str, ...], {}, "a", "a list of words"),
        (tuple[Literal["a", "b"], ...], {}, ["c"], "some of a, b"),
    ],
)
def test_other_values_are_refused(kind: Any, bounds: dict[str, Any], given: Any, rule: str) -> None:
    with pytest.raises(gas.InputError) as caught:
        Option("some", kind, **bounds).check(given, fix="Change it.")
    assert str(caught.value) == f"some must be {rule}, but got {given!r}. Change it."


def test_a_group_declares_options() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Some(OptionGroup):
        width: float = option(2, "Its width.", above=0)

    # Types of local classes are resolved by name, so that only plain ones work here.
    assert options_of(Some)["width"] == Option("width", float, 2, "Its width.", "Some", above=0)
    assert type(Some().width) is float
    with pytest.raises(gas.InputError, match=r"^width must be a number above 0, but got 0\. Change this option\.$"):
        Some(width=0)


@dataclass
class Base:
    size: int
    hidden: int = option(64, "Its width.", least=1)


@dataclass
class Wider(Base):
    hidden: int = 128
    other: bool = False


def test_a_subclass_inherits_what_it_does_not_change() -> None:
    assert options_of(Wider) == {"hidden": Option("hidden", int, 128, "Its width.", "Wider", least=1)}
