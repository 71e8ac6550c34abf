"""Models and uses that were silently wrong, needlessly refused, or refused for the wrong reason."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import (  # type: ignore[import-untyped]
    add_self_loops,
    coalesce,
    degree,
    remove_self_loops,
    to_undirected,
)

import gnnautoscale as gas
from conftest import NUM_RELATIONS, Stack
from support.oracle import Outcome, compare, judged, outcome
from support.traps.registry import C, Net, directed, graph, in_blocks, sage, trap

# State that is set on the first call #################################################################################


@trap("state: mean kept from the first call")
def _() -> Outcome:
    def centred(model: Any, x: Tensor) -> Any:
        if model.mean is None:
            model.mean = x.mean(0).detach()
        return x - model.mean

    return outcome(lambda: Net(centred, mean=None), graph())


@trap("state: mean kept from the first call, in a buffer")
def _() -> Outcome:
    def centred(model: Any, x: Tensor) -> Any:
        if not bool(model.known):
            model.mean.copy_(x.detach().mean(0))
            model.known.fill_(True)
        return x - model.mean

    def make() -> nn.Module:
        model = Net(centred)
        model.register_buffer("mean", torch.zeros(C))
        model.register_buffer("known", torch.tensor(False))
        return model

    return outcome(make, graph())


class ActNorm(nn.Module):
    """Takes its weights from the first rows that it sees in training."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.ones(C))
        self.initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.initialized = True
        return (x + self.shift) * self.scale


@trap("state: ActNorm")
def _() -> Outcome:
    return outcome(lambda: Net(lambda model, x: model.norm(x), norm=ActNorm()), graph())


@trap("state: counter of calls")
def _() -> Outcome:
    def counted(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        return x

    return outcome(lambda: Net(counted, calls=0), graph())


class Tracked(MessagePassing):  # type: ignore[misc]
    """Counts its training steps and keeps a running mean of its input."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(C, C)
        self.mean: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        else:
            x = x - self.mean
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out


@trap("state: buffers that a layer updates in training")
def _() -> Outcome:
    return outcome(lambda: Net(layer=Tracked), graph())


# Relations without edges #############################################################################################


class PerRelation(MessagePassing):  # type: ignore[misc]
    """Propagates once for each relation that has edges."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lins = nn.ModuleList([nn.Linear(C, C) for _ in range(NUM_RELATIONS)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out = x
        for relation, lin in enumerate(self.lins):
            if (edge_type == relation).any():
                out = out + self.propagate(edge_index[:, edge_type == relation], x=lin(x))
        return out


class ConvPerRelation(nn.Module):
    """Calls a layer for each relation that has edges."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([sage() for _ in range(NUM_RELATIONS)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out = x
        for relation, conv in enumerate(self.convs):
            if (edge_type == relation).any():
                out = out + conv(x, edge_index[:, edge_type == relation])
        return out


def rare_relation() -> Data:
    """Relation 1 leads to the first nodes only."""
    data = graph()
    data.edge_type[data.edge_type == 1] = 0
    data.edge_type[(data.edge_index[1] < 5) & (data.edge_type == 0)] = 1
    return data


@trap("relations: layer skips relations without edges")
def _() -> Outcome:
    return outcome(lambda: Stack([PerRelation(), PerRelation()], ("edge_type",)), rare_relation(), in_blocks)


@trap("relations: a conv per relation with edges")
def _() -> Outcome:
    return outcome(lambda: Stack([ConvPerRelation(), ConvPerRelation()], ("edge_type",)), rare_relation(), in_blocks)


# What a layer computed from edges ####################################################################################


class Cheb(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([pyg.ChebConv(C, C, 3), pyg.ChebConv(C, C, 3)])

    def forward(self, x: Tensor, edge_index: Tensor, lambda_max: float = 2.0) -> Any:
        for conv in self.convs:
            x = conv(x, edge_index, lambda_max=lambda_max).tanh()
        return x


@trap("record: lambda_max of ChebConv changes")
def _() -> Outcome:
    return outcome(
        Cheb,
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index, lambda_max=2.0),
        then=lambda model, batch: model(batch.x, batch.edge_index, lambda_max=1.3),
        changes=[lambda model: None],
    )


class Annealed(MessagePassing):  # type: ignore[misc]
    """Weighs edges by a power of their weight, which is changed during training."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.power = nn.Linear(C, C), 1.0

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x), weight=edge_weight**self.power)
        return out

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.unsqueeze(-1)


