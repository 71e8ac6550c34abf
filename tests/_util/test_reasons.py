"""Sentences about what failed and what may have been meant."""

from __future__ import annotations

import pytest

from gnnautoscale._util import did_you_mean, reason_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.npz"), "no such file or directory"),
        (ValueError("first\nsecond"), "first"),
        (OSError("no number"), "no number"),
        (KeyError(), "KeyError"),
    ],
)
def test_reasons_are_one_line(error: Exception, words: str) -> None:
    assert reason_of(error) == words


def test_the_closest_name_is_proposed_in_its_own_letters() -> None:
    assert did_you_mean("roc-auk", ["ROC-AUC", "MAE"], "Choose.") == "Did you mean 'ROC-AUC'?"
    assert did_you_mean("roc-auk", ["MAE"], "Choose.") == "Choose."
