"""Ranks that share a GPU train as ranks on the CPU do: what they send is copied to the host, or stays there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support import gpu_ranks
from support.ranks import run_ranks_on_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("work", [gpu_ranks.loops, gpu_ranks.captured_fits, gpu_ranks.other_fits])
def test_ranks_on_a_gpu_compute_what_ranks_on_the_cpu_do(work: Callable[[], dict[str, str]]) -> None:
    assert run_ranks_on_gpu(2, work) == [{}, {}]
