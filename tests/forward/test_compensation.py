"""Steps that make up for the border of a batch, against gradients of plain PyG on the whole graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import Stack, assert_same, call_whole, odd_graph, undirected_graph, whole
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward.compensation import between, moved_on, share_at_hand
from gnnautoscale.planner.trial_graph import setups_for
from support.layers import C, three_layers
from support.plans import plan_once

# Enough for rows and then gradients to pass through three layers of up to three propagations each.
SWEEPS = 5


@pytest.fixture(autouse=True)
def _plans_of_equal_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are what these tests are about, so that models are tried on one graph, and once."""
    monkeypatch.setattr("gnnautoscale.planner.planning.setups_for", lambda graph: setups_for(graph)[:1])
    monkeypatch.setattr("gnnautoscale.attach.autoscaler.make_plan", plan_once)


def loss_of(out: Tensor, nodes: Tensor) -> Tensor:
    """A loss that is a sum over nodes, each with another weight."""
    return (out.square().sum(1) * torch.linspace(-1.0, 2.0, 40, dtype=out.dtype)[nodes]).sum()


def whole_gradients(model: nn.Module, data: Data) -> dict[str, Tensor]:
    plain = copy.deepcopy(model)
    loss_of(call_whole(plain, data), torch.arange(data.num_nodes)).backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}


def sweep(model: nn.Module, loader: gas.HaloLoader) -> dict[str, Tensor]:
    """The gradients of all batches, added up."""
    model.zero_grad()
    for batch in loader:
        loss_of(model(batch), batch.n_id[: batch.batch_size]).backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def flat(gradients: dict[str, Tensor], names: Any) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in names])


def compensated(model: nn.Module, data: Data, sweeps: int = SWEEPS, **options: Any) -> tuple[Tensor, Tensor]:
    """All gradients after some sweeps with fixed weights, and those of the whole graph."""
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, bidirectional=True)
    wanted = whole_gradients(model, data)
    gas.autoscale(model, data, compensate="gradient", **options)
    for _ in range(sweeps):
        got = sweep(model, loader)
    assert got.keys() == wanted.keys()
    return flat(got, wanted), flat(wanted, wanted)


class Propagating(nn.Module):
    """A linear layer, then propagations without weights, as in APPNP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.propagate, self.last = nn.Linear(C, C), pyg.APPNP(K=3, alpha=0.1), pyg.GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.propagate(self.first(x), edge_index)), edge_index)
        return out


class Jumping(nn.Module):
    """Slots that several others and the output are computed from, a layer that is used twice, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(C, C), nn.Linear(3 * C, C)
        self.first, self.twice = pyg.GCNConv(C, C), pyg.SAGEConv(C, C)
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        start = self.lift(x)
        one = self.first(start, edge_index).tanh_()
        two = self.norm(self.twice(one, edge_index)) + start
        three = self.twice(torch.tanh(two) * one, edge_index)
        three += one
        out: Tensor = self.head(torch.cat([one, two, three], dim=1))
        return out


# Layers that are linear in their messages; GIN and GINE have their histories at the sums, before the MLP.
LINEAR = ["GCN", "GCN weighted", "SAGE mean", "GCN2", "GIN", "GINE", "Graph", "RGCN", "NN", "SAGE target_to_source"]


@pytest.mark.parametrize("name", LINEAR)
def test_batches_add_up_to_the_gradient_of_the_whole_graph(name: str) -> None:
    got, wanted = compensated(three_layers(name).double().eval(), undirected_graph(dtype=torch.float64))
    assert_same(got, wanted, 1e-12)


def test_batches_without_targets_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_three_nodes(out: Tensor, nodes: Tensor) -> Tensor:
        return out[nodes < 3].square().sum()

    monkeypatch.setattr(f"{__name__}.loss_of", of_three_nodes)  # so that at least one of four batches has none
    got, wanted = compensated(three_layers("GCN").double().eval(), undirected_graph(dtype=torch.float64))
    assert_same(got, wanted, 1e-12)


def test_batches_without_a_halo_train_all_layers() -> None:
    pieces = undirected_graph(dtype=torch.float64)
    part = torch.arange(pieces.num_nodes) % 2
    inside = part[pieces.edge_index[0]] == part[pieces.edge_index[1]]
    data = Data(x=pieces.x, edge_index=pieces.edge_index[:, inside])
    model = three_layers("GCN").double().eval()
    wanted = whole_gradients(model, data)
    got = sweep(gas.autoscale(model, data, compensate="gradient"), gas.HaloLoader(data, partition=part))
    assert_same(flat(got, wanted), flat(wanted, wanted), 1e-12)


@pytest.mark.parametrize(
    ("make", "storage"), [(Propagating, "device"), (Propagating, "disk"), (Jumping, "host"), (Jumping, "disk")]
)
def test_models_and_media(make: type[nn.Module], storage: str, tmp_path: Any) -> None:
    data, model = undirected_graph(dtype=torch.float64), make().double()
    got, wanted = compensated(model, data, sweeps=12, storage=storage, history_dir=str(tmp_path))
    assert_same(got, wanted, 1e-12)
    gas.detach(model)


