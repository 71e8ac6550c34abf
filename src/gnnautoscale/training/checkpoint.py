"""Checkpoints on disk: files that hold no code and are never half written.

A checkpoint is one file in the safetensors format. Its metadata holds the name of the format, the step, the state as
JSON, and a SHA-256 of the whole file, computed with zeros in place of its own 64 digits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gnnautoscale._util import write_atomically
from gnnautoscale.errors import InputError

_FORMAT = "gnnautoscale checkpoint 1"
_NAME = re.compile(r"checkpoint-([0-9]{9})\.safetensors")
_LARGEST_STEP = 10**9 - 1
_CHUNK = 64 * 2**20  # bytes in memory at a time
_LARGEST_HEADER = 100_000_000  # the limit of safetensors
_NO_CHECKSUM = b"0" * 64
_CHECKSUM_AT = 8 + len('{"__metadata__":{"checksum":"')

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Two numbers per byte, each of which counts in the shapes of the format; new in PyTorch 2.8.
_PAIRS: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
if _PAIRS is not None:
    _CODES[_PAIRS] = "F4"
# Unlike the narrow types, these can be copied in every layout.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_DICTS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter}


class _DefectError(Exception):
    """Why a file is not a checkpoint."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        path: Its file.
        step: The step of the run.
        state: Plain values.
        tensors: Tensors on the CPU, read from the file when they are used. Writing to them does not change the file.
    """

    path: Path
    step: int
    state: dict[str, Any]
    tensors: Mapping[str, Tensor]


def save_checkpoint(
    folder: Path, step: int, state: dict[str, Any], tensors: Mapping[str, Tensor], *, keep: int = 2
) -> Path:
    """Write a checkpoint, then remove the oldest ones. Only one run may save to a folder at a time.

    Args:
        folder: Folder of the checkpoints; it is created if needed.
        step: The step of the run. A checkpoint of the same step is replaced; those of later steps stay.
        state: Values that JSON preserves; :func:`split_tensors` makes them from others.
        tensors: Tensors by name, on any device. They are written piece by piece, so they may exceed the memory.
        keep: Number of checkpoints to keep, including this one.

    Returns:
        The file.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = save_checkpoint(Path(mkdtemp()), 7, {"epoch": 1}, {"weight": torch.ones(2)})
        >>> file.name
        'checkpoint-000000007.safetensors'
        >>> checkpoint = load_checkpoint(file)
        >>> checkpoint.step, checkpoint.state, checkpoint.tensors
        (7, {'epoch': 1}, {'weight': tensor([1., 1.])})
    """
    if not isinstance(step, int) or not 0 <= step <= _LARGEST_STEP:
        raise InputError(
            f"step must be a whole number from 0 to {_LARGEST_STEP}", got=repr(step), fix="Pass the step of the run."
        )
    if keep < 1:
        raise InputError("keep must be at least 1", got=str(keep), fix="Pass a number of checkpoints.")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    # The widest first, as safetensors itself does, so that each begins at a multiple of its width.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(step, _json(state), ordered)
    rule = "a folder of checkpoints must be writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(rule, got=f"{folder} ({error})", fix="Check the path.") from None
    path = folder / f"checkpoint-{step:09d}.safetensors"
    write_atomically(path, lambda stream: _write(stream, header, ordered), rule=rule)
    _tidy(folder, step, keep)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Args:
        path: A file that :func:`save_checkpoint` wrote.
    """
    try:
        return _read(path)
    except _DefectError as defect:
        raise InputError(
            "a checkpoint must be a whole file that save_checkpoint wrote",
            got=f"{path} ({defect})",
            fix="Resume from another checkpoint.",
        ) from None