@trap("record: annealed attribute of a layer")
def _() -> Outcome:
    def anneal(model: Any) -> None:
        for layer in model.layers:
            layer.power *= 0.5

    make = lambda: Stack([Annealed(), Annealed()], ("edge_weight",))  # noqa: E731
    return outcome(make, graph(), changes=[anneal, anneal], mode="training")


@trap("record: double precision, and the weights left out")
def _() -> Outcome:
    data = graph()
    data.x, data.edge_weight = data.x.float(), data.edge_weight.float()
    return outcome(
        lambda: pyg.GCN(C, C, 3, C),
        data,
        call=lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight),
        then=lambda model, batch: model(batch.x.double(), batch.edge_index),
        changes=[lambda model: model.double()],
        dtype=None,
        tolerance=1e-5,
    )


# Layers and flags that change ########################################################################################


@trap("layers: last layer replaced")
def _() -> Outcome:
    def replace(model: Any) -> None:
        model.convs[-1] = pyg.GCNConv(C, C).double()

    return outcome(lambda: Net(layer=lambda: pyg.GCNConv(C, C)), graph(), changes=[replace], mode="training")


@trap("layers: first layer replaced by another type")
def _() -> Outcome:
    def replace(model: Any) -> None:
        model.convs[0] = pyg.GATConv(C, C).double()

    return outcome(Net, graph(), changes=[replace])


class Centring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.center = sage(), sage(), False

    def forward(self, x: Tensor, edge_index: Tensor, center: bool = False) -> Any:
        x = self.first(x, edge_index).tanh()
        if center or self.center:
            x = x - x.mean(0)
        return self.second(x, edge_index)


@trap("flags: flag passed in a later call")
def _() -> Outcome:
    return outcome(
        Centring,
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index),
        then=lambda model, batch: model(batch.x, batch.edge_index, center=True),
        changes=[lambda model: None],
    )


@trap("flags: attribute set later")
def _() -> Outcome:
    return outcome(Centring, graph(), changes=[lambda model: setattr(model, "center", True)])


@trap("flags: Polynormer switches to global attention")
def _() -> Outcome:
    make = partial(pyg.Polynormer, C, C, C, local_layers=2, global_layers=1, in_dropout=0.0, dropout=0.0)
    return outcome(
        make,
        graph(),
        call=lambda model, data: model(data.x, data.edge_index, torch.zeros(data.num_nodes, dtype=torch.long)),
        changes=[lambda model: setattr(model, "_global", True)],
    )


# Training mode #######################################################################################################


@trap("training: mean over all nodes in training")
def _() -> Outcome:
    return outcome(lambda: Net(lambda model, x: x - x.mean(0) if model.training else x), graph())


@trap("training: mean over all nodes in training, at the end")
def _() -> Outcome:
    return outcome(lambda: Net(at_end=lambda model, x: x - x.mean(0) if model.training else x), graph())