def test_directed_graphs_need_a_halo_in_both_directions() -> None:
    data = odd_graph(dtype=torch.float64)
    got, wanted = compensated(three_layers("GCN").double().eval(), data)
    assert_same(got, wanted, 1e-12)
    model = gas.autoscale(three_layers("GCN").double(), data, compensate="gradient")
    batch = next(iter(gas.HaloLoader(data, 4, partition="random")))
    with pytest.raises(InputError, match="bidirectional=True"):
        model(batch)


# How close others come, with histories that are not stale: their messages depend on each other, or on a maximum.
CLOSE = {"GAT": 0.999, "GATv2": 0.999, "SAGE max": 0.99, "PNA": 0.999, "Transformer": 0.999}


@pytest.mark.parametrize("name", CLOSE)
def test_other_layers_come_close(name: str) -> None:
    model, data = three_layers(name).double().eval(), undirected_graph(dtype=torch.float64)
    plain = gas.autoscale(copy.deepcopy(model), data)
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2)
    gas.refresh(plain, loader)
    cut = sweep(plain, loader)
    got, wanted = compensated(model, data)
    cosines = [float(F.cosine_similarity(each, wanted, dim=0)) for each in (flat(cut, cut), got)]
    assert cosines[1] > max(CLOSE[name], cosines[0])


@pytest.mark.parametrize("compensate", ["gradient", "momentum"])
@pytest.mark.parametrize("name", ["GAT", "PNA", "GIN"])
def test_one_part_is_full_batch(name: str, compensate: Any) -> None:
    data = odd_graph(dtype=torch.float64)
    model = three_layers(name).double().train()
    wanted = whole_gradients(model, data)
    got = sweep(gas.autoscale(model, data, compensate=compensate), gas.HaloLoader(data, 1))
    assert_same(flat(got, wanted), flat(wanted, wanted), 1e-12)


def test_outputs_are_exact_once_nothing_is_stale() -> None:
    data, model = undirected_graph(), three_layers("GAT").eval()
    expected = whole(copy.deepcopy(model), data)
    gas.autoscale(model, data, compensate="gradient")
    loader = gas.HaloLoader(data, 5)
    for _ in range(3):
        found = [(batch.n_id[: batch.batch_size], model(batch).detach()) for batch in loader]
    for nodes, out in found:
        assert_same(out, expected[nodes])
    assert_same(gas.infer(model, loader), expected)


def test_gradients_of_inputs_and_of_some_weights_only() -> None:
    data, model = undirected_graph(), three_layers("GCN")
    model.layers[0].requires_grad_(False)
    gas.autoscale(model, data, compensate="gradient")
    batch = next(iter(gas.HaloLoader(data, 4)))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    x = batch.x.clone().requires_grad_()
    out = model(x, batch.edge_index)
    found = torch.autograd.grad(out.square().sum(), [x, *weights])
    assert all(bool(gradient.abs().sum() > 0) for gradient in found)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_pass_without_gradients_keeps_none() -> None:
    data, model = undirected_graph(), three_layers("GCN")
    gas.autoscale(model, data, compensate="gradient")
    batch = next(iter(gas.HaloLoader(data, 4)))
    with torch.no_grad():
        model(batch)
    memory = attached(model).memory
    assert not memory.last_gradients
    assert memory.histories
    model(batch).sum().backward()
    assert memory.last_gradients.keys() == {"layers.1", "layers.2"}  # from the first no gradient flows on


def test_a_second_backward_pass_is_refused() -> None:
    data, model = undirected_graph(), three_layers("GCN")
    gas.autoscale(model, data, compensate="gradient")
    loss = model(next(iter(gas.HaloLoader(data, 4)))).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="one backward pass"):
        loss.backward()


