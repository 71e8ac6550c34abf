from __future__ import annotations

import ast
import builtins
import errno
import hashlib
import json
import math
import os
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnnautoscale.errors import InputError
from gnnautoscale.training import checkpoint
from gnnautoscale.training.checkpoint import (
    join_tensors,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    save_checkpoint,
    split_tensors,
)

Training = tuple[nn.Module, torch.optim.Adam, torch.optim.lr_scheduler.MultiStepLR]
DTYPES = sorted(checkpoint._CODES, key=str)


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bytes as a type; all zeros and ones for truth values, which have no others."""
    generator = torch.Generator().manual_seed(0)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes, even where those are not numbers."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(integer), other.view(integer))


def save(folder: Path, step: int) -> Path:
    """A small checkpoint."""
    return save_checkpoint(folder, step, {"epoch": step}, {"weight": torch.arange(4.0)}, keep=9)


def parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:end]), raw[end:]


def forged(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A file with the right checksum, whatever its header says."""
    metadata = {"checksum": "0" * 64, **header.pop("__metadata__")}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text + data
    return raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": of_dtype(dtype, 5, 3), "transposed": of_dtype(dtype, 3, 4).t(), "none": of_dtype(dtype, 0, 3)}
    if dtype != checkpoint._PAIRS:
        tensors["scalar"] = of_dtype(dtype, 1).view(())
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {}, tensors)).tensors
    assert set(loaded) == set(tensors)
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())


def test_every_type_of_safetensors_is_known() -> None:
    assert {(dtype, code) for code, dtype in safetensors.torch._TYPES.items()} <= set(checkpoint._CODES.items())


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "name": 'ä "quoted" \ud800 \0',
        "deep": [{"loss": 0.1, "none": None, "yes": True}, -0.0],
        "": {},
    }
    tensors = {
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "half": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        'ü "name"\n': torch.tensor(7),
        "wide": torch.arange(3, dtype=torch.float64),
    }
    path = save_checkpoint(tmp_path / "new" / "folder", 123, state, tensors)
    assert path == tmp_path / "new" / "folder" / "checkpoint-000000123.safetensors"
    loaded = load_checkpoint(path)
    assert (loaded.path, loaded.step, loaded.state) == (path, 123, state)
    assert set(loaded.tensors) == set(tensors)
    assert all(same_bytes(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    assert list(path.parent.iterdir()) == [path]


def test_a_checkpoint_may_be_empty_and_may_be_renamed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 0, {}, {}).rename(tmp_path / "best")
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state, loaded.tensors) == (0, {}, {})


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.arange(6.0).view(2, 3), "c": torch.zeros(0, 2)}
    path = save_checkpoint(tmp_path, 5, {"epoch": 1}, tensors)
    loaded = load_file(path)
    assert set(loaded) == {"a", "b", "c"}
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    raw = path.read_bytes()
    header, data = parts(raw)
    metadata = header.pop("__metadata__")
    digest = hashlib.sha256(raw.replace(metadata["checksum"].encode(), b"0" * 64)).hexdigest()
    assert metadata == {
        "checksum": digest,
        "format": "gnnautoscale checkpoint 1",
        "step": "5",
        "state": '{"epoch": 1}',
    }
    # The widest values first, so that each tensor begins at a multiple of their width.
    assert header == {
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [24, 24]},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [24, 27]},
    }
    assert data == torch.arange(6.0).numpy().tobytes() + b"\1\1\1"
    assert (len(raw) - len(data)) % 8 == 0


def test_odd_tensors_are_written_as_their_values(tmp_path: Path) -> None:
    numbers = torch.arange(24.0).view(2, 3, 4)
    tensors = {
        "permuted": numbers.permute(2, 0, 1),
        "strided": numbers[:, ::2, 1:3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "one": numbers[:1, :1, 2].t(),  # its strides do not matter, so they may be anything
        "column": torch.arange(12.0).view(2, 6)[:1, 3:4],
        "parameter": nn.Parameter(torch.ones(2)),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {}, tensors)).tensors
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert not loaded["parameter"].requires_grad


