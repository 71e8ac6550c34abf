"""Produces values in a thread, ahead of those who use them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")

# Seconds after which the thread looks whether anybody still wants its values.
_PATIENCE = 0.1


class Ahead(Generic[T]):
    """Iterates over values that a thread produces, at most ``most`` of them ahead.

    What the thread raises is raised here. It ends with the last value, or when this is closed or deleted.

    Example:
        >>> with Ahead(range(3)) as values:
        ...     list(values)
        [0, 1, 2]
    """

    def __init__(self, values: Iterable[T], most: int = 1) -> None:
        self._queue: Queue[tuple[bool, T | BaseException | None]] = Queue(most)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=_produce, args=(values, self._queue, self._closed), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        is_value, value = self._queue.get()
        if is_value:
            return value  # type: ignore[return-value]
        self._queue.put((False, None))  # whoever asks again gets the same answer
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=_PATIENCE)
            except Empty:
                continue
        self._thread.join()

    def __del__(self) -> None:
        self._closed.set()


def _produce(values: Iterable[T], queue: Queue[tuple[bool, T | BaseException | None]], closed: threading.Event) -> None:
    def put(is_value: bool, value: T | BaseException | None) -> None:
        while not closed.is_set():
            try:
                queue.put((is_value, value), timeout=_PATIENCE)
            except Full:
                continue
            return

    try:
        for value in values:
            put(True, value)
            if closed.is_set():
                return
    except BaseException as error:  # the one who asks for the next value gets it
        put(False, error)
        return
    put(False, None)
