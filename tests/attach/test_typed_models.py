"""Models on heterogeneous graphs, against plain PyG on the whole graph."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale._util import tensors_in
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward import TypedPlan
from gnnautoscale.forward.compensation import share_at_hand
from support.plans import plan_once
from support.typed import (
    ADDING,
    GRAPH,
    KINDS,
    MODELS,
    RELATIONS,
    TARGETS,
    WIDTH,
    Attending,
    Plain,
    Stacked,
    run,
    typed_graph,
)

# PyG's own, about the venues.
pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


@pytest.fixture(autouse=True)
def _plans_of_equal_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan serves all tests of a model."""
    monkeypatch.setattr("gnnautoscale.attach.autoscaler.make_plan", plan_once)


class Combining(Stacked):
    """Four layers, each of which combines relations in another way."""

    def __init__(self) -> None:
        super().__init__(lambda _: pyg.SAGEConv(WIDTH, WIDTH), layers=4)
        for conv, aggr in zip(self.convs, ("mean", "max", "min", "sum"), strict=True):
            conv.aggr = aggr  # type: ignore[assignment]


TOGETHER = ("SAGE mean", "SAGE max", "SAGE min", "SAGE deep")
#: What is exact: all models, but those of one kind of layer together.
EXACT: dict[str, Callable[[], nn.Module]] = {
    "SAGE combining": Combining,
    **{name: make for name, make in {**MODELS, **ADDING}.items() if name not in TOGETHER},
}
#: Models that are also planned as they are in training.
TRAINED = ("SAGE sum", "GCN", "HGT", "residual", "looping")


def made(name: str) -> nn.Module:
    """A model with all its weights."""
    torch.manual_seed(1)
    model = {**MODELS, **EXACT}[name]().double().eval()
    with torch.no_grad():
        run(model, GRAPH)
    return model


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().abs().max()) <= tolerance * float(other.detach().abs().max())


@pytest.mark.parametrize("name", EXACT)
def test_models_are_exact(name: str) -> None:
    """Inference, predictions, and batches once weights are fixed; and one part has the gradients of full batch."""
    model, data = made(name), typed_graph(3)
    want = [value.detach() for value in run(model, data)]
    plain = copy.deepcopy(model)
    gas.autoscale(model, data, storage="host")
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2)
    first = sweep(model, loader, want)
    assert any(float((one - other).abs().max()) > 1e-6 for one, other in zip(first, want, strict=True))
    assert_same(tensors_in(gas.infer(model, loader, update_histories=False)), want)
    for _ in range(4):
        last = sweep(model, loader, want)
    assert_same(last, want)
    gas.refresh(model, data)
    nodes = {"paper": torch.tensor([7, 3, 7]), "author": torch.tensor([2])}
    found = tensors_in(gas.predict(model, loader, nodes))
    assert_same(found, [rows[nodes[kind]] for rows, kind in zip(want, output_kinds(model), strict=True)])

    batch = next(iter(gas.HaloLoader(data, 1)))
    model.train(name in TRAINED)
    plain.train(name in TRAINED)
    model(batch)  # makes another plan in training
    for other, outputs in ((model, lambda: tensors_in(model(batch))), (plain, lambda: run(plain, data))):
        other.load_state_dict(plain.state_dict())  # also averages of norms
        torch.manual_seed(7)
        loss_of(outputs()).backward()  # type: ignore[no-untyped-call]
    zeros = [torch.zeros_like(weight) for weight in plain.parameters()]
    expected = [
        zero if weight.grad is None else weight.grad for weight, zero in zip(plain.parameters(), zeros, strict=True)
    ]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for weight, gradient, zero in zip(model.parameters(), expected, zeros, strict=True):
        got = zero if weight.grad is None else weight.grad
        assert float((got - gradient).abs().max()) <= 1e-10 * largest


def output_kinds(model: nn.Module) -> list[str]:
    return cast(TypedPlan, attached(model).plan).output_kinds


def sweep(model: nn.Module, loader: gas.HaloLoader, like: list[Tensor]) -> list[Tensor]:
    """The outputs of all batches."""
    found = [torch.full_like(value, torch.nan) for value in like]
    with torch.no_grad():
        for batch in loader:
            out = tensors_in(model(batch))
            for whole, rows, kind in zip(found, out, output_kinds(model), strict=True):
                whole[batch[kind].n_id[: batch[kind].batch_size]] = rows
    return found