@pytest.mark.parametrize("chunk", [1, 8, 12, 24, 40, 10**6])
def test_pieces_of_any_size_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    tensors = {"a": torch.arange(30.0).view(5, 2, 3).transpose(0, 2), "b": torch.arange(7), "c": torch.tensor(1.0)}
    expected = save_checkpoint(tmp_path / "whole", 1, {}, tensors).read_bytes()
    monkeypatch.setattr(checkpoint, "_CHUNK", chunk)
    path = save_checkpoint(tmp_path / "pieces", 1, {}, tensors)
    assert path.read_bytes() == expected
    assert torch.equal(load_checkpoint(path).tensors["a"], tensors["a"])


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest memory that any operation returns, but for what was there before."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() != self.known:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


def test_a_tensor_larger_than_the_memory_is_never_held_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 2**14
    monkeypatch.setattr(checkpoint, "_CHUNK", chunk)
    written: list[int] = []
    as_bytes = checkpoint._bytes

    def note(part: Tensor) -> memoryview:
        content = as_bytes(part)
        written.append(content.nbytes)
        return content

    monkeypatch.setattr(checkpoint, "_bytes", note)
    mapped = torch.from_file(str(tmp_path / "values"), shared=True, size=2**18, dtype=torch.float32).view(2**10, 2**8)
    mapped.copy_(torch.arange(2**18).view_as(mapped))
    for name, tensor, copied in [("plain", mapped, 0), ("transposed", mapped.t(), chunk)]:
        written.clear()
        with Largest(mapped) as largest:
            path = save_checkpoint(tmp_path / name, 1, {}, {"values": tensor})
        assert largest.bytes == copied
        assert written == [chunk] * (2**20 // chunk)
        assert torch.equal(load_checkpoint(path).tensors["values"], tensor)


def test_loaded_tensors_are_read_when_used_and_do_not_change_the_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {"values": torch.zeros(2**20)})
    before = path.read_bytes()
    values = load_checkpoint(path).tensors["values"]
    # They lie in the mapped file, with its header before them.
    assert str(path) in Path("/proc/self/maps").read_text()
    values.add_(1)
    assert path.read_bytes() == before
    path.unlink()
    assert values.sum() == 2**20


def tiny_training(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9), amsgrad=True)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def states(training: Training) -> dict[str, Any]:
    model, optimizer, scheduler = training
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def train(training: Training, steps: range) -> None:
    model, optimizer, scheduler = training
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        scheduler.step()


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = tiny_training(0)
    train(whole, range(3))
    state, tensors = split_tensors("", states(whole))
    save_checkpoint(tmp_path, 3, state, tensors)
    assert tensors["optimizer.state.0.exp_avg"].shape == (4, 3)
    assert tensors["optimizer.state.0.step"].dim() == 0
    train(whole, range(3, 6))

    resumed = tiny_training(1)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    nested = join_tensors(loaded.state, loaded.tensors)
    assert type(nested["scheduler"]["milestones"]) is Counter
    for name, part in zip(("model", "optimizer", "scheduler"), resumed, strict=True):
        part.load_state_dict(nested[name])  # type: ignore[attr-defined]
    train(resumed, range(loaded.step, 6))
    expected, found = split_tensors("", states(whole)), split_tensors("", states(resumed))
    assert found[0] == expected[0]
    assert set(found[1]) == set(expected[1])
    assert all(same_bytes(found[1][name], tensor) for name, tensor in expected[1].items())


