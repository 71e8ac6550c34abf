"""Fingerprints depend on every byte, and on nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gnnautoscale.graph import hashing
from gnnautoscale.graph.hashing import fingerprint


def test_fingerprints_differ() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([3])
    names = [
        fingerprint(),
        fingerprint(None),
        fingerprint(None, None),
        fingerprint(one, two),
        fingerprint(two, one),
        fingerprint(torch.tensor([1]), torch.tensor([2, 3])),
        fingerprint(torch.tensor([1, 2, 3])),
        fingerprint(torch.tensor([[1, 2, 3]])),
        fingerprint(torch.tensor([1, 2, 3], dtype=torch.int32)),
        fingerprint(torch.tensor([0.0])),
        fingerprint(torch.tensor([0], dtype=torch.int32)),
        fingerprint(torch.tensor(0.0)),
        fingerprint(torch.zeros(1, dtype=torch.bfloat16)),
        fingerprint(torch.ones(1, dtype=torch.bfloat16)),
        fingerprint(torch.empty(0, 2)),
        fingerprint(torch.empty(2, 0)),
        fingerprint(one, None),
        fingerprint(one, seed=1),
        fingerprint(one, seed="1"),
        fingerprint(one, seed=1.5),
        fingerprint(one, parts=1),
    ]
    assert len(set(names)) == len(names)


def test_fingerprint_is_about_content() -> None:
    matrix = torch.arange(6).view(2, 3)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous())
    assert fingerprint(matrix[:, 1]) == fingerprint(torch.tensor([1, 4]))
    assert fingerprint(matrix.float().requires_grad_()) == fingerprint(matrix.float())
    assert fingerprint(matrix, a=1, b=2) == fingerprint(matrix, b=2, a=1)


def test_every_chunk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 16)
    values = torch.arange(100, dtype=torch.uint8)
    names = {fingerprint(values)}
    for place in range(100):
        changed = values.clone()
        changed[place] += 1
        names.add(fingerprint(changed))
    names.add(fingerprint(values.roll(16)))  # the same chunks in another order
    assert len(names) == 102


@pytest.mark.parametrize("num_bytes", [0, 15, 16, 17, 1000])
def test_number_of_threads_does_not_matter(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 16)
    values, names = torch.arange(num_bytes).to(torch.uint8), set()
    for cores in (1, 2, 5):
        monkeypatch.setattr(hashing, "available_cores", lambda cores=cores: cores)
        names.add(fingerprint(values, values[::2]))
    assert len(names) == 1


def test_files_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(50, 4))
    values[:] = np.arange(200).reshape(50, 4)
    addresses = []
    original = hashing._digest

    def spy(chunk: memoryview) -> bytes:
        addresses.append(np.frombuffer(chunk, dtype=np.uint8).ctypes.data)
        return original(chunk)

    monkeypatch.setattr(hashing, "_digest", spy)
    assert fingerprint(torch.from_numpy(values)) == fingerprint(torch.arange(200.0).view(50, 4))
    assert addresses[0] == values.ctypes.data
