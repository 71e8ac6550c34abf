"""Arguments, outputs, calls, types, features and graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]
from torch_geometric.utils import scatter  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack
from support.oracle import Outcome, compare, judged, outcome
from support.traps.known import gcn, positive
from support.traps.registry import C, Net, centred, directed, graph, sage, trap

# Arguments and outputs ###############################################################################################


class Out(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Outputs:
    logits: Tensor
    hidden: Tensor


def returning(name: str, make: Callable[[Tensor], Any], *, exact: bool = False) -> None:
    @trap(f"outputs: {name}", exact=exact)
    def _() -> Outcome:
        return outcome(lambda: Net(at_end=lambda model, x: make(x)), graph())


returning("named tuple", lambda x: Out(x, x.tanh()), exact=True)
returning("data class", lambda x: Outputs(x, x.tanh()))
returning("nested", lambda x: (x, {"all": [x, x.tanh()]}), exact=True)
returning("predicted classes", lambda x: x.argmax(-1))
returning("a scalar", lambda x: x.mean())
returning("rows and a scalar", lambda x: (x, x.square().mean()))
returning("rows of some nodes", lambda x: x[x[:, 0] > 0])
returning("rows along the second dimension", lambda x: x.T)
returning("rows of three dimensions", lambda x: x.view(-1, 2, C // 2), exact=True)
returning("None next to rows", lambda x: (x, None))
returning("text next to rows", lambda x: (x, "text"))
returning("sparse", lambda x: x.relu().to_sparse())
returning("log_softmax over nodes", lambda x: x.log_softmax(0))


@trap("outputs: hidden rows of all layers")
def _() -> Outcome:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage(), sage(), sage()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            rows = [x]
            for conv in self.convs:
                rows.append(conv(rows[-1], edge_index).tanh())
            return rows

    return outcome(Layers, graph())


@trap("outputs: attention weights")
def _() -> Outcome:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([pyg.GATConv(C, C), pyg.GATConv(C, C)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x, weights = self.convs[0](x, edge_index, return_attention_weights=True)
            return self.convs[1](x.tanh(), edge_index), weights[1]

    return outcome(Attention, graph())


@trap("outputs: gates from attention weights of an inner layer")
def _() -> Outcome:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = pyg.GATConv(C, C, add_self_loops=False), pyg.GraphConv(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x, (edges, weights) = self.first(x, edge_index, return_attention_weights=True)
            return self.second(x.tanh(), edges, weights.squeeze(-1))

    return outcome(Gated, graph())


def node_input(name: str, columns: str, values: Callable[[], Tensor], *, exact: bool = False) -> None:
    """A further tensor with a row for each node."""

    class Takes(Net):
        def forward(self, x: Tensor, edge_index: Tensor, given: Tensor) -> Any:  # type: ignore[override]
            given = given.to(x.dtype).view(x.size(0), -1)
            return super().forward(x + given.mean(1, keepdim=True), edge_index)

    @trap(f"arguments: {name}", exact=exact)
    def _() -> Outcome:
        data = graph()
        data[columns] = values()
        return outcome(Takes, data, call=lambda model, batch: model(batch.x, batch.edge_index, batch[columns]))


node_input("integers", "y", lambda: torch.arange(40) % 5, exact=True)
node_input("booleans", "is_paper", lambda: torch.arange(40) % 3 == 0, exact=True)
node_input("three dimensions", "series", lambda: torch.rand(40, 4, 2, dtype=torch.double), exact=True)


@trap("arguments: embedding by n_id", exact=True)
def _() -> Outcome:
    return outcome(ById, identified(), call=lambda model, batch: model(batch.x, batch.edge_index, batch.n_id))


class ById(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, C)
        self.places: Tensor
        self.register_buffer("places", torch.rand(40, C))

    def forward(self, x: Tensor, edge_index: Tensor, n_id: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x + self.embedding(n_id) + self.places[n_id], edge_index)


def identified() -> Data:
    """A graph that has its own n_id, as a batch does."""
    data = graph()
    data.n_id = torch.arange(40)
    return data


@trap("arguments: buffer with a row for each node")
def _() -> Outcome:
    class Places(Net):
        def __init__(self) -> None:
            super().__init__()
            self.places: Tensor
            self.register_buffer("places", torch.rand(40, C))

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return super().forward(x + self.places, edge_index)

    return outcome(Places, graph(), mode="evaluation")


@trap("arguments: edges kept in the model")
def _() -> Outcome:
    class Keeps(Net):
        def __init__(self, edge_index: Tensor) -> None:
            super().__init__()
            self.edges: Tensor
            self.register_buffer("edges", edge_index)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return super().forward(x, self.edges)

    data = graph()
    return outcome(lambda: Keeps(data.edge_index), data, mode="evaluation")


@trap("arguments: number of nodes of the whole graph")
def _() -> Outcome:
    class Sized(Net):
        def forward(self, x: Tensor, edge_index: Tensor, count: int) -> Any:  # type: ignore[override]
            return super().forward(x, edge_index) * math.log(count)

    return outcome(Sized, graph(), call=lambda model, batch: model(batch.x, batch.edge_index, 40))


@trap("arguments: size of propagate")
def _() -> Outcome:
    class Sizes(MessagePassing):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(aggr="mean")
            self.lin = nn.Linear(C, C)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.propagate(edge_index, x=self.lin(x), size=(x.size(0), x.size(0)))

    return outcome(lambda: Net(layer=Sizes), graph())


@trap("arguments: bipartite pair of the same rows")
def _() -> Outcome:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage(), sage()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            for conv in self.convs:
                x = conv((x, x.relu()), edge_index).tanh()
            return x

    return outcome(Pairs, graph())


@trap("arguments: rows along the second dimension")
def _() -> Outcome:
    class Temporal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([gcn(), gcn()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x = torch.stack([x, x.flip(1), 2 * x])  # [3, nodes, channels]
            for conv in self.convs:
                x = conv(x, edge_index).tanh()
            return x.transpose(0, 1)

    return outcome(Temporal, graph())


@trap("arguments: input is written to")
def _() -> Outcome:
    class Writes(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            x.mul_(2).relu_()
            return super().forward(x, edge_index)

    return outcome(Writes, graph(), mode="evaluation")


@trap("arguments: other features in a later call")
def _() -> Outcome:
    return outcome(
        Net,
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index),
        then=lambda model, batch: model(batch.x.flip(1) * 3, batch.edge_index),
        changes=[lambda model: None],
    )


@trap("arguments: a tensor instead of None in a later call")
def _() -> Outcome:
    class Optional(Net):
        def forward(self, x: Tensor, edge_index: Tensor, extra: Tensor | None = None) -> Any:
            return super().forward(x if extra is None else x - extra.mean(0), edge_index)

    return outcome(
        Optional,
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index),
        then=lambda model, batch: model(batch.x, batch.edge_index, batch.x),
        changes=[lambda model: None],
    )


@trap("arguments: text that selects a branch")
def _() -> Outcome:
    class Tasks(Net):
        def forward(self, x: Tensor, edge_index: Tensor, task: str = "node") -> Any:
            x = super().forward(x, edge_index)
            return x if task == "node" else centred(x)

    return outcome(
        Tasks,
        graph(),
        call=lambda model, batch: model(batch.x, batch.edge_index, "node"),
        then=lambda model, batch: model(batch.x, batch.edge_index, "graph"),
        changes=[lambda model: None],
    )


@trap("arguments: number that scales a mean over all nodes")
def _() -> Outcome:
    class Mixed(Net):
        def forward(self, x: Tensor, edge_index: Tensor, mix: Any = 0.0) -> Any:
            x = super().forward(x, edge_index)
            return x + mix * x.mean(0)

    def check(value: Any) -> Outcome:
        return outcome(
            Mixed,
            graph(),
            call=lambda model, batch: model(batch.x, batch.edge_index, value * 0),
            then=lambda model, batch: model(batch.x, batch.edge_index, value),
            changes=[lambda model: None],
        )

    return Outcome.worst([check(0.4), check(torch.tensor(0.4, dtype=torch.double))])


@trap("calls: another method than forward")
def _() -> Outcome:
    class Encoder(Net):
        def encode(self, x: Tensor, edge_index: Tensor) -> Any:
            return super().forward(x, edge_index)

    return outcome(
        Encoder, graph(), call=lambda model, batch: model.encode(batch.x, batch.edge_index), mode="evaluation"
    )


@trap("calls: twice for one result")
def _() -> Outcome:
    def twice(model: nn.Module, batch: Any) -> Any:
        return model(batch.x, batch.edge_index) + model(batch.x.flip(1), batch.edge_index)

    return outcome(Net, graph(), call=twice)


@trap("calls: on its own output")
def _() -> Outcome:
    return outcome(Net, graph(), call=lambda model, batch: model(model(batch.x, batch.edge_index), batch.edge_index))


@trap("calls: two models that share layers")
def _() -> Outcome:
    def check() -> None:
        data, shared = graph(), sage().double()
        first, second = (Stack([shared, sage().double()]) for _ in range(2))
        expected = [model(data.x, data.edge_index).detach() for model in (first, second)]
        loader = gas.HaloLoader(data, 4, partition="random")
        gas.autoscale(first, data)
        compare(gas.infer(first, loader), expected[0])
        compare(second(data.x, data.edge_index).detach(), expected[1])

    return judged(check)


@trap("calls: a copy of an autoscaled model")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = Net().double()
        loader = gas.HaloLoader(data, 4, partition="random")
        expected = model(data.x, data.edge_index).detach()
        gas.infer(gas.autoscale(model, data), loader)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for weight in copied.parameters():
                weight.mul_(2)
        compare(gas.infer(model, loader), expected, "the original")
        got = gas.infer(copied, loader)
        compare(got, gas.detach(copied)(data.x, data.edge_index).detach(), "the copy")

    return judged(check)


# Types ###############################################################################################################


def converted(first: torch.dtype, second: torch.dtype, tolerance: float) -> Outcome:
    """Convert a model after its first calls; its features follow."""
    data = graph()

    def cast(dtype: torch.dtype) -> Callable[[nn.Module, Any], Any]:
        return lambda model, batch: model(batch.x.to(dtype), batch.edge_index)

    return outcome(
        lambda: pyg.GraphSAGE(C, C, 3, C),
        data,
        call=cast(first),
        then=cast(second),
        changes=[lambda model: model.to(second)],
        dtype=first,
        tolerance=tolerance,
    )


@trap("types: float32, then double", exact=True)
def _() -> Outcome:
    return converted(torch.float32, torch.double, 1e-5)


@trap("types: double, then float32", exact=True)
def _() -> Outcome:
    return converted(torch.double, torch.float32, 1e-5)


@trap("types: bfloat16, then float32", exact=True)
def _() -> Outcome:
    def check() -> None:
        data = graph()
        model = pyg.GraphSAGE(C, C, 3, C)
        loader = gas.HaloLoader(data, 4, partition="random")
        gas.autoscale(model.bfloat16(), data)
        gas.infer(model, loader, call=lambda model, batch: model(batch.x.bfloat16(), batch.edge_index))
        got = gas.infer(model.float(), loader, call=lambda model, batch: model(batch.x.float(), batch.edge_index))
        compare(got, gas.detach(model)(data.x.float(), data.edge_index).detach(), tolerance=1e-5)

    return judged(check)


@trap("types: training under autocast after float32 inference")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        data.x = data.x.float()
        model = pyg.GraphSAGE(C, C, 3, C)
        loader = gas.HaloLoader(data, 4, partition="random")
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        gas.infer(model, loader)
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                model(batch.x, batch.edge_index)
        compare(gas.infer(model, loader), expected, tolerance=1e-5)
        compare(gas.predict(model, loader, torch.arange(40)), expected, "predict", tolerance=1e-5)

    return judged(check)


@trap("types: predict after training under autocast")
def _() -> Outcome:
    def check() -> None:
        data = graph()
        data.x = data.x.float()
        model = pyg.GraphSAGE(C, C, 3, C)
        loader = gas.HaloLoader(data, 4, partition="random")
        expected = model(data.x, data.edge_index).detach()
        gas.autoscale(model, data)
        with torch.autocast("cpu", torch.bfloat16):
            for batch in loader:
                model(batch.x, batch.edge_index)
        gas.refresh(model, loader)
        compare(gas.predict(model, loader, torch.arange(40)), expected, tolerance=1e-5)

    return judged(check)


@trap("types: a layer of lower precision inside")
def _() -> Outcome:
    step = lambda model, x: model.lin(x.float()).to(x.dtype)  # noqa: E731

    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__(step, lin=nn.Linear(C, C))

        def double(self) -> Mixed:
            return self

        def to(self, *args: Any, **kwargs: Any) -> Mixed:
            super().to(*args, **kwargs)
            self.lin.float()
            return self

    return outcome(Mixed, graph(), tolerance=1e-5)


# Features and graphs #################################################################################################


def features(name: str, data: Callable[[], Data], step: Callable[[Any, Tensor], Tensor], **state: Any) -> None:
    @trap(f"features: {name}", exact=True)
    def _() -> Outcome:
        return outcome(lambda: Net(first=step, **copy.deepcopy(state)), data())


def probabilities() -> Data:
    data = graph()
    data.x = data.x.softmax(-1)
    return data


def coded(dtype: torch.dtype) -> Data:
    data = graph()
    data.x = (torch.arange(40 * C).view(40, C) * 7 % 11).to(dtype)
    return data


features("logit of probabilities", probabilities, lambda model, x: x.logit())
features(
    "all columns embedded", lambda: coded(torch.long), lambda model, x: model.table(x).sum(1), table=nn.Embedding(11, C)
)
features(
    "all float columns embedded",
    lambda: coded(torch.double),
    lambda model, x: model.table(x.long()).sum(1),
    table=nn.Embedding(11, C),
)
features(
    "one-hot of a float column",
    lambda: coded(torch.double),
    lambda model, x: x + model.lin(F.one_hot(x[:, 1].long(), 11).to(x.dtype)),
    lin=nn.Linear(11, C),
)
features("bit patterns", lambda: coded(torch.int16), lambda model, x: (x.long() & 3).double())


def checked(model: Any, x: Tensor) -> Tensor:
    if not bool((x >= 0).all()):
        raise ValueError("counts must not be negative")
    return x.sqrt()


features("checked to be positive", positive, checked)


@trap("graphs: node types with a linear map each", exact=True)
def _() -> Outcome:
    class Typed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lins = nn.ModuleList([nn.Linear(C, C) for _ in range(3)])

        def forward(self, x: Tensor, edge_index: Tensor, node_type: Tensor) -> Any:  # type: ignore[override]
            out = torch.zeros_like(x)
            for number, lin in enumerate(self.lins):
                chosen = node_type == number
                if chosen.any():
                    out = out.index_put((chosen.nonzero().squeeze(-1),), lin(x[chosen]))
            return super().forward(out, edge_index)

    data = graph()
    data.node_type = torch.arange(40) // 35
    return outcome(Typed, data)


@trap("graphs: planned on one graph, evaluated on one without edge weights")
def _() -> Outcome:
    def check() -> None:
        data, other = graph(), directed()
        other.edge_weight = None
        model = Stack([gcn(), gcn()], ("edge_weight",)).double()
        there = model(other.x, other.edge_index).detach()
        gas.infer(gas.autoscale(model, data), gas.HaloLoader(data, 4, partition="random"))
        compare(gas.infer(model, gas.HaloLoader(other, 4, partition="random")), there)

    return judged(check)


def elsewhere(make: Callable[[], nn.Module], data: Data, other: Data, arguments: Sequence[str] = ()) -> Outcome:
    """Plan on one graph, and evaluate on another."""

    def check() -> None:
        model = make().double().eval()
        there = model(other.x, other.edge_index, *(other[name] for name in arguments)).detach()
        gas.infer(gas.autoscale(model, data), gas.HaloLoader(data, 4, partition="random"))
        call = lambda model, batch: model(batch.x, batch.edge_index, *(batch[name] for name in arguments))  # noqa: E731
        compare(gas.infer(model, gas.HaloLoader(other, 4, partition="random"), call=call), there)

    return judged(check)


@trap("graphs: evaluated on a larger graph, with a mean above its size")
def _() -> Outcome:
    make = lambda: Net(lambda model, x: centred(x) if x.size(0) > 60 else x)  # noqa: E731
    return elsewhere(make, graph(), graph(300, 500))


@trap("graphs: evaluated on a graph with larger features")
def _() -> Outcome:
    other = graph(seed=1)
    other.x *= 100
    return elsewhere(lambda: Net(first=lambda model, x: centred(x) if float(x.max()) > 50 else x), graph(), other)


@trap("graphs: evaluated on a directed graph, messages against the edges")
def _() -> Outcome:
    return elsewhere(lambda: Net(layer=lambda: pyg.SAGEConv(C, C, flow="target_to_source")), graph(), directed())


@trap("graphs: evaluated on a directed graph, DirGNN")
def _() -> Outcome:
    return elsewhere(lambda: Net(layer=lambda: pyg.DirGNNConv(sage())), graph(), directed())


@trap("graphs: Batch of several graphs", exact=True)
def _() -> Outcome:
    data = Batch.from_data_list([graph(15, 20, seed) for seed in range(4)])
    return outcome(Net, data, call=lambda model, batch: model(batch.x, batch.edge_index))


def aggregating(name: str, make: Callable[[], Any]) -> None:
    """An aggregation of PyG; some pad all nodes to the largest degree of the batch, or depend on the order of edges."""

    @trap(f"aggregation: {name}")
    def _() -> Outcome:
        data = directed().sort(sort_by_row=False)
        data.edge_index = torch.cat(
            [data.edge_index, torch.tensor([[32], [32]])], dim=1
        )  # none without an edge at the end
        layer = lambda: pyg.SAGEConv(C, C, aggr=make())  # noqa: E731
        return outcome(lambda: Net(layer=layer), Data(x=data.x, edge_index=data.edge_index), mode="evaluation")


aggregating("LSTM", lambda: pyg.aggr.LSTMAggregation(C, C))
aggregating("GRU", lambda: pyg.aggr.GRUAggregation(C, C))
aggregating("set transformer", lambda: pyg.aggr.SetTransformerAggregation(C))
aggregating("deep sets", lambda: pyg.aggr.DeepSetsAggregation(nn.Linear(C, C), nn.Linear(C, C)))
aggregating("attention", lambda: pyg.aggr.AttentionalAggregation(nn.Linear(C, 1)))
aggregating("power mean", lambda: pyg.aggr.PowerMeanAggregation(learn=True))
aggregating("quantile", lambda: pyg.aggr.QuantileAggregation(0.3))
aggregating("median", pyg.aggr.MedianAggregation)
aggregating("variance preserving", pyg.aggr.VariancePreservingAggregation)
aggregating("LCM", lambda: pyg.aggr.LCMAggregation(C, C, project=False))
aggregating("equilibrium", lambda: pyg.aggr.EquilibriumAggregation(C, C, [C]))


@trap("graphs: edges sorted by source inside")
def _() -> Outcome:
    class Sorts(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return super().forward(x, edge_index[:, edge_index[0].argsort(stable=True)])

    return outcome(Sorts, directed())


@trap("graphs: edges masked by an attribute")
def _() -> Outcome:
    class Masks(Net):
        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, edge_index[:, edge_type != 1])

    return Outcome.worst([outcome(Masks, graph()), outcome(lambda: Masks(layer=gcn), graph())])


@trap("graphs: edges masked by the features")
def _() -> Outcome:
    class Masks(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return super().forward(x, edge_index[:, x[edge_index[0], 0] > 0])

    return Outcome.worst([outcome(Masks, graph()), outcome(lambda: Masks(layer=gcn), graph())])


@trap("graphs: two hops as edges")
def _() -> Outcome:
    class TwoHops(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            count = x.size(0)
            dense = torch.zeros(count, count).index_put((edge_index[0], edge_index[1]), torch.ones(edge_index.size(1)))
            return super().forward(x, (dense @ dense).nonzero().t().contiguous())

    return outcome(TwoHops, graph())


@trap("graphs: halves of the edges")
def _() -> Outcome:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([sage(), sage()])

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            half = edge_index.size(1) // 2
            x = self.convs[0](x, edge_index[:, :half]).tanh()
            return self.convs[1](x, edge_index[:, half:])

    return outcome(Halves, graph())


@trap("graphs: self-loops counted by hand")
def _() -> Outcome:
    class Loops(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            looped = scatter((edge_index[0] == edge_index[1]).to(x.dtype), edge_index[1], 0, x.size(0))
            return super().forward(x + looped.unsqueeze(-1), edge_index)

    return outcome(Loops, directed())
