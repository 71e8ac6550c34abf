"""Checkpoints on disk: files that hold no code and are never half written.

A checkpoint is a ``torch.save`` file of one dict: the name of the format, the step, the state, and a seal, a hash of
its values and of the shapes and types of its tensors. It is read with ``weights_only``, so that nothing in it runs.
First the CRC-32 of every record is checked, so that damage to values or tensors is noticed. Damage to the bytes between
the records is either refused or does not change what is loaded. Then the seal is checked, so that a state that somebody
changed is refused as a whole instead of failing somewhere in a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.serialization import config

from gnnautoscale._util import damage_in, reason_of, write_atomically
from gnnautoscale.errors import InputError

_FORMAT = "gnnautoscale checkpoint 1"
_NAME = re.compile(r"checkpoint-[0-9]{9}\.pt")
# PyTorch's defaults, which a program may have changed: checksums, and MAP_PRIVATE, which keeps writes out of the file.
_SETTINGS = {"save.compute_crc32": True, "load.mmap_flags": 2}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        path: Its file.
        step: The step of the run.
        state: The state. Its tensors are on the CPU and are read from the file when they are used; writing to them
            does not change the file.
    """

    path: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int = 2, path: Path | None = None) -> Path:
    """Write a checkpoint, remove the oldest ones, and return its file. Only one run may save to a folder at a time.

    Args:
        folder: Folder of the checkpoints; it is created if needed.
        step: The step of the run. A checkpoint of the same step is replaced; those of later steps stay.
        state: Dicts with strings or integers as keys, lists, tuples, numbers, strings, ``None`` and tensors, nested.
            Tensors may be on any device and in memory-mapped files; host memory holds one tensor of a GPU at a time.
        keep: Number of checkpoints to keep, including this one.
        path: Another file of the folder, for a rank's share of a checkpoint; then nothing is removed.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = save_checkpoint(Path(mkdtemp()), 7, {"epoch": 1, "weight": torch.ones(2)})
        >>> file.name
        'checkpoint-000000007.pt'
        >>> checkpoint = load_checkpoint(file)
        >>> checkpoint.step, checkpoint.state
        (7, {'epoch': 1, 'weight': tensor([1., 1.])})
    """
    if not isinstance(step, int) or not 0 <= step < 10**9 or keep < 1:
        rule, got = "step must be a whole number below 10**9 and keep at least 1", f"step {step!r} and keep {keep}"
        raise InputError(rule, got=got, fix="Pass the step of the run.")
    content: dict[str, Any] = {"format": _FORMAT, "step": step, "state": _storable(state, "the state")}
    content["seal"] = _seal(step, content["state"])
    rule = "a folder of checkpoints must be writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(rule, got=f"{folder} ({reason_of(error)})", fix="Check the path.") from None
    shard, path = path, path or folder / f"checkpoint-{step:09d}.pt"
    with config.patch(_SETTINGS):  # type: ignore[attr-defined]
        write_atomically(path, lambda stream: torch.save(content, stream), rule=rule)
    if shard is not None:
        return path
    # Whatever cannot be removed waits for the next time.
    there = _checkpoints(folder)
    old = [other for other in there if other <= path][keep:]
    # Also those of a checkpoint that a full disk, say, kept some rank from writing.
    kept = {other.stem for other in there} - {other.stem for other in old}
    stems = {each: each.name.partition(".")[0] for each in folder.glob("checkpoint-*.rank-*.pt")}
    shards = [each for each, stem in stems.items() if stem <= path.stem and stem not in kept]
    for remains in [*old, *shards, *folder.glob("checkpoint-*.pt.*.part")]:
        with contextlib.suppress(OSError):
            remains.unlink()
    return path


def shard_path(folder: Path, step: int, rank: int, size: int) -> Path:
    """The file of a rank's share of a checkpoint."""
    return folder / f"checkpoint-{step:09d}.rank-{rank}-of-{size}.pt"


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking all of its values.

    Args:
        path: A file that :func:`save_checkpoint` wrote.
    """
    found = _read(path)
    if isinstance(found, Checkpoint):
        return found
    rule = "a checkpoint must be a whole file that save_checkpoint wrote"
    raise InputError(rule, got=f"{path} ({found})", fix="Resume from another checkpoint.")


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
    newest = _read(paths[0])
    if isinstance(newest, Checkpoint):
        return newest
    good = next((path for path in paths[1:] if isinstance(_read(path), Checkpoint)), None)
    fix = f"The newest good one is {good}: resume from that file by its path."
    if good is None:
        fix = "No older one is good either: start again."
    raise InputError("the newest checkpoint must be whole", got=f"{paths[0]} ({newest})", fix=fix)


def _storable(value: Any, where: str) -> Any:
    """Copy a nested state without its tensors, or refuse what could not be loaded without running code."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    tensor = value.detach() if isinstance(value, Tensor) else None
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta:
        # The file holds whole storages: a view is copied out of one that is larger.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if kind in (list, tuple):
        return kind(_storable(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter) and all(type(key) in (int, str) for key in value):
        return kind({key: _storable(item, f"{where}[{key!r}]") for key, item in value.items()})
    rule = "a checkpoint holds dicts with string or integer keys, lists, tuples, numbers, strings and dense tensors"
    raise InputError(rule, got=f"{kind.__name__} at {where}", fix="Convert it, or leave it out.")


def _seal(step: int, state: dict[str, Any]) -> str:
    """A hash of all values of a state, and of the forms of its tensors."""
    return hashlib.sha256(repr((step, _form(state))).encode()).hexdigest()


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return [(key, _form(item)) for key, item in value.items()]
    return [_form(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(path: Path) -> Checkpoint | str:
    """Read a checkpoint, or say what is wrong with it."""
    try:
        damage = damage_in(path)
        if damage is not None:
            return damage
        with config.patch(_SETTINGS):  # type: ignore[attr-defined]
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {reason_of(error)}"
    except pickle.UnpicklingError:
        return "it holds more than values and tensors"
    except Exception as error:  # zipfile and PyTorch raise many types for damaged and foreign archives
        return f"it is cut off, damaged, or no checkpoint: {error!r:.200}"
    match content:
        case {"format": found, "step": int(step), "state": dict(state), **others} if found == _FORMAT:
            if others.get("seal") != _seal(step, state):
                return "its values were changed after it was written, or it has no seal"
            missing = [name for name in state.get("shards", ()) if not (path.parent / name).is_file()]
            return f"its shard {missing[0]} is missing" if missing else Checkpoint(path, step, state)
    found = content.get("format") if isinstance(content, dict) else None
    return f'its format must be "{_FORMAT}", but it is {found!r:.80}'


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    try:
        return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            "checkpoints must be in a folder", got=f"{folder} ({reason_of(error)})", fix="Check the path."
        ) from None
