"""Whatever bit of an archive flips, its content is the same or it is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnautoscale._util.archives import damage_in, open_npz


def arrays_in(file: Path) -> dict[str, Any]:
    with open_npz(file) as archive:
        return {name: archive[name].tolist() for name in archive.files}


def tensors_in(file: Path) -> dict[str, Any]:
    if damage_in(file) is not None:
        raise ValueError
    return {name: value.tolist() for name, value in torch.load(file, weights_only=True).items()}


@pytest.mark.parametrize("read", [arrays_in, tensors_in])
def test_a_flipped_bit_in_the_list_of_an_archive_is_noticed(tmp_path: Path, read: Any) -> None:
    file, values = tmp_path / "file.npz", {"x": [1.0, 2.0, 3.0, 4.0], "split": [0.0, 1.0]}
    if read is arrays_in:
        np.savez(file, x=values["x"], split=values["split"])
    else:
        torch.save({name: torch.tensor(value) for name, value in values.items()}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        first = archive.start_dir
    assert read(file) == values
    noticed = 0
    for place in range(first, len(whole)):
        for bit in (0, 4):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                assert read(file) == values, (place, bit)
            except AssertionError:
                raise
            except Exception:  # whoever reads the file names it
                noticed += 1
    assert noticed > 100