@pytest.mark.parametrize(
    "nested",
    [
        None,
        True,
        1,
        10**40,
        "text",
        "$tensor",
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        [],
        (),
        {},
        [1, 1.0, True, None, "1"],
        (1, [2, (3,)], ()),
        {1: "a", "1": "b", -2: {"c": (None,)}},
        {"$tensor": "x"},
        {"a": {"$float": "nan", "b": 1}},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({30: 1, 60: 2}),
        {"z": 1, "a": 2},
    ],
    ids=repr,
)
def test_values_come_back_exactly(nested: object) -> None:
    plain, tensors = split_tensors("x", nested)
    back = join_tensors(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert tensors == {}
    assert type(back) is type(nested)
    assert repr(back) == repr(nested)  # which also compares types, the order and the sign of zero


def test_not_a_number_and_tensors_come_back() -> None:
    scalar, vector = torch.tensor(2.0), torch.arange(3)
    nested = {"a.b": scalar, "a": {"b": vector, "nan": math.nan}, 0: [vector], "0": (scalar, vector)}
    plain, tensors = split_tensors("p", nested)
    assert {name: id(tensor) for name, tensor in tensors.items()} == {
        "p.a.b": id(scalar),
        "p.a.b'": id(vector),
        "p.0.0": id(vector),
        "p.0.0'": id(scalar),
        "p.0.1": id(vector),
    }
    back = join_tensors(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert math.isnan(back["a"].pop("nan"))
    assert back == {"a.b": scalar, "a": {"b": vector}, 0: [vector], "0": (scalar, vector)}  # the same tensors


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"type set at run\.a\.1"),
        ({"a": {(1, 2): 3}}, r"the key \(1, 2\) at run\.a"),
        ({True: 3}, "the key True at run"),
        ({"a": np.float64(1)}, r"type float64 at run\.a"),
        ({"a": defaultdict(list)}, r"type defaultdict at run\.a"),
        ({"a": torch.Size([1])}, r"type Size at run\.a"),
        ({"a": b"x"}, r"type bytes at run\.a"),
        ({"a": torch.float32}, r"type dtype at run\.a"),
    ],
)
def test_other_values_are_refused_by_their_place(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_tensors("run", value)


@pytest.mark.parametrize(
    "plain",
    [
        {"$tensor": "missing"},
        {"$tensor": ["a"]},
        {"$float": "1"},
        {"$tuple": 1},
        {"$dict": [1]},
        {"$dict": [[1]]},
        {"$set": []},
    ],
    ids=str,
)
def test_a_state_without_its_tensors_is_refused(plain: object) -> None:
    with pytest.raises(InputError, match="must be joined with the tensors"):
        join_tensors([plain], {"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": (1,)}, "a tuple"),
        ({"a": {1: 2}}, "a key that is no text"),
        ({"a": math.nan}, "JSON compliant"),
        ({"a": torch.ones(1)}, "Tensor is not JSON serializable"),
        ([1], "but got list"),
    ],
)
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        save_checkpoint(tmp_path, 1, state, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("__metadata__", torch.ones(1), '"__metadata__" as name'),
        ("\ud800", torch.ones(1), "as name, but got '.ud800'"),
        ("", torch.ones(1), "as name, but got ''"),
        (3, torch.ones(1), "as name, but got 3"),
        ("a", [1.0], "'a' must be a dense tensor that holds values, but got list"),
        ("a", torch.eye(2).to_sparse(), "torch.sparse_coo on cpu"),
        ("a", torch.empty(2, device="meta"), "torch.strided on meta"),
        ("a", torch.ones(1, dtype=torch.complex128), "torch.complex128 with 1 dim"),
    ],
)
def test_tensors_that_the_format_cannot_hold_are_refused(tmp_path: Path, name: Any, tensor: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        save_checkpoint(tmp_path, 1, {}, {name: tensor})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "from 0 to 999999999, but got -1"),
        ({"step": 10**9}, "from 0 to 999999999"),
        ({"step": 1.0}, "from 0 to 999999999, but got 1.0"),
        ({"keep": 0}, "keep must be at least 1, but got 0"),
    ],
)
def test_bad_numbers_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        save_checkpoint(**{"folder": tmp_path, "step": 1, "state": {}, "tensors": {}, **options})


def test_a_header_that_safetensors_would_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_LARGEST_HEADER", 500)
    save_checkpoint(tmp_path, 1, {"text": "a" * 200}, {})
    with pytest.raises(InputError, match="must take 500 bytes or less"):
        save_checkpoint(tmp_path, 2, {"text": "a" * 500}, {})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("notes.txt", "checkpoint-1.safetensors", "other.safetensors.abc.part")]
    for other in others:
        other.touch()
    stale = tmp_path / "checkpoint-000000001.safetensors.0a1b.part"
    stale.touch()
    for step in (1, 2, 10, 11):
        path = save_checkpoint(tmp_path, step, {}, {})
        assert latest_checkpoint(tmp_path) == path
    found = {file.name for file in tmp_path.iterdir()} - {other.name for other in others}
    assert found == {"checkpoint-000000010.safetensors", "checkpoint-000000011.safetensors"}
    assert all(other.exists() for other in others)
    save_checkpoint(tmp_path, 12, {}, {}, keep=1)
    assert sorted(tmp_path.glob("checkpoint-0*")) == [tmp_path / "checkpoint-000000012.safetensors"]


