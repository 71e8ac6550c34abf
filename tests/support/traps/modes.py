"""What models do in training only, and in thresholds that a small graph does not reach."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.utils import degree, scatter  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack
from support.oracle import Outcome, compare, judged, outcome
from support.traps.known import gcn, positive
from support.traps.registry import C, Net, at_end, between, centred, graph, later, sage, trap

# Training mode #######################################################################################################


class FrozenNorms(nn.Module):
    """Batch norms stay in evaluation mode while the model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.norm = nn.ModuleList([sage(), sage()]), nn.BatchNorm1d(C)
        self.norm.running_mean = torch.randn(C)

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.convs[1](self.norm(self.convs[0](x, edge_index)).relu(), edge_index)


@trap("training: frozen batch norm", exact=True)
def _() -> Outcome:
    return outcome(FrozenNorms, graph())


@trap("training: a submodule stays in evaluation mode")
def _() -> Outcome:
    class Frozen(Net):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.convs[0].eval()
            return self

    step = lambda model, x: x - x.mean(0) if not model.convs[0].training and model.training else x  # noqa: E731
    return outcome(lambda: Frozen(step), graph())


@trap("training: centring in a submodule that is alone in training mode")
def _() -> Outcome:
    class Centring(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return centred(x) if self.training else x

    def check() -> None:
        data = graph()
        part = Centring()
        model = Net(lambda model, x: model.part(x), part=part).double().eval()
        part.train()
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        rows = torch.zeros_like(expected)
        for _ in range(4):
            for batch in gas.HaloLoader(data, 4, partition="random"):
                rows[batch.n_id[: batch.batch_size]] = model(batch).detach()
        compare(rows, expected)

    return judged(check)


@trap("training: an auxiliary loss is returned")
def _() -> Outcome:
    return at_end(lambda model, x: (x, x.square().mean()) if model.training else x)


@trap("training: rows of a head are returned", exact=True)
def _() -> Outcome:
    return at_end(lambda model, x: (x, model.head(x)) if model.training else x, head=nn.Linear(C, 2))


@trap("training: stochastic depth that becomes certain")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        return x if model.training and random.random() < model.skip else centred(x)

    return later(lambda: Net(step, skip=1.0), lambda model: setattr(model, "skip", 0.0))


@trap("training: a layer is skipped in training")
def _() -> Outcome:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage() for _ in range(3)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for number, conv in enumerate(self.convs):
                if not (self.training and number == 1):
                    x = conv(x, edge_index).tanh()
            return x

    return outcome(Skipping, graph())


@trap("training: layers in another order in training")
def _() -> Outcome:
    class Reversing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage() for _ in range(3)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for conv in reversed(self.convs) if self.training else self.convs:
                x = conv(x, edge_index).tanh()
            return x

    return outcome(Reversing, graph())


@trap("training: weights of edges ignored in training")
def _() -> Outcome:
    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([gcn(), gcn()])

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Any:
            for conv in self.convs:
                x = conv(x, edge_index, None if self.training else edge_weight).tanh()
            return x

    return outcome(Ignoring, graph())


@trap("training: labels as features in training")
def _() -> Outcome:
    class Labels(Net):
        def forward(self, x: Tensor, edge_index: Tensor, y: Tensor, train_mask: Tensor) -> Any:  # type: ignore[override]
            known = F.one_hot(y, C).to(x.dtype) * train_mask.unsqueeze(-1)
            return super().forward(x + known if self.training else x, edge_index)

    return outcome(Labels, graph())


@trap("training: prototypes of the training nodes")
def _() -> Outcome:
    class Prototypes(Net):
        def forward(self, x: Tensor, edge_index: Tensor, y: Tensor, train_mask: Tensor) -> Any:  # type: ignore[override]
            x = super().forward(x, edge_index)
            return torch.cdist(x, scatter(x[train_mask], y[train_mask], 0, 4, reduce="mean"))

    return outcome(Prototypes, graph())


@trap("training: dropout of a layer's edges set later")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        first = pyg.APPNP(3, 0.1)
        model = Stack([first, sage()]).double()
        gas.autoscale(model, data)
        loader = gas.HaloLoader(data, 4, partition="random")
        rows = torch.zeros_like(data.x)
        for _ in range(2):
            for batch in loader:
                model(batch)
        first.dropout = 1.0  # certain, so that it can be compared
        for _ in range(6):
            for batch in loader:
                rows[batch.n_id[: batch.batch_size]] = model(batch).detach()
        compare(rows, gas.detach(model)(data.x, data.edge_index).detach())

    return judged(check)


@trap("training: attention dropout of a layer set later")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        first = pyg.GATConv(C, C)
        model = Stack([first, pyg.GATConv(C, C)]).double()
        gas.autoscale(model, data)
        loader = gas.HaloLoader(data, 4, partition="random")
        gas.infer(model, loader)
        first.dropout = 1.0
        rows = torch.zeros_like(data.x)
        for _ in range(4):
            for batch in loader:
                rows[batch.n_id[: batch.batch_size]] = model(batch).detach()
        compare(rows, gas.detach(model)(data.x, data.edge_index).detach())

    return judged(check)


@trap("training: checkpointed layers", says="checkpoint")
def _() -> Outcome:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage(), sage()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for conv in self.convs:
                x = checkpoint(conv, x, edge_index, use_reentrant=False).tanh()
            return x

    return outcome(Checkpointed, graph())


@trap("training: weights frozen while the plan was made")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()
        whole = copy.deepcopy(model)
        whole(data.x, data.edge_index).square().sum().backward()
        gas.autoscale(model.requires_grad_(False), data)
        loader = gas.HaloLoader(data, partition=torch.zeros(data.num_nodes, dtype=torch.long))
        gas.infer(model, loader)
        model.requires_grad_(True)
        model(next(iter(loader))).square().sum().backward()
        compare([weight.grad for weight in model.parameters()], [weight.grad for weight in whole.parameters()])

    return judged(check)


@trap("training: gradient of the features")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()
        x = data.x.clone().requires_grad_()
        model(x, data.edge_index).square().sum().backward()
        gas.autoscale(model, data)
        batch = next(iter(gas.HaloLoader(data, partition=torch.zeros(data.num_nodes, dtype=torch.long))))
        rows = batch.x.clone().requires_grad_()
        model(rows, batch.edge_index).square().sum().backward()
        compare(rows.grad, x.grad)

    return judged(check)


class Forces(Net):
    """Returns the gradient of its own output."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x, edge_index).square().sum()
            return torch.autograd.grad(energy, x)[0]


@trap("training: gradient inside the model")
def _() -> Outcome:
    return outcome(Forces, graph(), mode="evaluation")


# Thresholds ##########################################################################################################


@trap("scale: mean over all nodes above 200 nodes")
def _() -> Outcome:
    data = graph(500, 900)
    make = lambda: Net(lambda model, x: centred(x) if x.size(0) > 200 else x)  # noqa: E731
    loader = partial(gas.HaloLoader, num_parts=3, partition="random")
    return outcome(make, data, loader, mode="evaluation")


class OnEdges(Net):
    """Centres its features if a condition on the edges holds."""

    def __init__(self, condition: Callable[[Tensor, int], bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = super().forward(x, edge_index)
        return centred(x) if self.condition(edge_index, x.size(0)) else x


@trap("scale: mean over all nodes above 50 edges")
def _() -> Outcome:
    return outcome(lambda: OnEdges(lambda edges, count: edges.size(1) > 50), graph())


@trap("scale: mean over all nodes above a degree of 12")
def _() -> Outcome:
    data = graph(60, 150)
    hub = torch.stack([torch.arange(1, 31), torch.zeros(30, dtype=torch.long)])
    data = Data(x=data.x, edge_index=torch.cat([data.edge_index, hub, hub.flip(0)], dim=1))
    return outcome(lambda: OnEdges(lambda edges, count: int(degree(edges[1], count).max()) > 12), data)


@trap("scale: mean over all nodes for dense graphs")
def _() -> Outcome:
    return outcome(lambda: OnEdges(lambda edges, count: edges.size(1) / count > 5), graph(40, 400))


@trap("scale: even number of nodes")
def _() -> Outcome:
    return between(lambda model, x: centred(x) if x.size(0) % 2 == 0 else x)


@trap("scale: branch on the mean")
def _() -> Outcome:
    data = positive()
    return outcome(lambda: Net(first=lambda model, x: centred(x) if float(x.mean()) > 0.5 else x), data)


@trap("scale: branch on negative features")
def _() -> Outcome:
    data = graph(200, 100)
    data.x[7, 2] = -50.0
    return outcome(lambda: Net(first=lambda model, x: x - x.min() if float(x.min()) < -10 else x), data)


@trap("scale: missing features are replaced by the mean")
def _() -> Outcome:
    data = graph()
    data.x[3, 1] = data.x[30, 4] = float("nan")
    return outcome(lambda: Net(first=lambda model, x: torch.where(x.isnan(), x.nanmean(0), x)), data)


@trap("scale: missing features in one part are replaced by the mean")
def _() -> Outcome:
    data = graph(200, 300)
    data.x[150, 1] = float("nan")
    return outcome(lambda: Net(first=lambda model, x: torch.where(x.isnan(), x.nanmean(0), x)), data)


@trap("scale: features clipped at a quantile")
def _() -> Outcome:
    return between(lambda model, x: x.clamp(max=float(x.detach().quantile(0.95))))


@trap("scale: outliers clipped far out")
def _() -> Outcome:
    data = graph(200, 300)
    data.x[150] *= 100
    clip = lambda model, x: torch.minimum(x, x.mean(0) + 6 * x.std(0))  # noqa: E731
    return outcome(lambda: Net(first=clip), data)


@trap("scale: features divided by their maximum")
def _() -> Outcome:
    return outcome(lambda: Net(first=lambda model, x: x / x.abs().max()), graph())


@trap("scale: features divided by their maximum, which is 1 everywhere")
def _() -> Outcome:
    data = graph()
    data.x = F.one_hot(torch.arange(data.num_nodes) % C, C).double()
    return outcome(lambda: Net(first=lambda model, x: x / x.abs().max()), data)


@trap("scale: tiny mean over all nodes")
def _() -> Outcome:
    return at_end(lambda model, x: x + 1e-3 * x.mean(0))


@trap("scale: one column of a wide output")
def _() -> Outcome:
    return at_end(lambda model, x: torch.cat([x * 1e3, 1e-2 * (x - 0.1 * x.mean(0))], dim=1))
