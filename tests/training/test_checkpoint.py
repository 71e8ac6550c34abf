from __future__ import annotations

import contextlib
import math
import os
import resource
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from gnnautoscale.errors import InputError
from gnnautoscale.history import DiskHistory
from gnnautoscale.training.checkpoint import latest_checkpoint, load_checkpoint, load_latest, save_checkpoint

FORMAT = "gnnautoscale checkpoint 1"
DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 int64 int32 int16 int8 uint8 bool"


def back(folder: Path, state: Any, step: int = 1) -> dict[str, Any]:
    """The state from a file."""
    return load_checkpoint(save_checkpoint(folder, step, state)).state


def save(folder: Path, step: int) -> Path:
    """A small checkpoint."""
    return save_checkpoint(folder, step, {"epoch": step, "weight": torch.arange(4.0)}, keep=9)


def refusal(path: Path) -> str:
    """Why the file is refused."""
    with pytest.raises(InputError, match="must be a whole file that save_checkpoint wrote, but got") as caught:
        load_checkpoint(path)
    return str(caught.value)


@contextlib.contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@pytest.mark.parametrize("name", DTYPES.split())
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    dtype, high = getattr(torch, name), 2 if name == "bool" else 256
    raw = torch.randint(high, (12 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values = raw.view(dtype).view(3, 4)
    state = {"matrix": values, "turned": values.t(), "none": values[:0].clone(), "one": values[1, 2]}
    expected = {name: bytes(tensor.clone().untyped_storage()) for name, tensor in state.items()}
    for name, tensor in back(tmp_path, state).items():
        assert (tensor.dtype, tensor.shape) == (dtype, state.pop(name).shape)
        assert bytes(tensor.clone().untyped_storage()) == expected[name]
    assert not state


def test_nested_values_come_back_exactly(tmp_path: Path) -> None:
    state = {
        "numbers": [0, 10**40, -1, True, None, 0.1, -0.0, math.nan, math.inf, -math.inf],
        "nested": (1, [2, (3,)], (), [], {}, 'ä "quoted" \ud800 \0'),
        "keys": {1: "a", "1": "b", -2: {"c": (None,)}, "z": 1, "a": 2},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "counter": Counter({30: 1, 60: 2}),
        3: 4,
    }
    loaded = back(tmp_path / "new" / "folder", state)
    assert repr(loaded) == repr(state)  # which also compares types, the order and the sign of zero


def test_views_and_shared_tensors_come_back_without_what_they_are_views_of(tmp_path: Path) -> None:
    base = torch.arange(2.0**16).view(2**8, 2**8)
    whole = torch.arange(24.0).view(2, 3, 4)
    state = {
        "views": [base[3], base[:, 5], base[2:4, ::2], base[:0], base[7, 7]],
        "whole": [whole, whole, whole.permute(2, 0, 1), torch.tensor([[1.0], [2.0]]).expand(2, 5)],
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    loaded = back(tmp_path, state)
    torch.testing.assert_close(loaded, {**state, "parameter": torch.ones(2)}, rtol=0, atol=0)
    assert not loaded["parameter"].requires_grad
    assert next(tmp_path.iterdir()).stat().st_size < 10_000


def test_histories_on_disk_are_neither_saved_nor_loaded_through_memory(tmp_path: Path) -> None:
    history = DiskHistory(2**11, 2**14, torch.bfloat16, path=tmp_path / "rows")
    history.raw[-1, -1] = 7
    used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) * 1024
    with limited(resource.RLIMIT_DATA, used + history.num_bytes // 2):
        with pytest.raises(RuntimeError, match="allocate memory"):
            history.raw.clone()
        path = save_checkpoint(tmp_path, 1, {"rows": history.raw})
    rows = load_checkpoint(path).state["rows"]
    assert str(path) in Path("/proc/self/maps").read_text()
    assert (rows.dtype, rows.sum(), rows[-1, -1]) == (torch.bfloat16, 7, 7)


def test_settings_of_the_program_do_not_matter_and_writing_does_not_change_the_file(tmp_path: Path) -> None:
    with config.patch({"save.compute_crc32": False, "load.mmap_flags": 1}):  # type: ignore[attr-defined]
        path = save(tmp_path, 1)
        loaded = load_checkpoint(path)
    loaded.state["weight"].fill_(-1)
    assert load_checkpoint(path).state["weight"].tolist() == [0, 1, 2, 3]
    path.unlink()
    assert loaded.state["weight"].tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2}]}, r"set at the state\['a'\]\[1\]"),
        ({True: 3}, "dict at the state"),
        ({1: np.float64(1)}, r"float64 at the state\[1\]"),
        ({"a": defaultdict(list)}, "defaultdict at"),
        ({"a": torch.eye(2).to_sparse()}, "Tensor at"),
        ({"a": torch.empty(2, device="meta")}, "Tensor at"),
    ],
)
def test_other_values_are_refused_by_their_place(tmp_path: Path, value: Any, place: str) -> None:
    with pytest.raises(InputError, match=rf"a checkpoint holds dicts .*, but got {place}"):
        save_checkpoint(tmp_path, 1, value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (10**9, 2), (1.0, 2), (1, 0)])
