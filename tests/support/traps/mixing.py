"""Rows that depend on all nodes or on edges outside the layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import degree, scatter, softmax, to_torch_csr_tensor  # type: ignore[import-untyped]

from support.oracle import Outcome, outcome
from support.traps.registry import C, Net, between, directed, graph, sage, trap

# What mixes nodes ####################################################################################################


def mixing(name: str, step: Callable[[Any, Tensor], Any]) -> None:
    @trap(f"mixing: {name}")
    def _() -> Outcome:
        nets = [lambda: Net(step), lambda: Net(at_end=step)]
        return Outcome.worst([outcome(net, graph(), mode="evaluation") for net in nets])


mixing("the first node is subtracted", lambda model, x: x - x[0])
mixing("the last node is subtracted", lambda model, x: x - x[-1])
mixing("rows are shifted", lambda model, x: x + x.roll(1, 0))
mixing("running sum", lambda model, x: x.cumsum(0) / 10)
mixing("softmax over nodes", lambda model, x: x * x.softmax(0))
mixing("rank of a node", lambda model, x: x + x[:, :1].argsort(0).argsort(0) / 40)
mixing("position of a row", lambda model, x: x + torch.arange(x.size(0)).unsqueeze(1) / 40)
mixing("number of rows", lambda model, x: x * math.log(x.size(0)))
mixing("attention over all nodes", lambda model, x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0])
mixing("whitening", lambda model, x: x @ (x.T @ x / x.size(0) + torch.eye(C, dtype=x.dtype)).inverse())
mixing("normalized columns", lambda model, x: F.normalize(x, dim=0))
mixing("halves are swapped", lambda model, x: torch.cat([x[x.size(0) // 2 :], x[: x.size(0) // 2]]))


@trap("mixing: virtual node over the graphs of a Batch")
def _() -> Outcome:
    class Virtual(Net):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x + scatter(x, batch, 0, reduce="mean")[batch], edge_index)

    data = graph()
    data.batch = torch.arange(40) // 10
    call = lambda model, batch: model(batch.x, batch.edge_index, batch.batch)  # noqa: E731
    return outcome(Virtual, data, call=call)


@trap("mixing: softmax over the edges of a source")
def _() -> Outcome:
    class BySource(MessagePassing):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(aggr="add")
            self.lin, self.score = nn.Linear(C, C), nn.Linear(2 * C, 1)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            source, target = edge_index
            score = softmax(self.score(torch.cat([x[source], x[target]], 1)).squeeze(-1), source, num_nodes=x.size(0))
            return self.propagate(edge_index, x=self.lin(x), score=score)

        def message(self, x_j: Tensor, score: Tensor) -> Tensor:
            return x_j * score.unsqueeze(-1)

    return outcome(lambda: Net(layer=BySource), graph())


class OwnAttention(MessagePassing):  # type: ignore[misc]
    """Attention that subtracts the largest score of all edges, which changes nothing."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.score = nn.Linear(C, C), nn.Linear(2 * C, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        total = self.propagate(edge_index, x=torch.cat([self.lin(x), torch.ones_like(x[:, :1])], 1), h=x)
        return total[:, :-1] / (total[:, -1:] + 1e-16)

    def message(self, x_j: Tensor, h_i: Tensor, h_j: Tensor) -> Any:
        score = self.score(torch.cat([h_i, h_j], 1))
        return x_j * (score - score.max().detach()).exp() if score.numel() else x_j


@trap("mixing: largest score of all edges, which cancels out")
def _() -> Outcome:
    return outcome(lambda: Net(layer=OwnAttention), graph())


@trap("mixing: degrees of sources inside a layer")
def _() -> Outcome:
    class OutDegree(MessagePassing):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(aggr="add")
            self.lin = nn.Linear(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = self.lin(x) / degree(edge_index[0], x.size(0), x.dtype).clamp(min=1).unsqueeze(-1)
            return self.propagate(edge_index, x=x)

    return outcome(lambda: Net(layer=OutDegree), directed())


class ByHand(nn.Module):
    """Passes messages without a layer at one place."""

    def __init__(self, place: int, way: str) -> None:
        super().__init__()
        self.convs, self.place, self.way = nn.ModuleList([sage(), sage()]), place, way

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for number, conv in enumerate(self.convs):
            x = self.pass_messages(x, edge_index) if number == self.place else x
            x = conv(x, edge_index).tanh()
        return self.pass_messages(x, edge_index) if self.place == 2 else x

    def pass_messages(self, x: Tensor, edge_index: Tensor) -> Any:
        if self.way == "index_add":
            return x.index_add(0, edge_index[1], x[edge_index[0]])
        if self.way == "scatter":
            return scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), reduce="mean")
        return to_torch_csr_tensor(edge_index, size=(x.size(0), x.size(0))).to(x.dtype).t() @ x


def by_hand(place: int, way: str) -> None:
    @trap(f"by hand: {way}, {('before', 'between', 'after')[place]} the layers")
    def _() -> Outcome:
        return outcome(lambda: ByHand(place, way), directed())


by_hand(0, "scatter")
by_hand(1, "index_add")
by_hand(1, "sparse matrix")
by_hand(2, "scatter")


@trap("by hand: nearest neighbours of hidden rows")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        return x[torch.cdist(x, x).topk(3, largest=False).indices].mean(1)

    return between(step)


@trap("by hand: pooling and back")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        assigned = model.assign(x).softmax(-1)
        return assigned @ (assigned.T @ x)

    return between(step, assign=nn.Linear(C, 3))
