"""Random states of host and device, to draw the same numbers again or to continue later."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomState:
    """PyTorch's random state of host and device when the object is created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @property
    def has_moved(self) -> bool:
        """Whether random numbers were drawn since then."""
        if not torch.equal(self._host, torch.get_rng_state()):
            return True
        return self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state(self._device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Go back to that state inside this context, and continue from the present one afterwards."""
        with torch.random.fork_rng(devices=[self._device] if self._cuda is not None else []):
            torch.set_rng_state(self._host)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield


def random_states(device: torch.device) -> dict[str, Any]:
    """The random states of Python, NumPy and PyTorch, on the host and on a device, as plain values and tensors."""
    numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Continue drawing numbers from the states that :func:`random_states` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    # Captured steps share the device's state, so it is written only if it differs.
    kept = states["cuda"] if device.type == "cuda" else None
    if kept is not None and not torch.equal(kept, torch.cuda.get_rng_state(device)):
        torch.cuda.set_rng_state(kept, device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore all random states at the end of this context."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)