def test_going_back_never_removes_what_was_just_written(tmp_path: Path) -> None:
    for step in (3, 4, 8, 9):
        save(tmp_path, step)
    save_checkpoint(tmp_path, 5, {}, {})
    assert [int(path.name[11:20]) for path in sorted(tmp_path.iterdir())] == [4, 5, 8, 9]
    save_checkpoint(tmp_path, 9, {"new": True}, {})
    assert [int(path.name[11:20]) for path in sorted(tmp_path.iterdir())] == [8, 9]
    assert load_checkpoint(tmp_path / "checkpoint-000000009.safetensors").state == {"new": True}


def test_what_cannot_be_removed_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000001.safetensors").mkdir()
    path = save_checkpoint(tmp_path, 2, {}, {}, keep=1)
    assert load_checkpoint(path).step == 2


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000001.safetensors.0a1b.part").touch()
    for folder in (tmp_path, tmp_path / "missing"):
        assert latest_checkpoint(folder) is None
        assert load_latest(folder) is None


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match=r"must be a folder, but got .*file"):
        load_latest(file)
    with pytest.raises(InputError, match=r"must be writable, but got .*file"):
        save_checkpoint(file, 1, {}, {})


def refusal(path: Path) -> str:
    """Why the file is refused."""
    with pytest.raises(InputError, match="must be a whole file that save_checkpoint wrote") as caught:
        load_checkpoint(path)
    return str(caught.value)


def test_what_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path / 'gone'} (it does not exist)" in refusal(tmp_path / "gone")
    assert "(it cannot be read: [Errno 21] Is a directory" in refusal(tmp_path)


def test_a_file_cut_anywhere_is_refused_and_the_good_one_before_it_named(tmp_path: Path) -> None:
    good, newest = save(tmp_path, 1), save(tmp_path, 2)
    raw = newest.read_bytes()
    for length in range(len(raw)):
        newest.write_bytes(raw[:length])
        assert "(it is cut off, or not a safetensors file: " in refusal(newest)
    newest.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(InputError, match="it is cut off") as caught:
        load_latest(tmp_path)
    assert f"The newest good one is {good}: resume from that file by its path." in str(caught.value)
    newest.write_bytes(raw + b"\0")
    assert "not a safetensors file" in refusal(newest)
    newest.write_bytes(raw)
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 2


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    raw = path.read_bytes()
    reasons: Counter[str] = Counter()
    for position in range(len(raw)):
        for bit in (1, 128):
            changed = bytearray(raw)
            changed[position] ^= bit
            path.write_bytes(changed)
            reasons[refusal(path).partition(" (")[2].partition(":")[0].partition(" must")[0]] += 1
    assert set(reasons) == {
        "it is cut off, or not a safetensors file",
        "its checksum is wrong",
        "its format",
        "its state is not JSON",
    }
    changed = bytearray(raw)
    changed[-1] ^= 1
    path.write_bytes(changed)
    assert "(its checksum is wrong: the file was changed or damaged)" in refusal(path)


def edited_state(header: dict[str, Any]) -> None:
    header["__metadata__"]["state"] = '{"epoch": 9}'


def broken_state(header: dict[str, Any]) -> None:
    header["__metadata__"]["state"] = '{"epoch": }'


def no_dict(header: dict[str, Any]) -> None:
    header["__metadata__"]["state"] = "[1]"


def other_format(header: dict[str, Any]) -> None:
    header["__metadata__"]["format"] = "gnnautoscale checkpoint 2"


def no_metadata(header: dict[str, Any]) -> None:
    del header["__metadata__"]


def other_name(header: dict[str, Any]) -> None:
    header["bias"] = header.pop("weight")


def other_dtype(header: dict[str, Any]) -> None:
    header["weight"]["dtype"] = "I32"


def other_shape(header: dict[str, Any]) -> None:
    header["weight"]["shape"] = [2, 2]