def latest_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint of the latest step without reading it, or return ``None``.

    Args:
        folder: Folder of the checkpoints.
    """
    return next(iter(_checkpoints(folder)), None)


def load_latest(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint, or return ``None``.

    A damaged one is an error that names the newest good one: a run never goes back further without being asked to.

    Args:
        folder: Folder of the checkpoints.
    """
    paths = _checkpoints(folder)
    if not paths:
        return None
    try:
        return _read(paths[0])
    except _DefectError as defect:
        reason = str(defect)
    good = next((path for path in paths[1:] if _is_good(path)), None)
    raise InputError(
        "the newest checkpoint must be whole",
        got=f"{paths[0]} ({reason})",
        fix="No older one is good either: start again."
        if good is None
        else f"The newest good one is {good}: resume from that file by its path.",
    )


def split_tensors(prefix: str, nested: object) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state, such as that of an optimizer, into values for JSON and named tensors.

    Args:
        prefix: Prefix of the tensors' names.
        nested: Dicts with strings or integers as keys, lists, tuples, numbers, strings, ``None`` and tensors.

    Returns:
        The arguments of :func:`join_tensors`.

    Example:
        >>> plain, tensors = split_tensors("optimizer", {"lr": 0.1, "mean": torch.ones(1), "betas": (0.9, 0.99)})
        >>> plain
        {'lr': 0.1, 'mean': {'$tensor': 'optimizer.mean'}, 'betas': {'$tuple': [0.9, 0.99]}}
        >>> tensors
        {'optimizer.mean': tensor([1.])}
        >>> join_tensors(plain, tensors)
        {'lr': 0.1, 'mean': tensor([1.]), 'betas': (0.9, 0.99)}
    """
    tensors: dict[str, Tensor] = {}
    return _split(prefix, nested, tensors), tensors


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`split_tensors` exactly.

    Args:
        plain: The values.
        tensors: At least the tensors that came with them.
    """
    if isinstance(plain, list):
        return [join_tensors(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain), "")
    if not str(tag).startswith("$"):
        return {key: join_tensors(item, tensors) for key, item in plain.items()}
    content = plain[tag]
    if tag == "$tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    is_list = isinstance(content, list)
    if tag == "$tuple" and is_list:
        return tuple(join_tensors(item, tensors) for item in content)
    if tag in _DICTS and is_list and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        return _DICTS[tag]({key: join_tensors(item, tensors) for key, item in content})
    raise InputError(
        "a state must be joined with the tensors that it was split from",
        got=f"{tag} {content!r:.80}",
        fix="Pass the state and the tensors of one checkpoint.",
    )


