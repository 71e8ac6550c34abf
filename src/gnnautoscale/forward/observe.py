"""Observers watch a forward pass without changing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.forward.edges import ActiveLayer
from gnnautoscale.forward.record import Arguments

if TYPE_CHECKING:
    from gnnautoscale.forward.session import Session


@dataclass(frozen=True)
class LayerRun:
    """A finished layer call: its name, output and arguments; ``nested`` if another layer made it."""

    call: str
    layer: MessagePassing
    out: Any
    #: Runs the layer on other arguments, with the same dropout; pushes nothing and updates no running averages.
    again: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The :class:`BatchInfo`; that of the edges if a graph has several types of them, or a :class:`TypedInfo` if the
    #: layer takes several.
    info: Any
    nested: bool


class Observer:
    """Watches layers and their edges; every method does nothing unless overridden."""

    #: Whether to call :meth:`layer_ran`, which requires repeatable layers.
    repeats = False

    def around_layer(
        self, session: Session, call: str, layer: MessagePassing, arguments: Arguments, run: Callable[[], Any]
    ) -> Any:
        """Called in place of a layer; must return the result of ``run``."""
        return run()

    def layer_ran(self, run: LayerRun) -> None:
        """Called after a layer has run, if :attr:`repeats`."""

    def edges_used(self, session: Session, active: ActiveLayer, edge_index: Tensor, values: dict[str, Any]) -> None:
        """Called before each edge call, with the edges and values that the layer computed itself."""