def other_step(header: dict[str, Any]) -> None:
    header["__metadata__"]["step"] = "7"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edited_state, "its checksum is wrong: the file was changed or damaged"),
        (other_name, "its checksum is wrong"),
        (other_dtype, "its checksum is wrong"),
        (other_shape, "its checksum is wrong"),
        (other_step, "its checksum is wrong"),
        (broken_state, "its state is not JSON: Expecting value"),
        (no_dict, "its state is not a dict, but of type list"),
        (other_format, 'its format must be "gnnautoscale checkpoint 1", but it is "gnnautoscale checkpoint 2"'),
        (no_metadata, 'its format must be "gnnautoscale checkpoint 1", but it is "none"'),
    ],
)
def test_an_edited_header_is_refused_and_the_good_one_before_it_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], reason: str
) -> None:
    good, bad, newest = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    bad.write_bytes(b"")
    header, data = parts(newest.read_bytes())
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    newest.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert reason in refusal(newest)
    with pytest.raises(InputError) as caught:
        load_latest(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"the newest checkpoint must be whole, but got {newest} ({reason}")
    assert message.endswith(f"The newest good one is {good}: resume from that file by its path.")
    good.write_bytes(b"junk")
    with pytest.raises(InputError, match=r"No older one is good either: start again\.$"):
        load_latest(tmp_path)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_file({"weight": torch.ones(2)}, path, metadata={"format": "pt"})
    assert 'but it is "pt"' in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "entries"),
    [
        ({"step": "1"}, {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}),
        ({"step": "1"}, {"a": {"dtype": "U8", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
        ({"step": "one"}, {}),
        ({}, {}),
    ],
)
def test_a_forged_file_is_refused(tmp_path: Path, metadata: dict[str, str], entries: dict[str, Any]) -> None:
    path = tmp_path / "file"
    metadata = {"format": "gnnautoscale checkpoint 1", "state": "{}", **metadata}
    size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    path.write_bytes(forged({"__metadata__": metadata, **entries}, b"\0" * size))
    reason = refusal(path)
    assert "(its content makes no sense: " in reason
    assert "\n" not in reason
    path.write_bytes(forged({"__metadata__": {**metadata, "step": "1"}}))
    assert load_checkpoint(path).step == 1


class FullDisk:
    """A file on a disk that has room for some bytes only."""

    def __init__(self, stream: Any, room: int) -> None:
        self.stream = stream
        self.room = room

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def write(self, content: Any) -> int:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.stream.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.mark.parametrize("room", [0, 400, 1000, 4500])
def test_a_full_disk_leaves_the_checkpoints_before_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(checkpoint, "_CHUNK", 64)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: FullDisk(builtins.open(path, mode), room))  # noqa: SIM115
        for step in (2, 3):
            with pytest.raises(
                InputError, match=r"must be writable, but got .*No space left.*Check the path and the free"
            ):
                save_checkpoint(tmp_path, step, {}, {"weight": torch.arange(1100.0)}, keep=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 2


def test_an_error_when_the_disk_is_synced_leaves_the_checkpoints_before_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match="Input/output error"):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name != tmp_path:
            assert name.suffix == ".part"
            assert b'"checksum":"' + b"0" * 64 not in name.read_bytes()  # it is complete
        done.append("folder" if name == tmp_path else "file")
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        done.append("move")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    save(tmp_path, 1)
    assert done == ["file", "move", "folder"]


def test_a_folder_that_cannot_be_synced_still_has_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    assert load_checkpoint(save(tmp_path, 1)).step == 1


def test_nothing_in_it_can_run_code() -> None:
    source = Path(checkpoint.__file__).read_text()
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not {name.split(".")[0] for name in imported} & {"pickle", "marshal", "shelve", "dill", "joblib"}
    assert "torch.load" not in source
    assert "torch.save" not in source
    assert "eval(" not in source
    assert "pickle" not in source


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_are_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 2**16)
    values = torch.arange(2**20, device="cuda").view(2**10, 2**10)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {}, {"values": values, "turned": values.t()})).tensors
    assert torch.cuda.max_memory_allocated() - before <= 2**17
    assert torch.equal(loaded["values"], values.cpu())
    assert torch.equal(loaded["turned"], values.t().cpu())
