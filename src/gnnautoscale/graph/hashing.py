"""Fingerprints of tensors: fast, since all cores hash."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gnnautoscale._util import available_cores

_CHUNK = 2**24  # bytes that are hashed together; part of the definition


def fingerprint(*tensors: Tensor | None, **params: str | int | float) -> str:
    """A hash of tensors and settings: 64 hexadecimal digits that depend on every value, type, shape and setting.

    Tensors may be on any device, ``None`` marks a missing one, and the order of the settings does not matter.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(available_cores()) as pool:
        for tensor in tensors:
            if tensor is None:
                digest.update(b"None;")
                continue
            # Type and shape determine how many digests follow, so different lists never give the same bytes.
            digest.update(f"{tensor.dtype}{list(tensor.shape)};".encode())
            # A byte view, since numpy has no bfloat16; it does not copy, and the chunks do not either.
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            content = plain.view(torch.uint8).numpy().data if plain.numel() else b""
            chunks = (content[first : first + _CHUNK] for first in range(0, len(content), _CHUNK))
            for each in pool.map(_digest, chunks):
                digest.update(each)
    digest.update(repr(sorted(params.items())).encode())
    return digest.hexdigest()


def _digest(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()