class SideBranch(nn.Module):
    """A layer that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.second = sage(), sage(), sage()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index).tanh()
        if self.training:
            h = h + self.side(x, edge_index)
        return self.second(h, edge_index)


@trap("training: branch that is joined in training only")
def _() -> Outcome:
    return outcome(SideBranch, graph())


class ComputedButJoinedInTraining(SideBranch):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h, side = self.first(x, edge_index).tanh(), self.side(x, edge_index)
        return self.second(h + side if self.training else h, edge_index)


@trap("training: branch that is computed always and joined in training")
def _() -> Outcome:
    return outcome(ComputedButJoinedInTraining, graph())


@trap("training: InstanceNorm with running statistics")
def _() -> Outcome:
    norm = partial(pyg.InstanceNorm, C, track_running_stats=True)
    return outcome(lambda: Net(lambda model, x: model.norm(x), norm=norm()), graph())


class NormedSubset(nn.Module):
    """Batch norm over some of the nodes, as a module or as a function."""

    def __init__(self, functional: bool, subset: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.functional, self.subset = sage(), nn.BatchNorm1d(C), functional, subset

    def forward(self, x: Tensor, edge_index: Tensor, train_mask: Tensor) -> Any:
        h = self.conv(x, edge_index)
        return self.normed(h, train_mask if self.subset else torch.ones_like(train_mask))

    def normed(self, h: Tensor, chosen: Tensor) -> Tensor:
        norm = self.norm
        if self.functional:
            rows = F.batch_norm(h[chosen], norm.running_mean, norm.running_var, training=self.training)
        else:
            rows = norm(h[chosen])
        return h.masked_scatter(chosen.unsqueeze(-1), rows)


@trap("training: batch norm over some rows")
def _() -> Outcome:
    return by_own_rows(functional=False, subset=True)


@trap("training: functional batch norm")
def _() -> Outcome:
    return by_own_rows(functional=True, subset=False)


@trap("training: functional batch norm over some rows")
def _() -> Outcome:
    return by_own_rows(functional=True, subset=True)


def by_own_rows(*, functional: bool, subset: bool) -> Outcome:
    """In training a batch norm takes the statistics of the batch's own rows, not of the halo's."""

    def check() -> None:
        data = graph()
        model = NormedSubset(functional, subset).double()
        plain = model.conv(data.x, data.edge_index).detach()
        gas.autoscale(model, data).train()
        for batch in gas.HaloLoader(data, 4, partition="random"):
            own = batch.n_id[: batch.batch_size]
            chosen = data.train_mask[own] if subset else torch.ones(batch.batch_size, dtype=torch.bool)
            rows = F.batch_norm(plain[own][chosen], None, None, training=True)
            compare(model(batch), plain[own].masked_scatter(chosen.unsqueeze(-1), rows))

    make = lambda: NormedSubset(functional, subset)  # noqa: E731
    return Outcome.worst([outcome(make, graph(), mode=("evaluation", "one part")), judged(check)])


# Other graphs and data ###############################################################################################


class Undirected(nn.Module):
    """Makes its edges undirected by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([sage(), sage()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        edge_index = to_undirected(edge_index, num_nodes=x.size(0))
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@trap("graphs: planned on a symmetric graph, evaluated on a directed one")
def _() -> Outcome:
    def check() -> None:
        data, other = graph(), directed()
        model = Undirected().double()
        with torch.no_grad():
            expected, there = model(data.x, data.edge_index), model(other.x, other.edge_index)
        gas.autoscale(model, data)
        compare(gas.infer(model, gas.HaloLoader(data, 4, partition="random")), expected)
        compare(gas.infer(model, gas.HaloLoader(other, 4, partition="random")), there, "the directed graph")

    return judged(check)


def with_new_data(change: Callable[[Data], object]) -> Outcome:
    """Whatever of the data is used, it must be all old or all new, in training as in evaluation."""

    def check(first: type[nn.Module], options: dict[str, Any]) -> None:
        data = graph()
        model = Stack([first(C, C), pyg.GCNConv(C, C)], ("edge_weight",)).double()
        old = model(data.x.clone(), data.edge_index, data.edge_weight.clone()).detach()
        loader = gas.HaloLoader(data, 6, partition="random", **options)
        gas.autoscale(model, data)
        compare(gas.infer(model, loader), old)
        change(data)
        trained = torch.zeros_like(old)
        for _ in range(3):
            for batch in loader:
                trained[batch.n_id[: batch.batch_size]] = model(batch).detach()
        evaluated = gas.infer(model, loader)
        new = gas.detach(model)(data.x, data.edge_index, data.edge_weight).detach()
        compare(trained, evaluated, "training and evaluation")
        if not torch.allclose(trained, old):
            compare(trained, new, "the new data")

    pairs: list[tuple[type[nn.Module], dict[str, Any]]] = [
        (pyg.GraphConv, {}),
        (pyg.GCNConv, {"batch_size": 2, "shuffle": True}),
        (pyg.GraphConv, {"keep": False}),
    ]
    return Outcome.worst([judged(partial(check, first, options)) for first, options in pairs])


@trap("data: features replaced after the loader was made")
def _() -> Outcome:
    return with_new_data(lambda data: setattr(data, "x", data.x.flip(0) * 2))


@trap("data: features written to after the loader was made")
def _() -> Outcome:
    return with_new_data(lambda data: data.x.mul_(2))


@trap("data: edge weights replaced after the loader was made")
def _() -> Outcome:
    return with_new_data(lambda data: setattr(data, "edge_weight", data.edge_weight.square()))


@trap("data: edge weights written to after the loader was made")
def _() -> Outcome:
    return with_new_data(lambda data: data.edge_weight.pow_(2))


@trap("data: edges replaced after the loader was made")
def _() -> Outcome:
    return with_new_data(lambda data: setattr(data, "edge_index", (data.edge_index + 1) % data.num_nodes))


# Terms that a small graph does not trigger ###########################################################################


def threshold(count: int) -> Outcome:
    make = lambda: Net(lambda model, x: x - x.mean(0) if x.size(0) > count else x)  # noqa: E731
    return outcome(make, graph(max(40, 3 * count), max(70, 6 * count)))


@trap("scale: mean over all nodes above 13 nodes")
def _() -> Outcome:
    return threshold(13)


@trap("scale: mean over all nodes above 50 nodes")
def _() -> Outcome:
    return threshold(50)


@trap("scale: mean over all nodes for features above 20")
def _() -> Outcome:
    data = graph()
    data.x[:, 1] = data.x[:, 1].abs() * 100
    return outcome(lambda: Net(first=lambda model, x: x - x.mean(0) if bool(x.abs().max() > 20) else x), data)


@trap("scale: small columns next to one of 1e4")
def _() -> Outcome:
    def mixed(model: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1] * 1e4, x[:, 1:] - 0.1 * x[:, 1:].mean(0)], dim=1)

    return outcome(lambda: Net(at_end=mixed), graph())