def loss_of(outputs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for value in outputs:
        factors = torch.linspace(-1.0, 2.0, value.numel(), dtype=torch.double).view_as(value)
        total = total + (value * factors).sum()
    return total


def test_norms_of_types_with_one_node_in_a_batch_use_their_averages() -> None:
    model, data = made("residual"), typed_graph(3)
    gas.autoscale(model, data)
    alone = {kind: torch.ones(data[kind].num_nodes, dtype=torch.long) for kind in KINDS}
    alone["paper"][5] = alone["author"][:10] = 0  # one paper, and no terms
    model.train()
    before = {kind: model.norms[kind].running_mean.clone() for kind in ("author", "paper", "term")}  # type: ignore[index, union-attr]
    out = model(next(iter(gas.HaloLoader(data, partition=alone))))
    assert out["paper"].shape == (1, 3)
    moved = {kind: not torch.equal(model.norms[kind].running_mean, mean) for kind, mean in before.items()}  # type: ignore[index, union-attr]
    assert moved == {"author": True, "paper": False, "term": False}


def test_combined_rows_have_one_history() -> None:
    model = made("SAGE sum")
    gas.autoscale(model, GRAPH)
    gas.refresh(model, gas.HaloLoader(GRAPH, 4))
    found = {slot: history.num_nodes for slot, history in attached(model).memory.histories.items()}
    assert found == {
        "convs.0.convs.<paper___written_by___author> to author": 30,
        "convs.0.convs to paper": 40,  # the sum of five relations
        "convs.0.convs.<paper___mentions___term> to term": 12,
    }


@pytest.mark.parametrize(("name", "fused"), [("SAGE sum", 14), ("GraphConv", 14), ("GCN", 14), ("GAT", 0)])
def test_layers_aggregate_in_one_kernel_where_they_can(name: str, fused: int) -> None:
    model = made(name)
    gas.autoscale(model, GRAPH)
    model(next(iter(gas.HaloLoader(GRAPH, 4))))
    calls = attached(model).calls
    assert len(calls) == 14
    assert sum("fused" in call.shortcuts for call in calls.values()) == fused


@pytest.mark.parametrize("storage", ["device", "host", "disk"])
def test_sums_over_all_nodes_follow_the_rows_of_steps(storage: Any, tmp_path: Path) -> None:
    """What a step adds up is the rows that histories hold, those of its batch replaced."""
    model = made("HAN")
    gas.autoscale(model, GRAPH, storage=storage, history_dir=tmp_path if storage == "disk" else None)
    loader = gas.HaloLoader(GRAPH, 4, shuffle=True)
    for batch in [*loader, *loader]:
        model(batch)
    memory = attached(model).memory
    memory.settle()
    assert len(memory.totals) == 6
    for slot, total in memory.totals.items():
        assert torch.allclose(total, memory.histories[slot].raw.double().sum(0), rtol=1e-12, atol=1e-12)


def test_only_plain_steps_add_up_all_nodes() -> None:
    loader = gas.HaloLoader(GRAPH, 4, bidirectional=True)
    for compensate in ("gradient", "momentum"):
        model = gas.autoscale(made("averages"), GRAPH, compensate=compensate)
        with pytest.raises(UnsupportedModelError, match=r"only plain steps know .*a sum in 'the model'"):
            model(next(iter(loader)))
    model = gas.autoscale(made("HAN"), GRAPH)
    with pytest.raises(UnsupportedModelError, match="only plain steps know"):
        gas.exact_forward(model, loader)


def test_a_model_that_adds_up_nodes_can_be_verified_and_grows() -> None:
    model = gas.autoscale(made("HAN"), GRAPH)
    loader = gas.HaloLoader(GRAPH, 4)
    assert gas.verify(model, loader).exact
    gas.refresh(model, loader)
    more = typed_graph()
    more["author"].x = torch.cat([more["author"].x, torch.ones(2, more["author"].x.size(1), dtype=torch.float64)])
    grown = gas.grow(model, loader, more)
    (want,) = run(gas.detach(copy.deepcopy(model)), more)
    assert_same([gas.predict(model, grown, {"paper": torch.arange(40)})], [want.detach()])


@pytest.mark.parametrize("conv", [pyg.RGCNConv, pyg.FastRGCNConv])
def test_relations_of_a_plain_graph_are_exact(conv: Any) -> None:
    class Relational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([conv(4, 4, len(RELATIONS), num_bases=3) for _ in range(2)])

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            for each in self.convs:
                x = each(x, edge_index, edge_type).tanh()
            return x

    torch.manual_seed(1)
    data = typed_graph(3)
    for kind in KINDS:
        data[kind].x = data[kind].x[:, :4]
    plain = data.to_homogeneous(node_attrs=["x"], edge_attrs=[])
    model = Relational().double().eval()
    want = model(plain.x, plain.edge_index, plain.edge_type).detach()
    gas.autoscale(model, plain)
    loader = gas.HaloLoader(plain, 5, partition="random", batch_size=2)
    assert_same([gas.infer(model, loader, update_histories=False)], [want])
    out = gas.exact_forward(model, loader)
    assert_same([out], [want])


def test_norms_over_the_graph_are_refused_by_name() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Stacked(lambda _: pyg.SAGEConv(WIDTH, WIDTH)).convs
            self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS})
            self.norm = pyg.GraphNorm(WIDTH)

        def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
            rows = {kind: self.first[kind](x) for kind, x in x_dict.items()}
            found = self.conv[0](rows, edge_index_dict)
            rows = {**rows, **found, "paper": self.norm(found["paper"])}
            out: Tensor = self.conv[1](rows, edge_index_dict)["paper"]
            return out

    model = gas.autoscale(Normed().double(), GRAPH)
    with pytest.raises(UnsupportedModelError, match=r"computes 'norm \(GraphNorm\)' in batches"):
        model(next(iter(gas.HaloLoader(GRAPH, 4))))


