"""The forward pass that most of the paper's models share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError

MakeLayer = Callable[[int, int, int], MessagePassing]

# Options that several models share, each with its description.
Hidden = Annotated[int, "Width of the layers in between."]
Layers = Annotated[int, "Number of layers."]
Dropout = Annotated[float, "Probability of dropout."]
DropInput = Annotated[bool, "Whether to apply dropout to the input features too."]
BatchNorm = Annotated[bool, "Whether batch norm follows each layer."]
Residual = Annotated[bool, "Whether layers of equal input and output width have a residual connection."]


class Stack(nn.Module):
    r"""Layers on top of each other, with the options of the paper's experiments between them.

    After each layer but the last: batch norm, residual, ReLU, dropout.

    Args:
        make_layer: Builds a layer from its input width, its output width and its position from 0.
        in_channels: Width of the input features.
        out_channels: Width of the output.
        hidden: Width of the layers in between.
        layers: Number of message-passing layers.
        dropout: Probability of dropout.
        drop_input: Whether dropout acts on the input features too.
        batch_norm: Whether layers are followed by batch norm.
        residual: Whether layers of equal input and output width are bridged.
        linear: Whether a linear layer comes before the first and after the last message-passing layer.
        jumping_knowledge: Whether the last linear layer sees the outputs of all layers side by side.
    """

    #: Whether the layers take weights of edges.
    takes_edge_weight = False

    def __init__(
        self,
        make_layer: MakeLayer,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int,
        layers: int,
        dropout: float,
        drop_input: bool,
        batch_norm: bool,
        residual: bool,
        linear: bool,
        jumping_knowledge: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels, hidden=hidden, layers=layers)
        check_probability("dropout", dropout)
        if jumping_knowledge and not linear:
            raise InputError(
                "jumping_knowledge joins the layers' outputs in a last linear layer", got="linear=False", fix="Set it."
            )
        self.dropout, self.drop_input, self.residual = dropout, drop_input, residual
        self.jumping_knowledge = jumping_knowledge
        widths = [hidden if linear else in_channels, *[hidden] * (layers - 1), hidden if linear else out_channels]
        self.convs = nn.ModuleList(make_layer(widths[i], widths[i + 1], i) for i in range(layers))
        # Without linear layers the last layer gives the output, which is not normalized.
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers if linear else layers - 1))
        if not batch_norm:
            self.norms = nn.ModuleList(nn.Identity() for _ in self.norms)
        self.first = nn.Linear(in_channels, hidden) if linear else None
        self.last = nn.Linear(hidden * (layers + 1 if jumping_knowledge else 1), out_channels) if linear else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node.

        Args:
            x: Features, ``[num_nodes, in_channels]``.
            edge_index: Sources and targets, ``[2, num_edges]``.
            edge_weight: Weights, ``[num_edges]``, for models whose layers take them.

        Returns:
            Outputs, ``[num_nodes, out_channels]``.
        """
        if not self.takes_edge_weight:
            refuse_edge_weight(self, edge_weight)
        if self.drop_input:
            x = self._drop(x)
        start = x if self.first is None else self.first(x).relu()
        # What layers see again and again is whole: dropout acts on what the first of them is given.
        x = start if self.first is None else self._drop(start)
        outputs = [x]
        for conv, norm in zip(self.convs, self.norms, strict=False):
            h = norm(self.call_layer(conv, x, start, edge_index, edge_weight))
            if self.residual and h.size(-1) == x.size(-1):
                h = h + x
            x = self._drop(h.relu())
            outputs.append(x)
        if self.last is None:
            return self.call_layer(self.convs[-1], x, start, edge_index, edge_weight)
        out: Tensor = self.last(torch.cat(outputs, dim=-1) if self.jumping_knowledge else x)
        return out

    def call_layer(
        self, conv: nn.Module, x: Tensor, start: Tensor, edge_index: Tensor, edge_weight: Tensor | None
    ) -> Tensor:
        """Run one layer; ``start`` is what the first layer was given, before dropout."""
        out: Tensor = conv(x, edge_index, edge_weight) if self.takes_edge_weight else conv(x, edge_index)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """The modules of the first weight-decay group: all layers but the last, with their norms."""
        return [*self.convs[:-1], *self.norms[: len(self.convs) - 1]]

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def refuse_edge_weight(model: nn.Module, edge_weight: Tensor | None) -> None:
    """Refuse weights of edges that a model would not use."""
    if edge_weight is not None:
        raise InputError(
            f"{type(model).__name__} has no use for edge weights",
            got="some",
            fix="Leave out data.edge_weight, or use GCN, GCNII or APPNP.",
        )


def check_share(name: str, value: float) -> None:
    """Refuse shares outside of [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name} must lie between 0 and 1", got=f"{value}", fix="Pass a share.")


def check_names(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an empty choice and names that there are not."""
    if not values or not set(values) <= set(known):
        raise InputError(
            f"{name} must be one or more of {', '.join(known)}", got=repr([*values]), fix="Choose among these."
        )


def check_sizes(**sizes: int) -> None:
    """Refuse widths and depths that are not positive integers."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a positive integer", got=repr(value), fix="Pass a count.")


def check_probability(name: str, value: float) -> None:
    """Refuse probabilities outside of [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise InputError(f"{name} must be at least 0 and below 1", got=f"{value}", fix="Pass a probability.")