def _split(where: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """Do the work of :func:`split_tensors` for the value at a place."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        name = where
        while name in tensors:  # as for the keys 0 and "0"
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [_split(_inside(where, index), item, tensors) for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    tag = f"${kind.__name__}"
    if isinstance(value, dict) and kind is _DICTS.get(tag):
        for key in value:
            if type(key) not in (int, str):
                raise _not_storable(f"the key {key!r}", where)
        pairs = [(key, _split(_inside(where, key), item, tensors)) for key, item in value.items()]
        is_object = kind is dict and all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if is_object else {tag: [list(pair) for pair in pairs]}
    raise _not_storable(f"an object of type {kind.__name__}", where)


def _not_storable(what: str, where: str) -> InputError:
    return InputError(
        "a checkpoint can hold dicts with texts or whole numbers as keys, lists, tuples, numbers, texts and tensors",
        got=f"{what} at {where}",
        fix="Convert it, or leave it out.",
    )


def _inside(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _check_tensor(name: object, tensor: object) -> None:
    """Refuse tensors that the format cannot hold."""
    try:
        is_name = isinstance(name, str) and name.encode() not in (b"", b"__metadata__")
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise InputError(
            'a tensor must have a text other than "__metadata__" as name', got=repr(name), fix="Rename it."
        )
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        got = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{name!r} must be a dense tensor that holds values", got=got, fix="Convert it.")
    if tensor.dtype not in _CODES or (tensor.dtype == _PAIRS and tensor.dim() == 0):
        raise InputError(
            f"{name!r} must be of a type and shape that safetensors has",
            got=f"{tensor.dtype} with {tensor.dim()} dimensions",
            fix="Convert it, for example to torch.float32.",
        )


def _json(state: dict[str, Any]) -> str:
    """Write a state as JSON, or refuse one that JSON would change."""
    try:
        text = json.dumps(state, allow_nan=False)
        if isinstance(state, dict) and json.loads(text) == state:
            return text
        reason = "a tuple, or a key that is no text" if isinstance(state, dict) else type(state).__name__
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise InputError(
        "a state must be a dict of values that JSON gives back as they were",
        got=reason,
        fix="Use split_tensors, which makes such values of others.",
    )


def _header(step: int, state: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes before those of the tensors, with zeros for the checksum."""
    metadata = {"checksum": _NO_CHECKSUM.decode(), "format": _FORMAT, "step": str(step), "state": state}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        if tensor.dtype == _PAIRS:
            shape[-1] *= 2
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise InputError(
            f"a checkpoint's state and names must take {_LARGEST_HEADER:,} bytes or less",
            got=f"{len(text):,}",
            fix="Hold long lists of numbers as tensors.",
        )
    return struct.pack("<Q", len(text)) + text


def _write(stream: BinaryIO, header: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint and its checksum."""
    digest = hashlib.sha256(header)
    stream.write(header)
    for tensor in tensors.values():
        for chunk in _chunks(tensor):
            content = _bytes(chunk)
            digest.update(content)
            stream.write(content)
    stream.seek(_CHECKSUM_AT)
    stream.write(digest.hexdigest().encode())


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into small views, in the order of its values."""
    if tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= _CHUNK:
        yield tensor
        return
    row = tensor.numel() // tensor.size(0) * tensor.element_size()
    if row > _CHUNK:
        for index in range(tensor.size(0)):
            yield from _chunks(tensor[index])
        return
    rows = _CHUNK // row
    for start in range(0, tensor.size(0), rows):
        yield tensor[start : start + rows]


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    whole = whole.view(_INTEGERS[tensor.element_size()]).contiguous().cpu()
    flat = whole.as_strided((whole.numel(),), (1,))  # a dimension of size 1 may have any stride
    return flat.view(torch.uint8).numpy().data


def _read(path: Path) -> Checkpoint:
    """Do the work of :func:`load_checkpoint`."""
    try:
        with path.open("rb") as stream, _opened(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                found = metadata.get("format", "none")
                raise _DefectError(f'its format must be "{_FORMAT}", but it is "{found:.80}"')
            state = _parse(metadata.get("state", ""))
            if metadata.get("checksum") != _checksum(stream):
                raise _DefectError("its checksum is wrong: the file was changed or damaged")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return Checkpoint(path, int(metadata["step"]), state, tensors)
    except FileNotFoundError:
        raise _DefectError("it does not exist") from None
    except OSError as error:
        raise _DefectError(f"it cannot be read: {error}") from None
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _DefectError(f"its content makes no sense: {str(error).partition(chr(10))[0]}") from None


def _opened(path: Path) -> Any:
    """Open a file with safetensors, which checks its header and its length."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _DefectError(f"it is cut off, or not a safetensors file: {error}") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _DefectError(f"its state is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise _DefectError(f"its state is not a dict, but of type {type(state).__name__}")
    return state


def _checksum(stream: BinaryIO) -> str:
    """Compute the checksum of a file, piece by piece."""
    digest = hashlib.sha256(stream.read(_CHECKSUM_AT) + _NO_CHECKSUM)
    stream.seek(len(_NO_CHECKSUM), 1)
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _is_good(path: Path) -> bool:
    try:
        _read(path)
    except _DefectError:
        return False
    return True


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    try:
        return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            "the place of the checkpoints must be a folder", got=f"{folder} ({error})", fix="Check the path."
        ) from None


def _tidy(folder: Path, step: int, keep: int) -> None:
    """Remove old checkpoints and remains of interrupted writes; whatever cannot be removed waits for the next time."""
    newest = folder / f"checkpoint-{step:09d}.safetensors"
    old = [path for path in _checkpoints(folder) if path <= newest][keep:]
    for path in [*old, *folder.glob("checkpoint-*.safetensors.*.part")]:
        with contextlib.suppress(OSError):
            path.unlink()