def test_lazy_weights_are_those_of_the_plain_model() -> None:
    torch.manual_seed(3)
    plain = Stacked(lambda _: pyg.SAGEConv((-1, -1), WIDTH)).double()
    lazy = copy.deepcopy(plain)
    torch.manual_seed(4)
    with torch.no_grad():
        run(plain, GRAPH)
    gas.autoscale(lazy, GRAPH)
    torch.manual_seed(4)
    lazy(next(iter(gas.HaloLoader(GRAPH, 4))))
    for got, want in zip(lazy.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


def test_training_with_stale_histories_learns() -> None:
    torch.manual_seed(0)
    model, data = MODELS["SAGE sum"](), typed_graph(6).apply(lambda x: x.float() if x.is_floating_point() else x)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 6, batch_size=2, shuffle=True)
    model(next(iter(loader)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(20):
        for batch in loader:
            out, size = model(batch), batch["paper"].batch_size
            loss = nn.functional.cross_entropy(out, batch["paper"].y[:size])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert {history.dtype for history in attached(model).memory.histories.values()} == {torch.float32}
    right = gas.infer(model, loader).argmax(1) == data["paper"].y
    assert float(right.double().mean()) > 0.95


@pytest.mark.parametrize("name", ["SAGE sum", "looping"])
def test_all_batches_have_one_plan(name: str) -> None:
    model = made(name)
    gas.autoscale(model, GRAPH)
    plans = []
    for batch in gas.HaloLoader(GRAPH, 4):
        model(batch)
        plans.append(attached(model).plan)
    assert all(plan is plans[0] for plan in plans)


def test_models_may_ask_what_a_layer_takes() -> None:
    class Asking(nn.Module):
        """Passes weights and features of edges to the layers that take them."""

        def __init__(self) -> None:
            super().__init__()
            convs = [
                pyg.GraphConv((-1, -1), 4),
                pyg.TransformerConv((-1, -1), 4, edge_dim=2),
                pyg.SAGEConv((-1, -1), 4),
            ]
            self.convs = nn.ModuleList(convs)

        def forward(self, batch: HeteroData) -> Tensor:
            total = torch.zeros(())
            for conv, kind in zip(
                self.convs, [("term", "in"), ("venue", "publishes"), ("author", "writes")], strict=True
            ):
                store = batch[(*kind, "paper")]
                wanted = inspect.signature(conv.forward).parameters.keys() & {"edge_weight", "edge_attr"}
                rows = batch[kind[0]].x, batch["paper"].x
                total = total + conv(rows, store.edge_index, **{name: store[name] for name in wanted if name in store})
            return total

    model = Asking().double().eval()
    with torch.no_grad():
        want = model(GRAPH)
    gas.autoscale(model, GRAPH)
    loader = gas.HaloLoader(GRAPH, 4)
    assert_same([gas.infer(model, loader)], [want])
    assert gas.verify(model, loader, nodes=10).exact


def test_types_without_nodes_can_be_asked_for() -> None:
    data = typed_graph(3)
    data["venue"].x, kind = data["venue"].x[:0], ("venue", "publishes", "paper")
    data[kind].edge_index, data[kind].edge_attr = data[kind].edge_index[:, :0], data[kind].edge_attr[:0]
    model = made("SAGE sum")
    with torch.no_grad():
        (want,) = run(model, data)
    gas.autoscale(model, data)
    loader = gas.HaloLoader(data, 4)
    gas.refresh(model, loader)
    nodes = {"paper": torch.tensor([3, 9]), "venue": torch.empty(0, dtype=torch.long)}
    assert_same([gas.predict(model, loader, nodes)], [want[[3, 9]]])
    assert gas.verify(model, loader, nodes=10).exact


def test_a_layer_that_fails_without_edges_is_named() -> None:
    class Picky(pyg.SAGEConv):  # type: ignore[misc]
        """Looks at the first edge."""

        def forward(self, x: Any, edge_index: Tensor) -> Tensor:
            edge_index[0, :1].max()
            out: Tensor = super().forward(x, edge_index)
            return out

    model = Attending(lambda: pyg.HeteroConv({kind: Picky(WIDTH, WIDTH) for kind in RELATIONS})).double().eval()
    with torch.no_grad():
        run(model, GRAPH)
    gas.autoscale(model, GRAPH)
    alone = {kind: torch.ones(GRAPH[kind].num_nodes, dtype=torch.long) for kind in KINDS}
    alone["venue"][0] = 0
    with pytest.raises(UnsupportedModelError, match=r"Picky .* must run on batches without edges"):
        model(next(iter(gas.HaloLoader(GRAPH, partition=alone))))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "HGT", "looping", "residual"])
