"""What the paper's models share: options, checks, and for most of them the forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import Option, option, options_of
from gnnautoscale.errors import InputError


@dataclass(eq=False, repr=False)
class NamedModel(nn.Module, ABC):
    """A model that is built by name: its options are fields of a dataclass, each declared with ``option``.

    A subclass adds fields or changes their defaults, creates its modules in ``_build``, and computes in ``forward``.
    """

    _: KW_ONLY
    hidden: int = option(64, "Width of hidden layers.", least=1)
    layers: int = option(2, "Number of layers.", least=1, below=2**16)
    dropout: float = option(0.5, "Probability of dropout.", least=0, below=1)

    def __post_init__(self) -> None:
        super().__init__()  # keeps the numbers that the dataclass has set already
        self._check()
        self._build()

    def _check(self) -> None:
        declared = options_of(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in declared:
                setattr(self, each.name, declared[each.name].check(value))
            elif each.type == "int":  # numbers of channels
                setattr(self, each.name, Option(each.name, int, least=1).check(value))

    @abstractmethod
    def _build(self) -> None:
        """Create the modules."""

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


@dataclass(eq=False, repr=False)
class PaperModel(NamedModel):
    """A model of a plain graph, with features of one width."""

    in_channels: int
    out_channels: int

    #: Whether the layers use edge weights.
    takes_edge_weight = False

    @abstractmethod
    def decayed_modules(self) -> Iterable[nn.Module]:
        """The modules whose weights decay by ``weight_decay_conv``; the others decay by ``weight_decay_other``."""

    def _check_edge_weight(self, edge_weight: Tensor | None) -> None:
        if edge_weight is not None and not self.takes_edge_weight:
            raise InputError(
                f"{type(self).__name__} does not use edge weights",
                got="edge_weight",
                fix="Remove data.edge_weight, or use GCN, GCNII or APPNP.",
            )


@dataclass(eq=False, repr=False)
class Stack(PaperModel):
    """Message-passing layers, each followed by batch norm, residual connection, ReLU and dropout.

    With ``linear``, linear layers come before the first and after the last of them; without, the last
    message-passing layer gives the output. A subclass creates a layer in ``_make_layer``.
    """

    _: KW_ONLY
    drop_input: bool = option(False, "Whether dropout also acts on the input features.")
    batch_norm: bool = option(False, "Whether batch norm follows each layer.")
    residual: bool = option(False, "Whether layers of equal input and output width have a residual connection.")

    #: Whether linear layers come first and last.
    linear = True
    #: Whether the last linear layer reads the outputs of all layers.
    jumping_knowledge = False

    @abstractmethod
    def _make_layer(self, width_in: int, width_out: int, number: int) -> MessagePassing:
        """Create a layer; ``number`` counts from 1."""

    def _make_norm(self) -> nn.Module:
        return nn.BatchNorm1d(self.hidden) if self.batch_norm else nn.Identity()

    def _build(self) -> None:
        count, hidden, linear = self.layers, self.hidden, self.linear
        widths = [hidden if linear else self.in_channels, *[hidden] * (count - 1)]
        widths.append(hidden if linear else self.out_channels)
        self.convs = nn.ModuleList(self._make_layer(widths[i], widths[i + 1], i + 1) for i in range(count))
        self.norms = nn.ModuleList(self._make_norm() for _ in range(count if linear else count - 1))
        last_width = hidden * (count + 1 if self.jumping_knowledge else 1)
        self.first = nn.Linear(self.in_channels, hidden) if linear else None
        self.last = nn.Linear(last_width, self.out_channels) if linear else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node.

        Args:
            x: Features, ``[num_nodes, in_channels]``.
            edge_index: Sources and targets, ``[2, num_edges]``.
            edge_weight: Weights, ``[num_edges]``, for models that use them.

        Returns:
            ``[num_nodes, out_channels]``.
        """
        self._check_edge_weight(edge_weight)
        if self.drop_input:
            x = self._drop(x)
        start = x if self.first is None else self.first(x).relu()
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
        """Run one layer; ``start`` is the first layer's input before dropout."""
        out: Tensor = conv(x, edge_index, edge_weight) if self.takes_edge_weight else conv(x, edge_index)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """All message-passing layers but the last, with their norms."""
        return [*self.convs[:-1], *self.norms[: len(self.convs) - 1]]