@trap("scale: small features next to a column of 1e4")
def _() -> Outcome:
    data = graph()
    data.x[:, 0] *= 1e4
    return outcome(lambda: Net(at_end=lambda model, x: x - 1e-4 * x.mean(0)), data)


# Types ###############################################################################################################


@trap("types: float32 inference after training under autocast")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        data.x = data.x.float()
        model = pyg.GraphSAGE(C, 16, 3, C)
        loader = gas.HaloLoader(data, 4, partition="random")
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                model(batch.x, batch.edge_index).float().square().sum().backward()
        compare(gas.infer(model, loader), expected, tolerance=1e-5)

    return judged(check)


# Needless refusals ###################################################################################################


def on_random_graphs(layer: Callable[[], Any], *arguments: str) -> Outcome:
    make = lambda: Stack([layer(), layer()], arguments)  # noqa: E731
    return Outcome.worst([outcome(make, graph(seed=seed), mode="evaluation") for seed in range(4)])


@trap("sizes: RGCNConv on random graphs", exact=True)
def _() -> Outcome:
    return on_random_graphs(lambda: pyg.RGCNConv(C, C, NUM_RELATIONS), "edge_type")


def positive() -> Data:
    data = graph()
    data.x = data.x.abs()
    return data


@trap("features: square root of the features", exact=True)
def _() -> Outcome:
    return outcome(lambda: Net(first=lambda model, x: x.sqrt()), positive())