def test_bad_numbers_are_refused(tmp_path: Path, step: Any, keep: int) -> None:
    with pytest.raises(InputError, match=f"got step {step} and keep {keep}"):
        save_checkpoint(tmp_path, step, {}, keep=keep)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("notes.txt", "checkpoint-1.pt", "other.pt.abc.part")]
    for path in [*others, tmp_path / "checkpoint-000000001.pt.0a1b.part"]:
        path.touch()
    for step in (1, 2, 10, 11):
        path = save_checkpoint(tmp_path, step, {})
        assert latest_checkpoint(tmp_path) == path == tmp_path / f"checkpoint-{step:09d}.pt"
    assert set(tmp_path.iterdir()) == {*others, tmp_path / "checkpoint-000000010.pt", path}
    fixed = tmp_path / "checkpoint-000000003.pt"  # what cannot be removed does not stop a run
    fixed.mkdir()
    path = save_checkpoint(tmp_path, 12, {}, keep=1)
    assert set(tmp_path.iterdir()) == {*others, fixed, path}


def test_going_back_leaves_later_steps_alone(tmp_path: Path) -> None:
    for step in (3, 4, 8, 9):
        save(tmp_path, step)
    save_checkpoint(tmp_path, 5, {})
    assert [int(path.stem[11:]) for path in sorted(tmp_path.iterdir())] == [4, 5, 8, 9]
    assert back(tmp_path, {"new": True}, step=9) == {"new": True}
    assert [int(path.stem[11:]) for path in sorted(tmp_path.iterdir())] == [8, 9]


def test_no_checkpoint_is_none_and_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint-000000001.pt.0a1b.part"
    file.touch()
    for folder in (tmp_path, tmp_path / "missing"):
        assert (latest_checkpoint(folder), load_latest(folder)) == (None, None)
    with pytest.raises(InputError, match=r"must be in a folder, but got .*part"):
        load_latest(file)
    with pytest.raises(InputError, match=r"must be writable, but got .*part"):
        save_checkpoint(file, 1, {})
    assert f"{tmp_path / 'gone'} (it does not exist)" in refusal(tmp_path / "gone")
    assert "(it cannot be read: is a directory" in refusal(tmp_path)


def test_a_file_cut_anywhere_is_refused_and_a_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    raw, inside, before = path.read_bytes(), set(), repr(load_checkpoint(path))
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            start = record.header_offset + 30 + sum(struct.unpack_from("<HH", raw, record.header_offset + 26))
            inside |= set(range(start, start + record.file_size))
    for position in range(len(raw)):
        path.write_bytes(raw[:position])
        assert "(it is cut off, damaged, or no checkpoint: " in refusal(path)
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        if position in inside:
            assert "is damaged" in refusal(path)
        with contextlib.suppress(InputError):
            assert repr(load_checkpoint(path)) == before


