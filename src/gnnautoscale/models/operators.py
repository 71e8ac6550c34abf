"""The paper's models, built on PyG's layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError
from gnnautoscale.models.stack import (
    BatchNorm,
    DropInput,
    Dropout,
    Hidden,
    Layers,
    Residual,
    Stack,
    check_names,
    check_probability,
    check_share,
    check_sizes,
    refuse_edge_weight,
)


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

    takes_edge_weight = True
    layer_class = pyg.GCNConv

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: Hidden = 64,
        layers: Layers = 2,
        dropout: Dropout = 0.5,
        drop_input: DropInput = True,
        batch_norm: BatchNorm = False,
        residual: Residual = False,
        linear: Annotated[bool, "Whether linear layers come first and last."] = False,
    ) -> None:
        super().__init__(
            lambda width_in, width_out, _: self.layer_class(width_in, width_out),
            in_channels,
            out_channels,
            hidden=hidden,
            layers=layers,
            dropout=dropout,
            drop_input=drop_input,
            batch_norm=batch_norm,
            residual=residual,
            linear=linear,
        )


class GraphSAGE(GCN):
    r"""GraphSAGE: :math:`h_v = W_1 h_v + W_2 \, \textrm{mean}_w h_w`, with the options of :class:`GCN`.

    Example:
        >>> GraphSAGE(8, 3, hidden=16, layers=2).convs[1]
        SAGEConv(16, 3, aggr=mean)
    """

    takes_edge_weight = False
    layer_class = pyg.SAGEConv


class GIN(Stack):
    r"""Graph isomorphism network: :math:`h_v = \textrm{MLP}((1 + \epsilon) h_v + \sum_w h_w)`, as expressive as WL.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GIN(8, 3, hidden=16, layers=4).last
        Linear(in_features=16, out_features=3, bias=True)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: Hidden = 64,
        layers: Layers = 4,
        dropout: Dropout = 0.0,
        drop_input: DropInput = False,
        batch_norm: Annotated[bool, "Whether batch norm comes between the two linear layers of a layer."] = True,
        track_running_stats: Annotated[
            bool,
            "Whether batch norm keeps running averages for evaluation, as usual. The paper's "
            "uses the statistics of the nodes at hand instead, in evaluation too.",
        ] = True,
        residual: Residual = True,
    ) -> None:
        def make_layer(width_in: int, width_out: int, _: int) -> pyg.GINConv:
            norm = nn.BatchNorm1d(width_out, track_running_stats=track_running_stats) if batch_norm else nn.Identity()
            mlp = [nn.Linear(width_in, width_out), norm, nn.ReLU(), nn.Linear(width_out, width_out), nn.ReLU()]
            return pyg.GINConv(nn.Sequential(*mlp), train_eps=True)

        super().__init__(
            make_layer,
            in_channels,
            out_channels,
            hidden=hidden,
            layers=layers,
            dropout=dropout,
            drop_input=drop_input,
            batch_norm=False,
            residual=residual,
            linear=True,
        )


class GCNII(Stack):
    r"""Deep GCN with initial residual and identity mapping.

    :math:`h_v = (\alpha h^{(0)}_v + (1 - \alpha) \sum_w \frac{1}{c_{w,v}} h_w) ((1 - \beta) I + \beta W)` with
    :math:`\beta = \log(\theta / \ell + 1)` in layer :math:`\ell`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> len(GCNII(8, 3, hidden=16, layers=64).convs)
        64
    """

    takes_edge_weight = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: Hidden = 64,
        layers: Layers = 16,
        alpha: Annotated[float, "Strength of the initial residual."] = 0.1,
        theta: Annotated[float, "Strength of the weights."] = 0.5,
        shared_weights: Annotated[bool, "Whether the initial residual has the same weights."] = True,
        dropout: Dropout = 0.5,
        drop_input: DropInput = True,
        batch_norm: BatchNorm = False,
        residual: Residual = False,
    ) -> None:
        check_share("alpha", alpha)
        if not 0.0 <= theta < math.inf:
            raise InputError("theta must not be negative", got=f"{theta}", fix="Values around 0.5 are usual.")
        super().__init__(
            lambda width, _, i: pyg.GCN2Conv(width, alpha, theta, layer=i + 1, shared_weights=shared_weights),
            in_channels,
            out_channels,
            hidden=hidden,
            layers=layers,
            dropout=dropout,
            drop_input=drop_input,
            batch_norm=batch_norm,
            residual=residual,
            linear=True,
        )

    def call_layer(
        self, conv: nn.Module, x: Tensor, start: Tensor, edge_index: Tensor, edge_weight: Tensor | None
    ) -> Tensor:
        """Run one layer, which sees the first layer's input too, without dropout."""
        out: Tensor = conv(x, start, edge_index, edge_weight)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """All propagation layers, with their norms."""
        return [*self.convs, *self.norms]


