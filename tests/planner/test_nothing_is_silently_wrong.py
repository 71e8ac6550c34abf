"""Models that have deceived the library, or might: each is exact, or refused with the reason.

``python tests/planner/test_nothing_is_silently_wrong.py [word ...]`` prints what becomes of each, or of those with one
of the words in their name.
"""

from __future__ import annotations

import sys
import time

import pytest
import torch

from support.traps import TRAPS


@pytest.mark.parametrize("name", TRAPS)
def test_exact_or_refused(name: str) -> None:
    trap = TRAPS[name]
    found = trap.run()
    assert not trap.complaint(found), trap.complaint(found)


def main(words: list[str]) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    bad = 0
    names = [name for name in TRAPS if not words or any(word in name for word in words)]
    for name in names:
        torch.manual_seed(12)
        start = time.perf_counter()
        found = TRAPS[name].run()
        complaint, seconds = TRAPS[name].complaint(found), time.perf_counter() - start
        bad += bool(complaint)
        print(
            f"{'BAD' if complaint else 'ok ':3} {name:58} {seconds:5.2f} s {found.kind:14} {complaint or found.detail}",
            flush=True,
        )
    print(f"{len(names)} cases, {bad} bad")


if __name__ == "__main__":
    main(sys.argv[1:])