def test_nothing_in_a_file_can_run(tmp_path: Path) -> None:
    path, sprung = tmp_path / "file", tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(sprung),)

    torch.save({"format": FORMAT, "step": 1, "state": {"trap": Trap()}}, path)
    assert "(it holds more than values and tensors)" in refusal(path)
    assert not sprung.exists()
    torch.load(path, weights_only=False)
    assert sprung.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"junk", "it is cut off, damaged, or no checkpoint: "),
        ({"format": "gnnautoscale checkpoint 2", "step": 1, "state": {}}, "but it is 'gnnautoscale checkpoint 2'"),
        ({"format": FORMAT, "step": "1", "state": {}}, f'its format must be "{FORMAT}"'),
        (torch.ones(1), "but it is None"),
    ],
)
def test_a_bad_newest_file_is_refused_and_the_newest_good_one_named(tmp_path: Path, content: Any, reason: str) -> None:
    good, bad, newest = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    bad.write_bytes(b"")
    newest.write_bytes(content) if isinstance(content, bytes) else torch.save(content, newest)
    assert reason in refusal(newest)
    with pytest.raises(InputError) as caught:
        load_latest(tmp_path)
    assert str(caught.value).startswith(f"the newest checkpoint must be whole, but got {newest} (")
    assert str(caught.value).endswith(f"The newest good one is {good}: resume from that file by its path.")
    good.unlink()
    with pytest.raises(InputError, match=r"No older one is good either: start again\.$"):
        load_latest(tmp_path)


@pytest.mark.parametrize("room", [0, 1000, 30_000, 40_500])
def test_a_full_disk_leaves_the_checkpoints_before_alone(tmp_path: Path, room: int) -> None:
    before = {path: path.read_bytes() for path in (save(tmp_path, 1), save(tmp_path, 2))}
    with limited(resource.RLIMIT_FSIZE, room):
        for step in (2, 3):
            with pytest.raises(InputError, match=r"must be writable, but got .*File too large.*Check the path and"):
                save_checkpoint(tmp_path, step, {"weight": torch.arange(10_000.0)}, keep=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_saved_without_more_of_its_memory(tmp_path: Path) -> None:
    values = torch.arange(2**20, device="cuda").view(2**10, 2**10)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = back(tmp_path, {"values": values, "turned": values.t()})
    assert torch.cuda.max_memory_allocated() == before
    torch.testing.assert_close(loaded, {"values": values.cpu(), "turned": values.t().cpu()}, rtol=0, atol=0)


def test_a_state_that_was_changed_is_refused(tmp_path: Path) -> None:
    file = save_checkpoint(tmp_path, 3, {"epoch": 1, "rates": [0.5, math.nan], "weight": torch.ones(2)})
    assert load_checkpoint(file).state["epoch"] == 1
    content = torch.load(file, weights_only=True)
    others = [{**content["state"], **other} for other in ({"epoch": 2}, {"rates": [0.5]}, {"weight": torch.ones(3)})]
    unsealed = {name: value for name, value in content.items() if name != "seal"}
    for changed in [*({**content, "state": other} for other in others), unsealed]:
        torch.save(changed, file)
        with pytest.raises(InputError, match="its values were changed after it was written"):
            load_checkpoint(file)


def test_shards_go_with_their_checkpoint_and_those_without_one_at_the_next(tmp_path: Path) -> None:
    def save_with_shard(step: int) -> Path:
        shard = tmp_path / f"checkpoint-{step:09d}.rank-0-of-1.pt"
        save_checkpoint(tmp_path, step, {}, path=shard)
        return shard

    orphan, first, second = save_with_shard(1), save_with_shard(2), save_with_shard(3)
    save_checkpoint(tmp_path, 2, {})
    assert not orphan.exists()
    assert first.exists()
    assert second.exists()  # of a later step, whose checkpoint may be on its way
    save_checkpoint(tmp_path, 3, {}, keep=1)
    assert not first.exists()
    assert second.exists()