class PNA(Stack):
    r"""Principal neighbourhood aggregation: several aggregators, each scaled by functions of the degree.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        degrees: How many nodes have each in-degree, ``[max_degree + 1]``.
        {options}
        jumping_knowledge: Whether a last linear layer sees the outputs of all layers.

    Example:
        >>> import torch
        >>> PNA(8, 3, degrees=torch.tensor([0, 4, 2]), hidden=16, layers=2).convs[1]
        PNAConv(16, 3, towers=1, edge_dim=None)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        degrees: Tensor,
        hidden: Hidden = 64,
        layers: Layers = 3,
        aggregators: Annotated[Sequence[str], "Any of mean, min, max, std, var, sum."] = ("mean", "min", "max"),
        scalers: Annotated[Sequence[str], "Any of identity, amplification, attenuation."] = (
            "identity",
            "amplification",
            "attenuation",
        ),
        jumping_knowledge: bool = False,
        dropout: Dropout = 0.5,
        drop_input: DropInput = False,
        batch_norm: BatchNorm = True,
        residual: Residual = False,
    ) -> None:
        check_names("aggregators", aggregators, ("mean", "min", "max", "std", "var", "sum"))
        check_names("scalers", scalers, ("identity", "amplification", "attenuation"))
        super().__init__(
            lambda width_in, width_out, _: pyg.PNAConv(width_in, width_out, [*aggregators], [*scalers], degrees),
            in_channels,
            out_channels,
            hidden=hidden,
            layers=layers,
            dropout=dropout,
            drop_input=drop_input,
            batch_norm=batch_norm,
            residual=residual,
            linear=jumping_knowledge,
            jumping_knowledge=jumping_knowledge,
        )


class GAT(nn.Module):
    r"""Graph attention network: :math:`h_v = \sum_w \alpha_{w,v} W h_w` with learned :math:`\alpha_{w,v}`.

    Args:
        in_channels: Width of the input features.
        out_channels: Width of the output.
        {options}

    Example:
        >>> GAT(8, 3, hidden=4, heads=2).convs[1]
        GATConv(8, 3, heads=1)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: Annotated[int, "Width of each head of the layers in between."] = 8,
        layers: Layers = 2,
        heads: Annotated[int, "Number of heads, concatenated."] = 8,
        out_heads: Annotated[int, "Number of heads of the last layer, averaged."] = 1,
        dropout: Annotated[float, "Probability of dropout on inputs and attention."] = 0.6,
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels, hidden=hidden, layers=layers)
        check_sizes(heads=heads, out_heads=out_heads)
        check_probability("dropout", dropout)
        self.dropout = dropout
        widths = [in_channels, *[hidden * heads] * (layers - 1)]
        self.convs = nn.ModuleList(pyg.GATConv(width, hidden, heads, dropout=dropout) for width in widths[:-1])
        self.convs.append(pyg.GATConv(widths[-1], out_channels, out_heads, concat=False, dropout=dropout))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node, ``[num_nodes, out_channels]``; arguments as in :class:`Stack`."""
        refuse_edge_weight(self, edge_weight)
        for conv in self.convs[:-1]:
            x = F.elu(conv(F.dropout(x, self.dropout, self.training), edge_index))
        out: Tensor = self.convs[-1](F.dropout(x, self.dropout, self.training), edge_index)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """Everything."""
        return [self]


class APPNP(nn.Module):
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

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: Annotated[int, "Width of the hidden layer of the MLP."] = 64,
        layers: Annotated[int, "Number of propagations."] = 10,
        alpha: Annotated[float, "Probability of teleporting back."] = 0.1,
        dropout: Dropout = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels, hidden=hidden, layers=layers)
        check_probability("dropout", dropout)
        check_share("alpha", alpha)
        self.dropout = dropout
        self.first, self.second = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.propagation = pyg.APPNP(layers, alpha)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Compute the output of every node, ``[num_nodes, out_channels]``; arguments as in :class:`Stack`."""
        x = self.first(F.dropout(x, self.dropout, self.training)).relu()
        x = self.second(F.dropout(x, self.dropout, self.training))
        out: Tensor = self.propagation(x, edge_index, edge_weight)
        return out

    def decayed_modules(self) -> Iterable[nn.Module]:
        """The first linear layer."""
        return [self.first]