def test_a_gpu_computes_the_same(name: str, storage: Any) -> None:
    model, data = made(name), typed_graph(3)
    want = [value.detach() for value in run(model, data)]
    gas.autoscale(model.to("cuda"), data, storage=storage)
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, device="cuda")
    assert_same(tensors_in(gas.infer(model, loader, update_histories=False)), want, 1e-9)
    for _ in range(6):
        last = sweep(model, loader, [value.to("cuda") for value in want])
    assert_same([value.cpu() for value in last], want, 1e-9)


# Gradients beyond the border of a batch ##############################################################################

# Layers or combinations that are not linear in messages, so that compensated gradients are close, but not exact.
BENT = {"SAGE max", "SAGE min", "GAT", "GATv2", "Transformer", "GAT with loops", "HGT", "to_hetero max"}


def weighted_sum(out: Any, batch: HeteroData, kinds: list[str]) -> Tensor:
    """The batch's part of :func:`loss_of`."""
    total = torch.zeros((), dtype=torch.double)
    for value, kind in zip(tensors_in(out), kinds, strict=True):
        count, device = GRAPH[kind].num_nodes * value.size(1), value.device
        total, whole = total.to(device), torch.linspace(-1.0, 2.0, count, dtype=torch.double, device=device)
        own = batch[kind].n_id[: batch[kind].batch_size]
        total = total + (value * whole.view(-1, value.size(1))[own]).sum()
    return total


def largest_error(model: nn.Module, want: list[Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in want)
    pairs = zip(model.parameters(), want, strict=True)
    return max(float(((0 if weight.grad is None else weight.grad) - other).abs().max()) for weight, other in pairs) / (
        largest
    )


@pytest.mark.parametrize("name", list(MODELS)[::2])
def test_gradients_of_all_batches_are_those_of_full_batch(name: str) -> None:
    model, data = made(name), typed_graph(3)
    loss_of(run(model, data)).backward()  # type: ignore[no-untyped-call]
    want = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    gas.autoscale(model, data, compensate="gradient")
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, bidirectional=True)
    loss_of(tensors_in(gas.exact_forward(model, loader))).backward()  # type: ignore[no-untyped-call]
    assert largest_error(model, want) <= 1e-10
    errors = []
    for _ in range(6 if name == "SAGE deep" else 4):
        model.zero_grad()
        for batch in loader:
            weighted_sum(model(batch), batch, output_kinds(model)).backward()  # type: ignore[no-untyped-call]
        errors.append(largest_error(model, want))
    assert errors[-1] <= (0.05 if name in BENT else 1e-10)
    assert errors[-1] < errors[0]


