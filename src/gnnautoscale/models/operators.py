"""The paper's models, built on PyG's layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from gnnautoscale._util import checked, option
from gnnautoscale.errors import InputError
from gnnautoscale.models.stack import PaperModel, Stack

_AGGREGATORS = ("mean", "min", "max", "std", "var", "sum")
_SCALERS = ("identity", "amplification", "attenuation")


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GCN(Stack):
    r"""Graph convolutional network: :math:`h_v = \sum_{w} \frac{1}{c_{w,v}} W h_w` over neighbours and the node itself.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GCN(8, 3, hidden=16, layers=2).convs[1]
        GCNConv(16, 3)
    """

    drop_input: bool = True
    linear: bool = option(False, "Whether linear layers come before the first and after the last layer.")

    takes_edge_weight = True
    _layer_class = pyg.GCNConv

    def _make_layer(self, width_in: int, width_out: int, number: int) -> pyg.MessagePassing:
        return self._layer_class(width_in, width_out)


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GraphSAGE(GCN):
    r"""GraphSAGE: :math:`h_v = W_1 h_v + W_2 \, \textrm{mean}_w h_w`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GraphSAGE(8, 3, hidden=16, layers=2).convs[1]
        SAGEConv(16, 3, aggr=mean)
    """

    takes_edge_weight = False
    _layer_class = pyg.SAGEConv


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GIN(Stack):
    r"""Graph isomorphism network: :math:`h_v = \textrm{MLP}((1 + \epsilon) h_v + \sum_w h_w)`, as expressive as WL.

    Linear layers come first and last.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GIN(8, 3, hidden=16, layers=4).last
        Linear(in_features=16, out_features=3, bias=True)
    """

    layers: int = 4
    dropout: float = 0.0
    batch_norm: bool = option(True, "Whether each layer's MLP has batch norm between its two linear layers.")
    track_running_stats: bool = option(
        True,
        "Whether batch norm keeps running averages for evaluation. The paper's does not: it uses the statistics of the "
        "current batch in evaluation too.",
    )
    residual: bool = True
    jumping_knowledge: bool = option(False, "Whether the last linear layer reads the outputs of all layers.")
    norm_between: bool = option(False, "Whether batch norm follows each layer, besides that inside its MLP.")

    def _make_layer(self, width_in: int, width_out: int, number: int) -> pyg.MessagePassing:
        averages = self.track_running_stats
        norm = nn.BatchNorm1d(width_out, track_running_stats=averages) if self.batch_norm else nn.Identity()
        mlp = [nn.Linear(width_in, width_out), norm, nn.ReLU(), nn.Linear(width_out, width_out), nn.ReLU()]
        return pyg.GINConv(nn.Sequential(*mlp), train_eps=True)

    def _make_norm(self) -> nn.Module:
        # A GIN layer normalizes inside its MLP.
        return nn.BatchNorm1d(self.hidden) if self.norm_between else nn.Identity()


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GCNII(Stack):
    r"""Deep GCN with initial residual and identity mapping.

    :math:`h_v = (\alpha h^{(0)}_v + (1 - \alpha) \sum_w \frac{1}{c_{w,v}} h_w) ((1 - \beta) I + \beta W)` with
    :math:`\beta = \log(\theta / \ell + 1)` in layer :math:`\ell`. Linear layers come first and last.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> len(GCNII(8, 3, hidden=16, layers=64).convs)
        64
    """

    layers: int = 16
    alpha: float = option(0.1, "Strength of the initial residual.", least=0, most=1)
    theta: float = option(0.5, "Strength of the weights.", least=0)
    shared_weights: bool = option(True, "Whether the initial residual shares the weights of the neighbours.")
    drop_input: bool = True

    takes_edge_weight = True

    def _make_layer(self, width_in: int, width_out: int, number: int) -> pyg.MessagePassing:
        return pyg.GCN2Conv(width_in, self.alpha, self.theta, layer=number, shared_weights=self.shared_weights)

    def call_layer(
        self, conv: nn.Module, x: Tensor, start: Tensor, edge_index: Tensor, edge_weight: Tensor | None
    ) -> Tensor:
        """Run one layer, which also reads the first layer's input, without dropout."""
        out: Tensor = conv(x, start, edge_index, edge_weight)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """All message-passing layers, with their norms."""
        return [*self.convs, *self.norms]


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class PNA(Stack):
    r"""Principal neighbourhood aggregation: several aggregators, each scaled by functions of the degree.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        degrees: Number of nodes of each in-degree, ``[max_degree + 1]``.
        {options}
        jumping_knowledge: Whether linear layers come first and last, and the last reads the outputs of all layers.

    Example:
        >>> import torch
        >>> PNA(8, 3, degrees=torch.tensor([0, 4, 2]), hidden=16, layers=2).convs[1]
        PNAConv(16, 3, towers=1, edge_dim=None)
    """

    degrees: Tensor
    layers: int = 3
    aggregators: Sequence[str] = option(("mean", "min", "max"), f"Any of {', '.join(_AGGREGATORS)}.")
    scalers: Sequence[str] = option(_SCALERS, f"Any of {', '.join(_SCALERS)}.")
    jumping_knowledge: bool = False
    batch_norm: bool = True

    def _check(self) -> None:
        super()._check()
        for name, choices in (("aggregators", _AGGREGATORS), ("scalers", _SCALERS)):
            given = getattr(self, name)
            if not given or not set(given) <= set(choices):
                rule = f"{name} must be one or more of {', '.join(choices)}"
                raise InputError(rule, got=repr([*given]), fix="Choose among these.")

    def _build(self) -> None:
        self.linear = self.jumping_knowledge
        super()._build()

    def _make_layer(self, width_in: int, width_out: int, number: int) -> pyg.MessagePassing:
        return pyg.PNAConv(width_in, width_out, [*self.aggregators], [*self.scalers], self.degrees)


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class GAT(PaperModel):
    r"""Graph attention network: :math:`h_v = \sum_w \alpha_{w,v} W h_w` with learned :math:`\alpha_{w,v}`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GAT(8, 3, hidden=4, heads=2).convs[1]
        GATConv(8, 3, heads=1)
    """

    hidden: int = option(8, "Width of each head of hidden layers.", least=1)
    heads: int = option(8, "Number of heads, side by side.", least=1)
    out_heads: int = option(1, "Number of heads of the last layer, averaged.", least=1)
    dropout: float = option(0.6, "Probability of dropout, on inputs and on attention.", least=0, below=1)

    def _build(self) -> None:
        *widths, last = [self.in_channels, *[self.hidden * self.heads] * (self.layers - 1)]
        drop = self.dropout
        self.convs = nn.ModuleList(pyg.GATConv(width, self.hidden, self.heads, dropout=drop) for width in widths)
        self.convs.append(pyg.GATConv(last, self.out_channels, self.out_heads, concat=False, dropout=drop))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node, ``[num_nodes, out_channels]``; arguments as in :class:`Stack`."""
        self._check_edge_weight(edge_weight)
        for conv in self.convs[:-1]:
            x = F.elu(conv(self._drop(x), edge_index))
        out: Tensor = self.convs[-1](self._drop(x), edge_index)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """The whole model."""
        return [self]


@checked()
@dataclass(eq=False, repr=False, kw_only=True)
class APPNP(PaperModel):
    r"""Predict with an MLP, then propagate the predictions.

    :math:`h^{(\ell)}_v = \alpha h^{(0)}_v + (1 - \alpha) \sum_w \frac{1}{c_{w,v}} h_w^{(\ell - 1)}`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> APPNP(8, 3, hidden=16, layers=10).propagation
        APPNP(K=10, alpha=0.1)
    """

    hidden: int = option(64, "Width of the MLP's hidden layer.", least=1)
    layers: int = option(10, "Number of propagations.", least=1, below=2**16)
    alpha: float = option(0.1, "Probability of teleporting back.", least=0, most=1)

    takes_edge_weight = True

    def _build(self) -> None:
        self.first, self.second = nn.Linear(self.in_channels, self.hidden), nn.Linear(self.hidden, self.out_channels)
        self.propagation = pyg.APPNP(self.layers, self.alpha)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node, ``[num_nodes, out_channels]``; arguments as in :class:`Stack`."""
        x = self.first(self._drop(x)).relu()
        out: Tensor = self.propagation(self.second(self._drop(x)), edge_index, edge_weight)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """The first linear layer."""
        return [self.first]