def test_what_is_refused() -> None:
    data = undirected_graph()
    with pytest.raises(InputError, match="compensate must be one of"):
        gas.autoscale(three_layers("GCN"), data, compensate="half")  # type: ignore[arg-type]
    model = gas.autoscale(three_layers("GCN"), data, compensate="gradient")
    batch = next(iter(gas.HaloLoader(data, 4)))
    with pytest.raises(UnsupportedModelError, match="Lipschitz"), gas.LocalLipschitz(model, 0.1):
        model(batch)

    class Learned(nn.Module):
        """Weights edges with values that it learns."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layers = nn.Linear(3, 1), nn.ModuleList([pyg.GraphConv(C, C) for _ in range(2)])

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            weight = self.scale(edge_attr).squeeze(1)
            out: Tensor = self.layers[1](torch.tanh(self.layers[0](x, edge_index, weight)), edge_index, weight)
            return out

    learned = gas.autoscale(Learned(), data, compensate="gradient")
    with pytest.raises(UnsupportedModelError, match="compensate='none'"):
        learned(batch)


def test_rows_lie_between_what_was_kept_and_what_misses_neighbours() -> None:
    kept, partial = torch.zeros(3, 2), torch.tensor([[3.0, 4.0], [0.0, 10.0], [0.0, 0.0]])
    before = torch.zeros(2, 2)
    assert torch.equal(between(kept, partial, before, before), kept)  # nothing is stale
    # The batch's rows have moved by 5 on average, so rows may move by 5, too, and less if they are further apart.
    moved = torch.tensor([[5.0, 10.0], [5.0, -10.0]])
    assert torch.equal(between(kept, partial, before, moved), torch.tensor([[3.0, 4.0], [0.0, 2.5], [0.0, 0.0]]))


def test_staleness_adds_up_where_rows_do() -> None:
    kept, partial = torch.zeros(2, 1), torch.tensor([[6.0], [12.0]])
    before, moved = torch.zeros(4, 1), torch.full((4, 1), 3.0)
    # 4 * 9 / (36 + 3 * 9) and 4 * 9 / (144 + 3 * 9) of the way.
    assert_same(between(kept, partial, before, moved, 4.0), torch.tensor([[6 * 36 / 63], [12 * 36 / 171]]), 1e-6)
    assert torch.equal(between(kept, partial, before, before, 4.0), kept)


def test_gradients_of_outputs_move_on_with_these() -> None:
    rows, out = torch.tensor([[1.0], [3.0], [5.0], [7.0]]), torch.tensor([[2.0], [5.0], [6.5], [8.5]])
    kept, now = 0.5 * rows, 0.5 * out  # of a loss of curvature one half
    assert torch.equal(moved_on(kept, rows, out, now[:2]), now[2:])
    # Where gradients do not follow, or turn against their rows, they stay as they were.
    assert torch.equal(moved_on(kept, rows, out, kept[:2]), kept[2:])
    assert torch.equal(moved_on(kept, rows, out, -now[:2]), kept[2:])
    assert torch.equal(moved_on(kept, rows, rows, kept[:2]), kept[2:])
    without = kept * torch.tensor([[1.0], [1.0], [0.0], [1.0]])  # a node without a target
    assert moved_on(without, rows, out, now[:2]).squeeze(1).tolist() == [0.0, 4.25]


def test_the_last_layer_has_a_history_of_gradients_only() -> None:
    data, model = undirected_graph(), three_layers("GCN")
    gas.autoscale(model, data, compensate="gradient")
    model(next(iter(gas.HaloLoader(data, 4)))).sum().backward()
    memory = attached(model).memory
    assert memory.histories.keys() == {"layers.0", "layers.1"}
    assert memory.last_gradients.keys() == {"layers.1", "layers.2"}


def path() -> Data:
    """Nodes 0 to 4 in a row, each connected with the next, in parts {0, 1}, {2} and {3, 4}."""
    nodes = torch.arange(4)
    edges = torch.stack([nodes, nodes + 1])
    return Data(x=torch.arange(1.0, 6.0).view(5, 1), edge_index=torch.cat([edges, edges.flip(0)], dim=1))


def test_the_share_of_edges_at_hand() -> None:
    first, second, _ = gas.HaloLoader(path(), partition=torch.tensor([0, 0, 1, 2, 2]))
    assert share_at_hand(first.edge_index.info).tolist() == [0.5]  # node 2, of whose neighbours node 1 is at hand
    assert share_at_hand(second.edge_index.info).tolist() == [0.5, 0.5]  # nodes 1 and 3, likewise node 2


class Half(nn.Module):
    """Two sums over neighbours; the first is halved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([pyg.SimpleConv(aggr="sum") for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layers[1](self.layers[0](self.scale * x, edge_index), edge_index)
        return out


def test_momentum_moves_rows_of_the_halo() -> None:
    model = gas.autoscale(Half(), path(), compensate="momentum")
    first, *_ = gas.HaloLoader(path(), partition=torch.tensor([0, 0, 1, 2, 2]))
    out = model(first)
    # Node 2 is in the halo. Of its neighbours node 1 is at hand (1.0), node 3 is replaced by node 2 itself (1.5). Its
    # history, which was 0, moves by its share of one half.
    memory = attached(model).memory
    history = memory.histories["layers.0"].raw[memory.row_order(first.edge_index.info).row_of.long()]
    assert history.squeeze(1).tolist() == [1.0, 2.0, 1.25, 0.0, 0.0]
    assert out.squeeze(1).tolist() == [2.0, 2.25]


def test_a_layer_in_a_stack_has_its_history_where_it_is_linear() -> None:
    data = undirected_graph()
    model = Stack([pyg.GINConv(nn.Sequential(nn.Linear(C, C), nn.ReLU())) for _ in range(3)])
    gas.autoscale(model, data, compensate="gradient")
    model(next(iter(gas.HaloLoader(data, 4))))
    plan = attached(model).plan
    assert plan is not None
    # The first one's halo rows depend on no history.
    assert plan.inner == {"layers.1", "layers.2"}
    plain = gas.autoscale(copy.deepcopy(gas.detach(model)), data)
    plain(next(iter(gas.HaloLoader(data, 4))))
    assert attached(plain).plan is not None
    assert not attached(plain).plan.inner  # type: ignore[union-attr]