def test_batch_norms_of_several_types_at_once_are_exact_in_evaluation() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Stacked(lambda _: pyg.SAGEConv((-1, -1), WIDTH))
            self.norm = pyg.HeteroBatchNorm(3, 2)

        def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
            papers = self.model(x_dict, edge_index_dict)
            out: Tensor = self.norm(papers, torch.ones(papers.size(0), dtype=torch.long))
            return out

    model = Normed().double().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        want = run(model, GRAPH)
    gas.autoscale(model, GRAPH)
    loader = gas.HaloLoader(GRAPH, 4)
    assert_same([gas.infer(model, loader)], want)
    with pytest.raises(UnsupportedModelError, match=r"norm \(HeteroBatchNorm\)"):
        model.train()(next(iter(loader)))


def test_types_joined_inside_the_model_are_refused() -> None:
    data = HeteroData()
    for kind in ("author", "paper"):
        data[kind].x = GRAPH[kind].x[:, :4]
    for relation in TARGETS:
        data[relation].edge_index = GRAPH[relation].edge_index
    model = pyg.to_hetero_with_bases(Plain(), data.metadata(), num_bases=2, in_channels={"x": 4}).double()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    gas.autoscale(model, data)
    batch = next(iter(gas.HaloLoader(data, 4)))
    with pytest.raises(UnsupportedModelError, match=r"must get the batch's own edges"):
        model(batch.x_dict, batch.edge_index_dict)


def test_compensated_steps_need_values_of_edges_as_they_are() -> None:
    class Derived(nn.Module):
        """Computes features of edges before a layer."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleDict({kind: pyg.Linear(-1, WIDTH) for kind in KINDS})
            self.lin = nn.Linear(2, 2)
            self.convs = nn.ModuleList([pyg.GATConv(WIDTH, WIDTH, edge_dim=2, add_self_loops=False) for _ in range(2)])

        def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any) -> Tensor:
            kind, rows = ("venue", "publishes", "paper"), {kind: self.first[kind](x) for kind, x in x_dict.items()}
            for conv in self.convs:
                given = self.lin(edge_attr_dict[kind])
                rows["paper"] = conv((rows["venue"], rows["paper"]), edge_index_dict[kind], given).relu()
            papers: Tensor = rows["paper"]
            return papers

    model = Derived().double()
    with torch.no_grad():
        run(model, GRAPH)
    gas.autoscale(model, GRAPH, compensate="gradient")
    with pytest.raises(UnsupportedModelError, match=r"must propagate over recorded edges.*'edge_attr', that are"):
        model(next(iter(gas.HaloLoader(GRAPH, 4, bidirectional=True))))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "residual", "looping", "weighted"])
def test_a_gpu_gives_the_gradients_of_full_batch(name: str, storage: Any) -> None:
    model, data = made(name), typed_graph(3)
    loss_of(run(model, data)).backward()  # type: ignore[no-untyped-call]
    want = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    want = [gradient.cuda() for gradient in want]
    model.zero_grad()
    gas.autoscale(model.cuda(), data, compensate="gradient", storage=storage)
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, bidirectional=True, device="cuda")
    for _ in range(2):
        model.zero_grad()
        loss_of(tensors_in(gas.exact_forward(model, loader))).backward()  # type: ignore[no-untyped-call]
        assert largest_error(model, want) <= 1e-9
    for _ in range(6):
        model.zero_grad()
        for batch in loader:
            weighted_sum(model(batch), batch, output_kinds(model)).backward()  # type: ignore[no-untyped-call]
    assert largest_error(model, want) <= 1e-9
    gas.refresh(model, loader)
    assert gas.verify(model, loader, nodes=10).exact


def test_exact_gradients_are_those_of_the_dropout_and_the_norms_of_the_pass() -> None:
    torch.manual_seed(1)
    model = nn.ModuleList(
        [made("residual"), Stacked(lambda _: pyg.GATConv((-1, -1), 4, heads=2, add_self_loops=False))]
    )
    for each in model:
        each.double().train()
        run(each, GRAPH)
        for module in each.modules():
            if isinstance(module, pyg.GATConv):
                module.dropout = 0.4
        gas.autoscale(each, GRAPH)
        loader = gas.HaloLoader(GRAPH, 5, partition="random", batch_size=2)

        def loss(each: nn.Module = each, loader: gas.HaloLoader = loader) -> Tensor:
            torch.manual_seed(5)
            return loss_of(tensors_in(gas.exact_forward(each, loader)))

        loss().backward()  # type: ignore[no-untyped-call]
        weights: list[Any] = [weight for weight in each.parameters() if weight.grad is not None]
        steps = [torch.randn_like(weight) for weight in weights]
        slope = sum(float((weight.grad * step).sum()) for weight, step in zip(weights, steps, strict=True))
        values = []
        for size in (1e-6, -2e-6):
            with torch.no_grad():
                torch._foreach_add_(weights, steps, alpha=size)
                values.append(float(loss()))
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_moved_histories_move_by_the_share_of_neighbours_of_all_types() -> None:
    model, data = made("SAGE sum"), typed_graph(3)
    gas.autoscale(model, data, compensate="momentum")
    loader = gas.HaloLoader(data, 5, partition="random", batch_size=2, bidirectional=True)
    gas.refresh(model, loader)
    batch = next(iter(loader))
    halo = batch["paper"].n_id.plain[batch["paper"].batch_size :]
    there, degree = torch.zeros(40), torch.zeros(40)
    for kind in RELATIONS:
        source, target = data[kind].edge_index
        if kind[2] == "paper":
            degree += torch.bincount(target, minlength=40)
            there += torch.bincount(target[torch.isin(source, batch[kind[0]].n_id)], minlength=40)
    info = batch["paper", "cites", "paper"].edge_index.info
    assert torch.equal(share_at_hand(info.typed.nodes["paper"]), there[halo] / degree[halo].clamp(min=1))
    memory = attached(model).memory.kinds["paper"]
    history, order = memory.histories["convs.0.convs to paper"], loader.row_orders["paper"]
    before = history.raw.clone()
    model(batch)
    moved = (history.raw - before).abs().amax(1)[order.rows(halo).long()]
    complete = there[halo] == degree[halo]  # with all its neighbours a row stays what it was
    assert float(moved[complete].max()) < 1e-12 < 1e-3 < float(moved[~complete].max())


def test_the_penalty_grows_with_the_radius() -> None:
    for name in ("SAGE sum", "HGT", "SGC"):
        model = made(name)
        gas.autoscale(model, GRAPH)
        gas.refresh(model, gas.HaloLoader(GRAPH, 4))
        batch = next(iter(gas.HaloLoader(GRAPH, 4)))
        plain, values = tensors_in(model(batch)), []
        for radius in (1e-3, 2e-3):
            torch.manual_seed(0)
            with gas.LocalLipschitz(model, radius) as penalty:
                out = tensors_in(model(batch))
            assert_same(out, plain)
            values.append(float(penalty.value().detach()))
        assert values[1] == pytest.approx(2 * values[0], rel=0.05)


def test_a_share_of_the_edges_of_each_type_is_dropped() -> None:
    class Degrees(nn.Module):
        """The number of edges of each type into each node."""

        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleDict({"__".join(kind): pyg.SimpleConv(aggr="sum") for kind in RELATIONS})
            self.hgt = pyg.HGTConv(1, 1, (KINDS, RELATIONS))

        def forward(self, batch: HeteroData) -> dict[str, Tensor]:
            ones = {kind: batch[kind].x[:, :1].detach() * 0 + 1 for kind in KINDS}
            found = {
                kind: self.convs["__".join(kind)]((ones[kind[0]], ones[kind[2]]), batch[kind].edge_index)
                for kind in RELATIONS
            }
            found["all"] = self.hgt(ones, batch.edge_index_dict)["paper"]
            return {str(kind): rows + 0 for kind, rows in found.items()}

    data = typed_graph(3)
    data["paper", "cites", "paper"].edge_index[:, :20] = torch.arange(20)  # self-loops
    model = gas.autoscale(Degrees().double(), data, edge_dropout=0.5)
    batch = next(iter(gas.HaloLoader(data, 1)))
    whole = model.eval()(batch)
    for kind in RELATIONS:
        degrees = torch.bincount(data[kind].edge_index[1], minlength=data[kind[2]].num_nodes)
        assert torch.equal(whole[str(kind)].squeeze(1).long(), degrees)
    some = model.train()(batch)
    for kind in RELATIONS:
        before, after = whole[str(kind)], some[str(kind)]
        assert bool((after <= before).all())
        assert 0.2 < float(after.sum() / before.sum()) < 0.8
    cites = some[str(("paper", "cites", "paper"))].squeeze(1)
    assert bool((cites[:20] >= 1).all())
    assert not torch.equal(some["all"], whole["all"])
