"""The random state of host and device, to draw the same numbers once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The random state of host and device at the time it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @property
    def has_moved(self) -> bool:
        """Whether random numbers were drawn since."""
        if not torch.equal(self._host, torch.get_rng_state()):
            return True
        return self._cuda is not None and not torch.equal(self._cuda, torch.cuda.get_rng_state(self._device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Go back to that state; afterwards everything goes on from where it was."""
        with torch.random.fork_rng(devices=[self._device] if self._cuda is not None else []):
            torch.set_rng_state(self._host)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield
