"""What models keep between calls, and what is changed after their first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.nn.resolver import aggregation_resolver  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import EDGE_CHANNELS, Stack
from support.oracle import CHECKS, Outcome, compare, judged, outcome
from support.traps.known import Annealed, gcn
from support.traps.registry import C, Net, between, centred, directed, graph, later, sage, trap, while_training

# State in unusual places #############################################################################################


@trap("state: kept in a dictionary")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        return x - model.cache.setdefault("mean", x.mean(0).detach())

    return between(step, cache={})


@trap("state: kept in a list")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        model.seen.append(x.detach().mean(0))
        return x - model.seen[0]

    return between(step, seen=[])


@trap("state: kept in a configuration object")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        if model.config.scale is None:
            model.config.scale = x.detach().norm()
        return x / model.config.scale

    return between(step, config=SimpleNamespace(scale=None))


@trap("state: kept outside the model")
def _() -> Outcome:
    def make() -> nn.Module:
        cache: dict[str, Tensor] = {}
        return Net(lambda model, x: x - cache.setdefault("mean", x.mean(0).detach()))

    return outcome(make, graph())


@trap("state: kept by a layer")
def _() -> Outcome:
    return outcome(lambda: Net(layer=KeepsMean), graph())


class KeepsMean(MessagePassing):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(C, C)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.propagate(edge_index, x=self.lin(x - self.mean))


@trap("state: first call in training decides")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        if model.training and model.limit is None:
            model.limit = float(x.detach().abs().quantile(0.5))
        return x if model.limit is None else x.clamp(-model.limit, model.limit)

    return between(step, limit=None)


@trap("state: spectral norm")
def _() -> Outcome:
    spectral = torch.nn.utils.parametrizations.spectral_norm
    return outcome(lambda: Net(lambda model, x: model.lin(x), lin=spectral(nn.Linear(C, C))), graph(), mode="one part")


@trap("state: own running mean, used in evaluation")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        if model.training:
            model.running = 0.5 * model.running + 0.5 * x.detach().mean(0)
            return x
        return x - model.running

    return between(step, running=torch.zeros(C, dtype=torch.double))


@trap("state: lazy weights", exact=True)
def _() -> Outcome:
    return outcome(lambda: Net(layer=lambda: pyg.SAGEConv(-1, C)), graph(), mode="evaluation")


class KeepsSmoothness(MessagePassing):  # type: ignore[misc]
    """Keeps how much the rows differ along edges, for the loss."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(C, C)
        self.smoothness: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.lin(x)
        source, target = edge_index
        self.smoothness = (x[source] - x[target]).square().mean()
        return self.propagate(edge_index, x=x)


@trap("state: a loss that a layer keeps")
def _() -> Outcome:
    return outcome(lambda: Net(layer=KeepsSmoothness), graph(), mode="one part")


@trap("state: a loss that the model keeps")
def _() -> Outcome:
    class Smooth(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = super().forward(x, edge_index)
            self.smoothness = (x[edge_index[0]] - x[edge_index[1]]).square().mean()
            return x

    return outcome(Smooth, graph(), mode="one part")


@trap("state: rows that the model keeps")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Tensor:
        model.hidden = x
        return x

    return outcome(lambda: Net(step, hidden=None), graph(), mode="one part")


@trap("state: attention loss of SuperGATConv")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model: Any = Net(layer=lambda: pyg.SuperGATConv(C, C)).double()
        gas.autoscale(model, data)
        model(next(iter(gas.HaloLoader(data, 1))))
        for conv in model.convs:  # scores of all edges, of a self-loop for each node, and of pairs without an edge
            compare(conv.att_y.sum(), torch.tensor(data.num_edges + data.num_nodes, dtype=conv.att_y.dtype))

    return judged(check)


# Attributes, hooks and modules that change ###########################################################################


@dataclass
class Config:
    center: bool = False
    power: float = 1.0
    hidden: dict[str, float] = field(default_factory=lambda: {"mix": 0.0})


@trap("flags: attribute of a configuration object")
def _() -> Outcome:
    def make() -> nn.Module:
        return Net(lambda model, x: centred(x) if model.config.center else x, config=Config())

    return while_training(make, lambda model: setattr(model.config, "center", True))


@trap("flags: entry of a dictionary in a configuration object")
def _() -> Outcome:
    def make() -> nn.Module:
        return Net(lambda model, x: x + model.config.hidden["mix"] * x.mean(0), config=Config())

    return later(make, lambda model: model.config.hidden.update(mix=0.7))


@trap("flags: entry of a list")
def _() -> Outcome:
    def make() -> nn.Module:
        return Net(lambda model, x: x + model.mixes[1] * x.mean(0), mixes=[1.0, 0.0])

    return while_training(make, lambda model: model.mixes.__setitem__(1, 0.5))


@trap("flags: boolean buffer")
def _() -> Outcome:
    def make() -> nn.Module:
        model = Net(lambda model, x: centred(x) if bool(model.switch) else x)
        model.register_buffer("switch", torch.tensor(False))
        return model

    return while_training(make, lambda model: model.switch.fill_(True))


@trap("flags: buffer of zeros that scales a mean over all nodes")
def _() -> Outcome:
    def make() -> nn.Module:
        model = Net(lambda model, x: x + model.mix * x.mean(0))
        model.register_buffer("mix", torch.zeros(()))
        return model

    return later(make, lambda model: model.mix.fill_(0.5))


@trap("flags: branch on a weight")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        return x + model.mix * x.mean(0) if float(model.mix) > 2 else x

    return later(lambda: Net(step, mix=nn.Parameter(torch.zeros(()))), lambda model: model.mix.data.fill_(3.0))


@trap("flags: number of the epoch")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: centred(x) if model.epoch >= 5 else x, epoch=0)  # noqa: E731
    return while_training(make, lambda model: setattr(model, "epoch", 3), lambda model: setattr(model, "epoch", 6))


@trap("flags: flag of a submodule")
def _() -> Outcome:
    class Switch(nn.Module):
        active = False

        def forward(self, x: Tensor) -> Tensor:
            return centred(x) if self.active else x

    make = lambda: Net(lambda model, x: model.switch(x), switch=Switch())  # noqa: E731
    return later(make, lambda model: setattr(model.switch, "active", True))


@trap("flags: attribute of the class")
def _() -> Outcome:
    class Shared(Net):
        center = False

    def change(model: nn.Module) -> None:
        Shared.center = True

    def make() -> nn.Module:
        Shared.center = False
        return Shared(lambda model, x: centred(x) if model.center else x)

    return outcome(make, graph(), changes=[change], mode="evaluation")


@trap("flags: global variable")
def _() -> Outcome:
    options = {"center": False}

    def make() -> nn.Module:
        options["center"] = False
        return Net(lambda model, x: centred(x) if options["center"] else x)

    def check() -> None:
        data = graph()
        model = make().double()
        loader = gas.HaloLoader(data, 4, partition="random")
        gas.infer(gas.autoscale(model, data), loader)
        options["center"] = True
        got = gas.infer(model, loader)
        compare(got, gas.detach(model)(data.x, data.edge_index))

    return judged(check)


@trap("flags: activation replaced by one over all nodes")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: model.act(x), act=torch.relu)  # noqa: E731
    return later(make, lambda model: setattr(model, "act", centred))


@trap("flags: activation replaced")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: model.act(x), act=torch.relu)  # noqa: E731
    return while_training(make, lambda model: setattr(model, "act", torch.sigmoid))


@trap("flags: depth")
def _() -> Outcome:
    return while_training(Deep, lambda model: setattr(model, "depth", 3), lambda model: setattr(model, "depth", 1))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs, self.depth = nn.ModuleList([sage() for _ in range(3)]), 2

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for conv in self.convs[: self.depth]:
            x = conv(x, edge_index).tanh()
        return x


@trap("flags: number of propagations of a layer")
def _() -> Outcome:
    make = lambda: Net(layer=lambda: pyg.APPNP(2, 0.1))  # noqa: E731
    return later(make, lambda model: setattr(model.convs[0], "K", 3), lambda model: setattr(model.convs[1], "K", 1))


@trap("flags: teleport probability of APPNP")
def _() -> Outcome:
    make = lambda: Net(layer=lambda: pyg.APPNP(2, 0.1))  # noqa: E731
    return while_training(make, lambda model: setattr(model.convs[0], "alpha", 0.6))


@trap("hooks: forward hook on a layer")
def _() -> Outcome:
    hook = lambda module, inputs, out: out * 2  # noqa: E731
    return later(Net, lambda model: model.convs[0].register_forward_hook(hook))


@trap("hooks: forward hook over all nodes on a layer")
def _() -> Outcome:
    hook = lambda module, inputs, out: centred(out)  # noqa: E731
    return while_training(Net, lambda model: model.convs[0].register_forward_hook(hook))


@trap("hooks: forward pre-hook over all nodes on a layer")
def _() -> Outcome:
    hook = lambda module, inputs: (centred(inputs[0]), *inputs[1:])  # noqa: E731
    return later(Net, lambda model: model.convs[1].register_forward_pre_hook(hook))


@trap("hooks: forward hook over all nodes on another module")
def _() -> Outcome:
    hook = lambda module, inputs, out: centred(out)  # noqa: E731
    make = lambda: Net(lambda model, x: model.lin(x), lin=nn.Linear(C, C))  # noqa: E731
    return while_training(make, lambda model: model.lin.register_forward_hook(hook))


@trap("hooks: message hook of a layer")
def _() -> Outcome:
    hook = lambda module, inputs, out: out * 0.5  # noqa: E731
    return while_training(Net, lambda model: model.convs[1].register_message_forward_hook(hook))


@trap("hooks: propagate hook that changes the rows")
def _() -> Outcome:
    hook = lambda module, inputs, out: centred(out)  # noqa: E731
    return later(Net, lambda model: model.convs[0].register_propagate_forward_hook(hook))


@trap("layers: method of a layer replaced")
def _() -> Outcome:
    def change(model: Any) -> None:
        forward = model.convs[0].forward
        model.convs[0].forward = lambda x, edge_index: centred(forward(x, edge_index))

    return later(Net, change)


@trap("layers: appended")
def _() -> Outcome:
    make = lambda: Stack([sage(), sage()])  # noqa: E731
    return while_training(make, lambda model: model.layers.append(sage().double()))


@trap("layers: removed", says="layer|call")
def _() -> Outcome:
    return later(lambda: Stack([sage(), sage(), sage()]), lambda model: model.layers.__delitem__(1))


@trap("layers: swapped", says="layer|call")
def _() -> Outcome:
    def change(model: Any) -> None:
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]

    return later(lambda: Stack([sage(), pyg.SAGEConv(C, C, aggr="max"), sage()]), change)


@trap("layers: added as a new attribute")
def _() -> Outcome:
    def step(model: Any, x: Tensor) -> Any:
        return model.added(x) if hasattr(model, "added") else x

    return while_training(lambda: Net(step), lambda model: setattr(model, "added", pyg.PairNorm()))


@trap("layers: norm replaced by one over the graph")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: model.norm(x), norm=nn.LayerNorm(C))  # noqa: E731
    return while_training(make, lambda model: setattr(model, "norm", pyg.GraphNorm(C).double()))


@trap("layers: norm replaced by a batch norm")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: model.norm(x), norm=nn.LayerNorm(C))  # noqa: E731
    return outcome(
        make, graph(), changes=[lambda model: setattr(model, "norm", nn.BatchNorm1d(C).double())], mode="evaluation"
    )


@trap("layers: linear map of a layer replaced")
def _() -> Outcome:
    make = lambda: Net(layer=gcn)  # noqa: E731
    return later(make, lambda model: setattr(model.convs[0], "lin", nn.Linear(C, C).double()))


@trap("layers: linear map of a layer replaced by one with a norm")
def _() -> Outcome:
    def change(model: Any) -> None:
        model.convs[1].lin = nn.Sequential(nn.Linear(C, C), pyg.PairNorm()).double()

    return later(lambda: Net(layer=gcn), change)


@trap("layers: weight replaced")
def _() -> Outcome:
    def change(model: Any) -> None:
        model.convs[0].lin_l.weight = nn.Parameter(torch.randn(C, C, dtype=torch.double))

    return while_training(Net, change)


@trap("layers: weights loaded", exact=True)
def _() -> Outcome:
    return later(Net, lambda model: model.load_state_dict(Net().double().state_dict()))


@trap("layers: aggregation")
def _() -> Outcome:
    def change(model: Any) -> None:
        model.convs[0].aggr, model.convs[0].aggr_module = "max", aggregation_resolver("max")

    return while_training(Net, change)


@trap("layers: hidden in a list")
def _() -> Outcome:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = [sage().double(), sage().double()]

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for conv in self.more:
                x = conv(x, edge_index).tanh()
            return super().forward(x, edge_index)

    return outcome(Hidden, graph())


@trap("layers: made inside forward")
def _() -> Outcome:
    class Fresh(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = pyg.SimpleConv(aggr="mean")(super().forward(x, edge_index), edge_index)
            return self.convs[1](x, edge_index)

    return outcome(Fresh, graph())


# Settings of PyG's layers that change ################################################################################


def setting(name: str, value: Any, layer: Callable[[], Any], *arguments: str) -> None:
    """Change an attribute of both layers of a model."""

    def change(model: Any) -> None:
        for conv in model.layers:
            setattr(conv, name, value)

    @trap(f"settings: {type(layer()).__name__}.{name}", says=type(layer()).__name__)
    def _() -> Outcome:
        return later(
            lambda: Stack([layer(), layer()], arguments), change, data=directed() if name == "flow" else graph()
        )


setting("add_self_loops", False, gcn)
setting("fill_value", 3.0, lambda: pyg.GATConv(C, C, edge_dim=EDGE_CHANNELS), "edge_attr")
setting("flow", "target_to_source", sage)
setting("K", 1, lambda: pyg.SGConv(C, C, K=2))
setting("diag_lambda", 0.5, lambda: pyg.ClusterGCNConv(C, C))


class LearnedPower(Annealed):
    """The power is a weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.power
        self.register_parameter("power", nn.Parameter(torch.ones(())))


@trap("record: weights of edges from a weight of the layer")
def _() -> Outcome:
    def change(model: Any) -> None:
        for layer in model.layers:
            layer.power.data.fill_(0.3)

    make = lambda: Stack([LearnedPower(), LearnedPower()], ("edge_weight",))  # noqa: E731
    return outcome(make, graph(), changes=[change], mode=CHECKS)  # as one part too: the power has a gradient


@trap("record: weights of edges from a buffer of the layer")
def _() -> Outcome:
    class Buffered(Annealed):
        def __init__(self) -> None:
            super().__init__()
            del self.power
            self.register_buffer("power", torch.ones(()))

    def change(model: Any) -> None:
        for layer in model.layers:
            layer.power.mul_(0.3)

    return later(lambda: Stack([Buffered(), Buffered()], ("edge_weight",)), change)


@trap("record: weights of edges from a shared configuration")
def _() -> Outcome:
    class Configured(Annealed):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Any:
            return self.propagate(edge_index, x=self.lin(x), weight=edge_weight**self.config.power)

    def make() -> nn.Module:
        config = Config()
        model = Stack([Configured(config), Configured(config)], ("edge_weight",))
        model.config = config  # type: ignore[assignment]
        return model

    return while_training(make, lambda model: setattr(model.config, "power", 0.2))


@trap("record: weights of edges from the number of the layer's calls")
def _() -> Outcome:
    class Counting(Annealed):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Any:
            return self.propagate(edge_index, x=self.lin(x), weight=edge_weight / (1 + edge_weight.numel()))

    return outcome(lambda: Stack([Counting(), Counting()], ("edge_weight",)), graph())


@trap("record: edge weights given later")
def _() -> Outcome:
    return outcome(
        lambda: Stack([gcn(), gcn()], ("edge_weight",)),
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index),
        then=lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight),
        changes=[lambda model: None],
    )


@trap("record: edge weights given first only")
def _() -> Outcome:
    return outcome(
        lambda: Stack([gcn(), gcn()], ("edge_weight",)),
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight),
        then=lambda model, batch: model(batch.x, batch.edge_index),
        changes=[lambda model: None],
        mode="training",
    )


@trap("record: another edge attribute as weights")
def _() -> Outcome:
    data = graph()
    data.strength = data.edge_weight.flip(0)
    data.edge_strength = data.edge_weight.flip(0)
    return outcome(
        lambda: Stack([gcn(), gcn()], ("edge_weight",)),
        data,
        call=lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight),
        then=lambda model, batch: model(batch.x, batch.edge_index, batch.edge_strength),
        changes=[lambda model: None],
    )


def weighted_by(weigh: Callable[[Any], Tensor], layer: Callable[[], Any]) -> Outcome:
    return outcome(
        lambda: Stack([layer(), layer()], ("edge_weight",)),
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index, weigh(batch)),
    )


@trap("weights: a column of edge_attr, passed to GCN")
def _() -> Outcome:
    return weighted_by(lambda batch: batch.edge_attr[:, 0], gcn)


@trap("weights: a column of edge_attr, passed to GraphConv")
def _() -> Outcome:
    return weighted_by(lambda batch: batch.edge_attr[:, 0], lambda: pyg.GraphConv(C, C))


@trap("weights: from the features, passed to GCN")
def _() -> Outcome:
    return weighted_by(similarity, gcn)


@trap("weights: from the features, passed to GraphConv")
def _() -> Outcome:
    return weighted_by(similarity, lambda: pyg.GraphConv(C, C))


@trap("weights: squared, passed to GCN")
def _() -> Outcome:
    return weighted_by(lambda batch: batch.edge_weight**2, gcn)


@trap("weights: divided by their sum inside the model")
def _() -> Outcome:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([pyg.GraphConv(C, C), pyg.GraphConv(C, C)])

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Any:
            for conv in self.convs:
                x = conv(x, edge_index, edge_weight / edge_weight.sum() * 50).tanh()
            return x

    return outcome(Shares, graph())


def similarity(batch: Any) -> Tensor:
    source, target = batch.edge_index
    return F.cosine_similarity(batch.x[source], batch.x[target]).abs() + 0.1


class OwnWeights(nn.Module):
    """Weighs the edges by the similarity of their ends, outside the layers."""

    def __init__(self, layer: Callable[[], Any]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([layer(), layer(), layer()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for conv in self.convs:
            x = conv(x, edge_index, similarity(Data(x=x, edge_index=edge_index))).tanh()
        return x


@trap("weights: from hidden rows outside the layers, GCN")
def _() -> Outcome:
    return outcome(lambda: OwnWeights(gcn), graph())


@trap("weights: from hidden rows outside the layers, GraphConv")
def _() -> Outcome:
    return outcome(lambda: OwnWeights(lambda: pyg.GraphConv(C, C)), graph())


class EdgeUpdates(nn.Module):
    """Passes new edge features from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.GATConv(C, C, edge_dim=EDGE_CHANNELS) for _ in range(3)])
        self.update = nn.Linear(2 * C + EDGE_CHANNELS, EDGE_CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        source, target = edge_index
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr).tanh()
            edge_attr = self.update(torch.cat([x[source], x[target], edge_attr], dim=1)).tanh()
        return x


@trap("weights: edge features updated between layers")
def _() -> Outcome:
    return outcome(EdgeUpdates, graph())
