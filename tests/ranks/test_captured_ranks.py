"""Captured steps of ranks compute what others do: on a tape, and on a GPU that ranks share.

There, what ranks send is copied to the host, or stays on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support import gpu_ranks
from support.ranks import run_ranks, run_ranks_on_gpu
from support.tape import Tape, capture_on_tape


def _deviations_on_tape() -> dict[str, float]:
    """How far each run on a tape is from the same run without."""
    host = {"storage": "host", "epochs": 3}
    cases = {
        "host, several batches a step": ("gat", {**host, "accumulate": 3, "grad_norm": 0.5, "batches_on": "host"}),
        "disk, a step late": ("gcn", {**host, "storage": "disk", "lag": 1}),
        "compensated": ("gcn", {**host, "compensate": "gradient"}),
        "types": ("hetero-sage", {**host, "storage": "device"}),
    }
    found = {}
    for title, (name, options) in cases.items():
        expected = gpu_ranks.fit_on("cpu", name, options).numbers
        with pytest.MonkeyPatch.context() as patch:
            capture_on_tape(patch, resident="batches_on" not in options)
            taped = gpu_ranks.fit_on("cpu", name, options).numbers
        assert Tape.played >= 4, title
        found[title] = max(float((one - other).abs().max()) for one, other in zip(taped, expected, strict=True))
        Tape.played = 0
    return found


def test_captured_steps_of_ranks_are_those_of_others() -> None:
    for found in run_ranks(2, _deviations_on_tape):
        assert len(found) == 4
        assert max(found.values()) < 1e-12, found


@pytest.mark.gpu
@pytest.mark.parametrize("work", [gpu_ranks.loops, gpu_ranks.captured_fits, gpu_ranks.other_fits])
def test_ranks_on_a_gpu_compute_what_ranks_on_the_cpu_do(work: Callable[[], dict[str, str]]) -> None:
    for wrong in run_ranks_on_gpu(2, work):
        assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


@pytest.mark.gpu
def test_ranks_over_nccl_compute_what_ranks_on_the_cpu_do() -> None:
    for wrong in run_ranks_on_gpu(2, gpu_ranks.over_nccl, backend="nccl"):
        assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())