class CategoryColumn(nn.Module):
    """The first column is a category, stored as a floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convs = nn.Embedding(6, C), nn.ModuleList([sage(), sage()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.embedding(x[:, 0].long()) + x
        for conv in self.convs:
            h = conv(h, edge_index).tanh()
        return h


@trap("features: embedding of a float column", exact=True)
def _() -> Outcome:
    data = graph()
    data.x[:, 0] = torch.arange(data.num_nodes) % 6
    return outcome(CategoryColumn, data)


# Raw errors ##########################################################################################################


class SparseInput(nn.Module):
    """Takes its features as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.convs = nn.Parameter(torch.randn(C, C)), nn.ModuleList([sage(), sage()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = torch.sparse.mm(x, self.weight)
        for conv in self.convs:
            h = conv(h, edge_index).tanh()
        return h


@trap("input: sparse features, COO")
def _() -> Outcome:
    data = graph()
    data.x = data.x.relu().to_sparse()
    return outcome(SparseInput, data)


@trap("input: sparse features, CSR")
def _() -> Outcome:
    data = graph()
    data.x = data.x.relu().to_sparse_csr()
    return outcome(SparseInput, data)


class TwoEdgeSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = sage(), sage(), sage()

    def forward(self, x: Tensor, edge_index: Tensor, far_edge_index: Tensor) -> Any:
        x = self.first(x, edge_index).tanh() + self.second(x, far_edge_index).tanh()
        return self.third(x, edge_index)


def two_edge_sets() -> Data:
    data = graph()
    generator = torch.Generator().manual_seed(3)
    data.far_edge_index = torch.randint(data.num_nodes, (2, 55), generator=generator)
    return data


@trap("input: second edge set in the data that the model does not use")
def _() -> Outcome:
    return outcome(Net, two_edge_sets())


@trap("input: second edge set that the model uses")
def _() -> Outcome:
    return outcome(TwoEdgeSets, two_edge_sets())


class TakesNumNodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = sage(), sage()

    def forward(self, x: Tensor, edge_index: Tensor, num_nodes: int) -> Any:
        looped, _ = add_self_loops(edge_index, num_nodes=num_nodes)
        return self.second(self.first(x, edge_index).tanh(), looped)


@trap("input: num_nodes as an argument", exact=True)
def _() -> Outcome:
    data = graph()
    call = lambda model, batch: model(batch.x, batch.edge_index, batch.num_nodes)  # noqa: E731
    return outcome(TakesNumNodes, data, call=call)


@trap("input: pickled batch")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        loader = gas.HaloLoader(data, 4, partition="random")
        gas.infer(model, loader)
        for batch in loader:
            own = batch.n_id[: batch.batch_size]
            compare(model(pickle.loads(pickle.dumps(batch))).detach(), expected[own])  # noqa: S301

    return judged(check)


@trap("input: torch.func.grad")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()

        def loss(weights: dict[str, Tensor], *arguments: Any) -> Tensor:
            out: Tensor = torch.func.functional_call(model, weights, arguments)
            return out.square().sum()

        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        expected = torch.func.grad(loss)(weights, data.x, data.edge_index)
        gas.autoscale(model, data)
        batch = next(iter(gas.HaloLoader(data, partition=torch.zeros(40, dtype=torch.long))))
        compare(torch.func.grad(lambda weights: loss(weights, batch.x, batch.edge_index))(weights), expected)
        compare(torch.func.grad(loss)(weights, batch.x, batch.edge_index), expected)

    return judged(check)


class Properties(Data):  # type: ignore[misc]
    """Computes some of its attributes."""

    @property
    def edge_weight(self) -> Any:
        return 1 / (1 + self.edge_attr[:, 0])

    @property
    def num_classes(self) -> int:
        return C

    @property
    def in_degree(self) -> Any:
        return degree(self.edge_index[1], self.num_nodes, self.x.dtype)


def with_properties() -> Properties:
    data = graph()
    return Properties(**{name: value for name, value in data if name != "edge_weight"})


@trap("input: Data with properties")
def _() -> Outcome:
    return outcome(lambda: Net(layer=lambda: pyg.GCNConv(C, C)), with_properties())


@trap("input: Data with properties that the model uses")
def _() -> Outcome:
    call = lambda model, batch: model(batch.x, batch.edge_index, batch.edge_weight)  # noqa: E731
    return outcome(lambda: pyg.GCN(C, C, 2), with_properties(), call=call)


class Heat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = partial(pyg.HEATConv, C, C, 2, NUM_RELATIONS, 4, 3, 4)
        self.convs = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor, edge_index: Tensor, node_type: Tensor, edge_type: Tensor, edge_attr: Tensor) -> Any:
        for conv in self.convs:
            x = conv(x, edge_index, node_type, edge_type, edge_attr).tanh()
        return x


@trap("input: HEATConv")
def _() -> Outcome:
    data = graph()
    data.node_type = torch.arange(data.num_nodes) % 2
    return outcome(Heat, data)


# Messages ############################################################################################################


@trap("message: GPSConv", says="attention")
def _() -> Outcome:
    layer = lambda: pyg.GPSConv(C, sage(), heads=2, norm=None, dropout=0.0)  # noqa: E731
    return outcome(lambda: Net(layer=layer), graph(), mode="evaluation")


class ChangesEdges(nn.Module):
    """Changes the edges before its layers."""

    def __init__(self, change: Callable[[Tensor, int], Tensor], layer: Callable[[], Any] = sage) -> None:
        super().__init__()
        self.convs, self.change = nn.ModuleList([layer(), layer()]), change

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        edge_index = self.change(edge_index, x.size(0))
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


BEFORE_A_LAYER = r"edge.*(before|outside).*(loader|data)"


def changing(name: str, change: Callable[[Tensor, int], Tensor], layer: Callable[[], Any] = sage) -> None:
    @trap(f"message: {name} before a layer", says=BEFORE_A_LAYER)
    def _() -> Outcome:
        data = directed()
        data.edge_index = torch.cat([data.edge_index, torch.arange(0, 20, 2).repeat(2, 1)], dim=1)
        data.update(dict.fromkeys(("edge_weight", "edge_attr", "edge_type")))
        return outcome(lambda: ChangesEdges(change, layer), data, mode="evaluation")


def gcn() -> Any:
    return pyg.GCNConv(C, C)


changing("remove_self_loops", lambda edges, count: remove_self_loops(edges)[0])
changing("remove_self_loops, GCN", lambda edges, count: remove_self_loops(edges)[0], gcn)
changing("coalesce", lambda edges, count: coalesce(edges, num_nodes=count))
changing("coalesce, GCN", lambda edges, count: coalesce(edges, num_nodes=count), gcn)
changing("edge_index[[1, 0]]", lambda edges, count: edges[[1, 0]])
changing("edge_index[[1, 0]], GCN", lambda edges, count: edges[[1, 0]], gcn)
changing("view", lambda edges, count: edges.view(2, -1))
changing("view, GCN", lambda edges, count: edges.view(2, -1), gcn)


class DegreeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convs = nn.Embedding(20, C), nn.ModuleList([sage(), sage()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = x + self.embedding(degree(edge_index[1], x.size(0), torch.long).clamp(max=19))
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@trap("message: degree embedding", says=r"edges.*(outside|before).*data")
def _() -> Outcome:
    return outcome(DegreeEmbedding, graph(), mode="evaluation")


@trap("message: dropout in evaluation", says="random")
def _() -> Outcome:
    return outcome(lambda: Net(lambda model, x: F.dropout(x, 0.5, training=True)), graph(), mode="evaluation")


@trap("message: model(batch) that passes the weights too", says=r"^(?!.*edge_dropout)")
def _() -> Outcome:
    return outcome(
        lambda: pyg.GCN(C, C, 2, C),
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index),
        then=lambda model, batch: model(batch.x, batch.edge_index, edge_weight=batch.edge_weight),
        changes=[lambda model: None],
    )


class AnyArguments(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@trap("message: forward(*args, **kwargs) called with a batch", says=r"batch\.x, batch\.edge_index|call=")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = AnyArguments().double()
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        compare(gas.infer(model, gas.HaloLoader(data, 4, partition="random")), expected)

    return judged(check)


class TakesBatch(Net):
    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return super().forward(batch.x, batch.edge_index)


@trap("message: forward(batch) on a PyG Batch", says="^(?!.*unchanged)")
def _() -> Outcome:
    data = Batch.from_data_list([graph(20, 30, seed) for seed in range(3)])
    return outcome(TakesBatch, data, call=lambda model, batch: model(batch))


@trap("message: infer takes the data", exact=True)
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        compare(gas.infer(model, data), expected)

    return judged(check)


@trap("message: LightGCN", says="n_id")
def _() -> Outcome:
    return outcome(LightEmbeddings, graph(), mode="evaluation")


class LightEmbeddings(nn.Module):
    """The embeddings of a LightGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.light = pyg.LightGCN(40, C, 2)

    def forward(self, edge_index: Tensor) -> Any:
        return self.light.get_embedding(edge_index)


class WholeTable(nn.Module):
    """Has a row for each node, and uses them all."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.embedding, self.convs = nn.Embedding(num_nodes, C), nn.ModuleList([sage(), sage()])

    def forward(self, edge_index: Tensor) -> Any:
        x = self.embedding.weight
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@trap("message: Embedding.weight", says="n_id")
def _() -> Outcome:
    return outcome(lambda: WholeTable(40), graph(), mode="evaluation")


class TableWithFeatures(WholeTable):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:  # type: ignore[override]
        x = x + self.embedding.weight
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@trap("message: Embedding.weight added to the features", says="n_id")
def _() -> Outcome:
    return outcome(lambda: TableWithFeatures(40), graph(), mode="evaluation")


# Refused, but right if done right ####################################################################################


@trap("worth it: APPNP with dropout")
def _() -> Outcome:
    return outcome(lambda: Net(layer=lambda: pyg.APPNP(3, 0.1, dropout=0.4)), graph())


@trap("worth it: LayerNorm over the graph")
def _() -> Outcome:
    return outcome(lambda: Net(lambda model, x: model.norm(x), norm=pyg.LayerNorm(C)), graph())


@trap("worth it: GraphNorm")
def _() -> Outcome:
    return outcome(lambda: Net(lambda model, x: model.norm(x), norm=pyg.GraphNorm(C)), graph())
