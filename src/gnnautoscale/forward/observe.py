"""Observers look at a forward pass without taking part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.forward.edges import Frame
from gnnautoscale.graph import BatchInfo

if TYPE_CHECKING:
    from gnnautoscale.forward.session import Session


@dataclass(frozen=True)
class LayerRun:
    """A layer that has just run, and a way to run it again.

    Attributes:
        call: The name of the call.
        layer: The layer.
        out: What it returned.
        again: Runs it on other arguments, with the same dropout; nothing is pushed or averaged.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        info: The batch.
        nested: Whether another layer called it.
    """

    call: str
    layer: MessagePassing
    out: Any
    again: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    info: BatchInfo
    nested: bool


class Observer:
    """Looks at layers and their edges; every method does nothing unless it is overridden."""

    #: Whether :meth:`layer_ran` is called, which needs layers that can be run again.
    repeats = False

    def around_layer(self, session: Session, call: str, layer: MessagePassing, run: Callable[[], Any]) -> Any:
        """Called in place of a layer; must return what ``run`` returns."""
        return run()

    def layer_ran(self, run: LayerRun) -> None:
        """Called after a layer has run, if :attr:`repeats`."""

    def edges_used(self, session: Session, frame: Frame, edge_index: Tensor, values: dict[str, Any]) -> None:
        """Called before each ``propagate`` or ``edge_updater`` with what the layer computed itself."""
