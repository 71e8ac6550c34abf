"""Other code of the user's is noticed, and nothing but that."""

from __future__ import annotations

from typing import Any

import pytest

from gnnautoscale._util.code import code_of

SOURCE = """
SCALE = 2.0

class Config:
    power = 1

def double(x):
    return x * SCALE

class Net:
    gain = 1

    def __init__(self):
        self.hidden = 16

    def forward(self, x, offset=0.0):
        return self.helper(x) + offset

    def helper(self, x):
        return double(x) ** Config.power if x not in {"a", "b"} else x
"""


def described(source: str) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, (int, float, list)):
            return value
        raise TypeError

    names: dict[str, Any] = {"__name__": "nets"}
    exec(compile(source, "nets.py", "exec"), names)  # noqa: S102
    return code_of(names["Net"], plain)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("SCALE = 2.0", "SCALE = 3.0", "SCALE of double"),
        ("power = 1", "power = 2", "power of Config"),
        ("x * SCALE", "x + SCALE", "double()"),
        ("gain = 1", "gain = 2", "gain of Net"),
        ("offset=0.0", "offset=1.0", "defaults of Net.forward"),
        ("+ offset", "- offset", "Net.forward()"),
        ('{"a", "b"}', '{"a", "c"}', "Net.helper()"),
        ("self.hidden = 16", "self.hidden = 8", None),
        ("return self.helper(x) + offset", '"""Words."""\n        return self.helper(x) + offset  # a comment', None),
    ],
)
def test_a_change_of_code_is_named(before: str, after: str, name: str | None) -> None:
    assert before in SOURCE
    first, second = described(SOURCE), described(SOURCE.replace(before, after))
    assert [key for key in first if first[key] != second[key]] == ([] if name is None else [name])
    assert first.keys() == second.keys()


def test_the_code_of_libraries_is_left_out() -> None:
    assert code_of(dict, repr) == {}
