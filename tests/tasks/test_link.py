"""Link prediction: pairs of batches, negatives, and what fit makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN, MessagePassing, RGCNConv  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.graph import ClusterLoader
from gnnautoscale.models import build_model
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import Bilinear, Dot, LinkPrediction
from gnnautoscale.tasks.metrics import roc_auc
from gnnautoscale.tasks.pairs import Meetings
from support.communities import FEATURES, Weights, same_bits, weights_of
from support.links import Splits, splits


def as_triplets(data: Data) -> Data:
    """The positives of a graph with two targets each that have no edge, in the names of PyG's triplets."""
    source, target = data.edge_label_index[:, data.edge_label > 0]
    others = torch.randint(48, (source.numel(), 2))
    return Data(x=data.x, edge_index=data.edge_index, src_index=source, dst_pos_index=target, dst_neg_index=others)


def encoder(width: int = 8) -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, 16, num_layers=2, out_channels=width)


def typed_splits() -> Splits:
    """Triples of three relations; the reverse of each is a relation of its own, with 3 added."""
    generator = torch.Generator().manual_seed(0)
    x, triples = torch.randn(30, FEATURES, generator=generator), torch.randint(30, (200, 3), generator=generator)
    triples[:, 1] %= 3
    triples = torch.unique(triples[triples[:, 0] != triples[:, 2]], dim=0)
    triples = triples[torch.randperm(triples.size(0), generator=generator)]
    passing, *asked = triples[:100], triples[100:140], triples[140:160], triples[160:]
    edges = torch.cat([passing[:, [0, 2]], passing[:, [2, 0]]]).t().contiguous()
    kinds = torch.cat([passing[:, 1], passing[:, 1] + 3])
    return tuple(
        Data(
            x=x,
            edge_index=edges,
            edge_type=kinds,
            edge_label_index=each[:, [0, 2]].t().contiguous(),
            edge_label_type=each[:, 1].contiguous(),
        )
        for each in asked
    )


class Relational(nn.Module):
    """Two layers that tell relations apart."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = RGCNConv(FEATURES, 16, 6), RGCNConv(16, width, 6)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)
        return out


# Guarantees ##########################################################################################################


def plain_training(data: Data, model: nn.Module, decoder: nn.Module, steps: int) -> list[float]:
    """PyG's usual loop in full batch."""
    optimizer = torch.optim.Adam([*model.parameters(), *decoder.parameters()], lr=0.01)
    losses = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        z = model(data.x, data.edge_index)
        source, target = data.edge_label_index
        loss = F.binary_cross_entropy_with_logits(decoder(z[source], z[target]), data.edge_label.float())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("options", "decoder"),
    [
        ({"mode": "full"}, "bilinear"),
        ({"mode": "exact", "num_parts": 5}, "bilinear"),
        ({"mode": "exact", "num_parts": 5}, "dot"),
        ({"num_parts": 1}, "bilinear"),
        ({"mode": "cluster", "num_parts": 1}, "dot"),
        ({"mode": "sage", "num_parts": 1, "fan_out": [-1, -1, -1]}, "bilinear"),  # the third for degrees
    ],
)
def test_one_part_and_exact_steps_are_plain_full_batch(options: dict[str, Any], decoder: str) -> None:
    parts = splits()
    torch.manual_seed(5)
    ours: nn.Module = Dot() if decoder == "dot" else Bilinear(8)
    torch.manual_seed(5)
    theirs: nn.Module = Dot() if decoder == "dot" else Bilinear(8)
    model, plain = encoder(), encoder()
    expected = plain_training(parts[0], plain, theirs, 4)
    last: dict[str, Tensor] = {}

    def keep(epoch: Any) -> None:
        last.update(weights_of(model), **{f"decoder.{name}": value for name, value in weights_of(ours).items()})

    result = gas.fit(model, parts, task=LinkPrediction(ours), epochs=4, callback=keep, **options)
    assert [epoch.loss for epoch in result.epochs] == pytest.approx(expected, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(last[name], value, rtol=1e-4, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(last[f"decoder.{name}"], value, rtol=1e-4, atol=1e-5)


def bound(parts: Splits, num_parts: int = 1, batch_size: int = 1, **options: Any) -> tuple[LinkPrediction, Tensor]:
    """A task that has met its data and a loader, and the part of each node."""
    task = LinkPrediction(**options)
    task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    loader = gas.HaloLoader(parts[0], num_parts, batch_size=batch_size, shuffle=True)
    task.prepare(loader)
    return task, loader.labels


def test_the_batches_of_all_drawings_add_up_to_the_gradient_of_full_batch() -> None:
    parts, decoder = splits(), Bilinear(5).double()
    task, labels = bound(parts, 4, 2, decoder=decoder)
    num_nodes, (source, target), edge = parts[0].num_nodes, parts[0].edge_label_index, parts[0].edge_label > 0
    rows = torch.randn(num_nodes, 5, dtype=torch.double, requires_grad=True)
    losses = F.binary_cross_entropy_with_logits(
        decoder(rows[source], rows[target]).float(), edge.float(), reduction="none"
    )
    expected = torch.autograd.grad(losses.sum(), [rows, decoder.weight])
    task.see(rows, torch.arange(num_nodes))  # the history is up to date
    total, sums = 0.0, [torch.zeros_like(each) for each in expected]
    drawings = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    for group in (group for drawing in drawings for group in drawing):
        own = torch.isin(labels, torch.tensor(group)).nonzero().squeeze(1)
        out = rows[own]
        task.see(out, own)
        _, targets = task.targets(Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel()))
        first, second, label, _ = targets.unbind(dim=1)
        inside = torch.isin(targets[:, :2], own).all(dim=1)
        same = labels[first] == labels[second]
        weight = torch.where(label > 0, torch.where(inside, 1.0, 0.5), inside * torch.where(same, 1.0, 3.0)).sum()
        loss = task.loss(out, targets) * float(weight) / len(drawings)
        total += float(loss.detach())
        for each, piece in zip(sums, torch.autograd.grad(loss, [rows, decoder.weight]), strict=True):
            each += piece
    assert total == pytest.approx(float(losses.sum().detach()), rel=1e-5)
    for each, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)


def test_a_batch_of_all_nodes_has_no_rare_meetings() -> None:
    parts = splits()
    task, _ = bound(parts, 4, 2)  # as in a run that ends with exact steps
    rows = torch.randn(48, 4)
    task.see(rows, torch.arange(48))
    source, target = parts[0].edge_label_index
    scores = (rows[source] * rows[target]).sum(dim=1)
    expected = F.binary_cross_entropy_with_logits(scores, parts[0].edge_label.float())
    torch.testing.assert_close(task.loss(rows, task.targets_of_graph(parts[0])[1]), expected)
    result = gas.fit(encoder(), parts, task="link", num_parts=4, batch_size=2, epochs=3, exact_epochs=2)
    assert len(result.epochs) == 3


@pytest.mark.parametrize("model", ["gcn", "graphsage"])
def test_gradients_are_compared_with_full_batch(model: str) -> None:
    """Exact histories and outputs, and negatives inside parts, where weights are 1: the last layer's add up."""
    parts = splits()
    train, labels = parts[0], gas.HaloLoader(parts[0], 4).labels
    source, target = train.edge_label_index
    kept = (train.edge_label > 0) | (labels[source] == labels[target])
    train.edge_label_index, train.edge_label = train.edge_label_index[:, kept], train.edge_label[kept]
    assert int((train.edge_label == 0).sum()) > 0
    torch.manual_seed(1)
    task = LinkPrediction("bilinear", width=8)
    task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    loader = gas.HaloLoader(train, partition=labels, batch_size=2, shuffle=True)
    task.prepare(loader)
    scaled = gas.autoscale(build_model(model, train, 8, hidden=16, dropout=0.0), train)
    rows = gas.infer(scaled, loader, update_histories=True)
    task.see(rows, torch.arange(48))
    found = gas.diagnose(scaled, loader, "gradients", task=task)["gradients"]
    by_name = {layer["layer"]: layer for layer in found["layers"]}
    assert by_name["convs.1"]["relative_error"] < 1e-4
    assert by_name["convs.0"]["relative_error"] > 1e-3
    assert found["compensated"]["relative_error"] < 1e-3
    assert torch.equal(task.state_dict()["outputs"], rows)  # it was no training


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"compensate": "gradient"}, True),
        ({"compensate": "gradient", "refresh": 1}, False),
        ({"compensate": "momentum"}, True),
        ({"lipschitz": 0.1}, False),
        ({"accumulate": 2}, True),
    ],
    ids=str,
)
def test_options_of_steps(options: dict[str, Any], drawn: bool) -> None:
    parts = splits(negatives=not drawn)
    result = gas.fit(encoder(), parts, task="link", num_parts=8, batch_size=4, epochs=12, lr=0.02, **options)
    assert result.epochs[-1].loss < result.epochs[0].loss


def test_measuring_gradients_changes_no_bit(tmp_path: Path) -> None:
    def run(**options: Any) -> Weights:
        model = encoder()
        fixed: dict[str, Any] = {"num_parts": 8, "batch_size": 4, "epochs": 3, "run_dir": str(tmp_path / str(options))}
        gas.fit(model, splits(negatives=False), task="link", **fixed, **options)
        return weights_of(model)

    watched = run(diagnose=["gradients", "staleness"], diagnose_every=1)
    assert same_bits(watched, run(diagnose_every="never"))
    found = read_run(tmp_path / str({"diagnose": ["gradients", "staleness"], "diagnose_every": 1})).gradients
    assert len(found) == 3
    assert all(0 < each["cosine"] < 1 for each in found)


@pytest.mark.gpu
def test_a_gpu_trains_on_links_as_a_cpu_does() -> None:
    options: dict[str, Any] = {"num_parts": 8, "batch_size": 4, "drawings": 2, "epochs": 20}
    parts = splits(negatives=True)
    on_gpu, on_cpu = (gas.fit(encoder(), parts, task="link", device=device, **options) for device in ("cuda", "cpu"))
    assert on_gpu.epochs[-1].loss == pytest.approx(on_cpu.epochs[-1].loss, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["full batch", "batches on the device", "batches on the host"])
@pytest.mark.parametrize("kind", ["given", "drawn", "typed"])
def test_captured_steps_give_the_numbers_of_uncaptured_ones(kind: str, where: str, tmp_path: Path) -> None:
    """Also with negatives that are drawn: a replay draws what the step would have drawn."""
    parts = typed_splits() if kind == "typed" else splits(negatives=kind == "given")
    batches: dict[str, Any] = {"num_parts": 8, "batch_size": 4, "drawings": 2, "batches_on": where.split()[-1]}

    def run(name: str, **options: Any) -> tuple[gas.FitResult, Weights]:
        torch.manual_seed(5)
        model: nn.Module = Relational() if kind == "typed" else encoder()
        task = LinkPrediction("distmult" if kind == "typed" else "bilinear", width=8)
        fixed: dict[str, Any] = {"epochs": 20, "lr": 0.005, "device": "cuda", "run_dir": str(tmp_path / name)}
        fixed |= {"mode": "full"} if where == "full batch" else batches
        # Diagnostics and evaluations between captured steps must leave no trace either.
        fixed |= {"diagnose": ["gradients"], "diagnose_every": 5, "evaluate_every": 4}
        return gas.fit(model, parts, task=task, **fixed, **options), weights_of(model)

    (captured, weights), (plain, others) = run("captured"), run("plain", capture=False)
    assert captured.how.startswith("captured as")
    assert plain.how.startswith("uncaptured, since this was asked for")
    assert [each.loss for each in captured.epochs] == pytest.approx([each.loss for each in plain.epochs], rel=2e-4)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("own", [24, None])
def test_the_loss_reads_no_values_so_that_a_gpu_can_capture_it(typed: bool, own: int | None) -> None:
    parts = typed_splits() if typed else splits(negatives=False)
    task, _ = bound(parts, 4, 2, decoder="distmult" if typed else "bilinear", width=4)
    nodes = torch.arange(parts[0].num_nodes)[:own]
    _, targets = task.targets(Data(n_id=nodes, batch_size=nodes.numel(), num_nodes=nodes.numel()))
    warm_up = torch.zeros(nodes.numel(), 4)
    task.see(warm_up, nodes)
    task.loss(warm_up, targets)
    with FakeTensorMode(allow_non_fake_inputs=True) as without_values:
        out = without_values.from_tensor(torch.zeros(nodes.numel(), 4))
        task.see(out, without_values.from_tensor(nodes))
        loss = task.loss(out, without_values.from_tensor(targets))
    assert loss.shape == ()


def test_few_edges_of_the_training_split_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnautoscale.tasks.link._MOST_RANKED", 5)
    task, _ = bound(splits(), metric="MRR")
    data, ranked = splits()[0], []

    def ranks(decoder: nn.Module, out: Tensor, pairs: Any, *_: Any, **__: Any) -> Tensor:
        ranked.append(pairs.ends.size(1))
        return torch.ones(pairs.ends.size(1))

    monkeypatch.setattr("gnnautoscale.tasks.link.ranks", ranks)
    task.score(torch.zeros(48, 2), data, "train")
    task.score(torch.zeros(48, 2), data, "val")
    assert ranked == [5, int((data.edge_label > 0).sum())]


def test_scores_are_those_of_the_plain_model() -> None:
    parts, model, task = splits(), encoder(), LinkPrediction("bilinear", width=8)
    result = gas.fit(model, parts, task=task, num_parts=4, batch_size=2, epochs=3)
    plain = encoder().eval()
    plain.load_state_dict(model.state_dict())
    decoder = task.module
    assert decoder is not None
    with torch.no_grad():
        for split, data in zip(("train", "val", "test"), parts, strict=True):
            z = plain(data.x, data.edge_index)
            source, target = data.edge_label_index
            expected = 100 * roc_auc(decoder(z[source], z[target]), data.edge_label > 0)
            assert result.scores[split] == pytest.approx(expected, abs=1e-6)
            out = gas.infer(model, gas.HaloLoader(data, 3))
            torch.testing.assert_close(
                task.scores(out, data.edge_label_index), decoder(z[source], z[target]), rtol=1e-4, atol=1e-5
            )


class Spy(MessagePassing):  # type: ignore[misc]
    """Writes down between which nodes messages pass."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(1 + FEATURES, 8)
        self.passed: set[tuple[int, int]] = set()
        self.trained: set[tuple[int, int]] = set()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(self.propagate(edge_index, x=x))
        return out

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        between = set(zip(x_j[:, 0].long().tolist(), x_i[:, 0].long().tolist(), strict=True))
        self.passed |= between
        self.trained |= between if self.training else set()
        return x_j


@pytest.mark.parametrize(
    ("mode", "leaky"),
    [*((mode, False) for mode in ("gas", "exact", "full", "cluster", "sage")), ("gas", True), ("sage", True)],
)
def test_no_edge_that_is_asked_about_passes_a_message(leaky: bool, mode: str) -> None:
    parts = splits(disjoint=0.0 if leaky else 0.4)
    for data in parts:
        data.x = torch.cat([torch.arange(data.num_nodes).float().unsqueeze(1), data.x], dim=1)
    spy = Spy()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = spy

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index)
            return out

    def asked(data: Data) -> set[tuple[int, int]]:
        pairs = data.edge_label_index[:, data.edge_label > 0]
        return {(a, b) for a, b in torch.cat([pairs, pairs.flip(0)], dim=1).t().tolist()}

    model, task = Model(), LinkPrediction(reconstruct=leaky)
    further: dict[str, Any] = {"fan_out": [3]} if mode == "sage" else {}
    gas.fit(model, parts, task=task, num_parts=4, batch_size=2, epochs=1, mode=mode, **further)
    assert spy.passed
    assert not asked(parts[2]) & spy.passed  # in training, and when all splits were scored
    assert spy.trained
    assert bool(asked(parts[0]) & spy.trained) == leaky


# What is refused #####################################################################################################


def fit_links(parts: Any, **options: Any) -> gas.FitResult:
    return gas.fit(encoder(), parts, **{"task": "link", "num_parts": 4, "batch_size": 2, "epochs": 1, **options})


def test_training_on_edges_that_pass_messages_is_refused_unless_wanted() -> None:
    parts = splits(disjoint=0.0)
    count = int((parts[0].edge_label > 0).sum())
    with pytest.raises(
        InputError, match=rf"positives of the train split .* but got {count} of {count} that are.*disjoint"
    ):
        fit_links(parts)
    fit_links(parts, task=LinkPrediction(reconstruct=True))


@pytest.mark.parametrize("direction", [[0, 1], [1, 0]])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_single_leaked_edge_is_refused(direction: list[int], place: int) -> None:
    parts = splits()
    leaked = parts[2].edge_label_index[direction, :1]
    parts[place].edge_index = torch.cat([parts[place].edge_index, leaked], dim=1)
    with pytest.raises(
        InputError, match=r"positives of the test split must not be edges that pass messages.* got 1 of"
    ):
        fit_links(parts)


def test_a_test_pair_that_was_trained_on_is_refused() -> None:
    parts = splits()
    parts[0].edge_label_index = torch.cat([parts[0].edge_label_index, parts[2].edge_label_index[:, :1].flip(0)], dim=1)
    parts[0].edge_label = torch.cat([parts[0].edge_label, torch.ones(1)])
    with pytest.raises(InputError, match="test split must not be among those of the train split, but got 1 of"):
        fit_links(parts)


@pytest.mark.parametrize("by", [0, 3])
def test_a_leaked_triple_is_refused_and_another_relation_is_not(by: int) -> None:
    parts = typed_splits()
    (source, target), kind = parts[1].edge_label_index[:, 0], parts[1].edge_label_type[0]
    pair = torch.stack([source, target] if by == 0 else [target, source]).unsqueeze(1)
    parts[1].edge_index = torch.cat([parts[1].edge_index, pair], dim=1)
    task = LinkPrediction("distmult", width=8)
    parts[1].edge_type = torch.cat([parts[1].edge_type, (kind + by).unsqueeze(0)])
    with pytest.raises(InputError, match="positives of the val split must not be edges that pass messages"):
        gas.fit(Relational(), parts, task=task, num_parts=2, epochs=1)


def broken(**changes: Any) -> Splits:
    parts = splits()
    for name, value in changes.items():
        parts[0][name] = value
    return parts


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        (splits()[0], {}, "link prediction needs a graph for each split, but got one graph for several"),
        (splits()[:2], {}, "data must be a torch_geometric.data.Data or HeteroData, three"),
        (broken(edge_label_index=None), {}, "link prediction needs labelled pairs"),
        (broken(edge_label_index=torch.ones(2, 3)), {}, "edge_label_index must hold nodes as int64"),
        (broken(edge_label_index=torch.tensor([[0], [99]])), {}, "nodes from 0 to 47, but got values from 0 to 99"),
        (broken(edge_label_index=torch.ones(3, 2, dtype=torch.long)), {}, r"edge_label_index must be \[2, pairs\]"),
        (broken(edge_label=torch.ones(1)), {}, r"edge_label must be \["),
        (broken(edge_label=torch.zeros(splits()[0].edge_label.numel())), {}, "the train split needs at least one pair"),
        (broken(edge_label_type=torch.tensor([1])), {}, "edge_label_type must be int64 from 0"),
        (splits(), {"metric": "accuracy"}, "a metric of links is ROC-AUC, average-precision, MRR or Hits@k"),
        (splits(), {"metric": "hits@0"}, "a metric of links is"),
        (splits(), {"class_weight": "balanced"}, "link prediction has no classes to weigh"),
        (splits(), {"lipschitz": 0.1, "exact_epochs": 1}, "exact steps of LinkPrediction.* have no lipschitz"),
        (splits(), {"task": LinkPrediction("distmult")}, "a decoder is dot or bilinear for edges without types"),
    ],
)
def test_what_does_not_fit_is_refused(parts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_links(parts, **options)


@pytest.mark.parametrize("options", [{"negatives": 0}, {"candidates": 2.5}, {"width": -1}])
def test_odd_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be an integer of at least 1"):
        LinkPrediction(**options)


def test_an_encoder_must_return_rows() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gcn = encoder()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.gcn(x, edge_index).sum(dim=1)
            return out

    with pytest.raises(InputError, match="one row per node"):
        gas.fit(Flat(), splits(), task="link", num_parts=4, batch_size=2, epochs=1)


# Negatives ###########################################################################################################


def test_negatives_stand_for_all_pairs_of_the_graph_and_are_no_edges() -> None:
    parts = splits(negatives=False)
    task, labels = bound(parts, 8, 4, negatives=400)
    own = (labels < 4).nonzero().squeeze(1)
    task.see(torch.zeros(own.numel(), 4), own)
    _, targets = task.targets(Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel()))
    source, target, label, relation = targets.unbind(dim=1)
    first, second, _, weight = task._draw(source, target, relation, label.float())
    assert bool(torch.isin(torch.cat([first, second]), own).all())  # their gradients flow
    assert first.numel() == 5 * 400 * label.numel()  # five times as many as they stand for, to be less noisy
    assert float(weight.sum()) == pytest.approx(400 * float(label.sum()), rel=1e-4)
    pairs = torch.cat([parts[0].edge_index, parts[0].edge_label_index, parts[0].edge_label_index.flip(0)], dim=1)
    edges = {tuple(pair) for pair in pairs.t().tolist()}
    used = torch.stack([first, second], dim=1)[weight > 0].tolist()
    assert not edges & {tuple(pair) for pair in used}
    assert all(a != b for a, b in used)
    # Four parts of eight meet in 3 of 7 drawings; inside a part, pairs always meet.
    same, real = labels[first] == labels[second], weight > 0
    assert float(weight[real & ~same][0] / weight[real & same][0]) == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("options", "chance"), [((1, 1), 1.0), ((4, 4), 1.0), ((4, 2), 1 / 3), ((5, 2), (2 + 2 + 0) / 20)]
)
def test_how_often_parts_meet(options: tuple[int, int], chance: float) -> None:
    loader = gas.HaloLoader(splits()[0], options[0], batch_size=options[1], shuffle=True, partition="random")
    assert Meetings.of(loader).chance == pytest.approx(chance)


@pytest.mark.parametrize("options", [{"num_parts": 4}, {"num_parts": 4, "batch_size": 1, "drawings": 2}])
def test_parts_that_never_meet_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="batches must consist of several parts, drawn anew, but got 4 parts, 1 in"):
        gas.fit(encoder(), splits(), task="link", epochs=1, **options)


def test_negatives_of_typed_edges_keep_a_known_end() -> None:
    parts = typed_splits()
    task, _ = bound(parts, decoder="distmult", negatives=50, width=4)
    task.see(torch.zeros(30, 4), torch.arange(30))
    _, targets = task.targets_of_graph(parts[0])
    source, target, label, relation = targets.unbind(dim=1)
    heads, tails, kinds, weight = task._draw(source, target, relation, label.float())
    assert kinds.numel() == 50 * label.numel()  # full batch draws as many as were asked for
    assert torch.equal(kinds, relation.repeat(50))
    same_head, same_tail = heads == source.repeat(50), tails == target.repeat(50)
    assert bool((same_head | same_tail).all())
    assert 0.4 < float(same_head.double().mean()) < 0.6
    known = {tuple(row) for row in torch.stack([source, relation, target], dim=1).tolist()}
    rows = torch.stack([heads, kinds, tails], dim=1)[weight > 0].tolist()
    assert not known & {tuple(row) for row in rows}


def test_given_negatives_are_taken_and_none_is_drawn() -> None:
    task = LinkPrediction()
    task.bound_to(Dataset("links", *splits()), metric=None, class_weight="none")
    assert task._draws == 0
    task.bound_to(Dataset("links", *splits(negatives=False)), metric=None, class_weight="none")
    assert task._draws == 1


# Training ############################################################################################################


@pytest.mark.parametrize(
    ("options", "negatives"), [({"mode": "cluster"}, True), ({"mode": "sage", "fan_out": [4, 4]}, False)]
)
def test_the_baselines_learn_links(options: dict[str, Any], negatives: bool) -> None:
    losses = [epoch.loss for epoch in fit_links(splits(negatives=negatives), epochs=10, **options).epochs]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_joined_parts_score_the_pairs_inside() -> None:
    parts = splits()
    task, labels = bound(parts, 4, 2)
    task.prepare(ClusterLoader(parts[0], 4, batch_size=2))
    own = (labels < 2).nonzero().squeeze(1)
    batch = Data(n_id=own, batch_size=own.numel(), num_nodes=own.numel())
    _, targets = task.targets(batch)
    inside = torch.isin(parts[0].edge_label_index, own).all(dim=0)
    assert 0 < int(inside.sum()) < inside.numel()
    assert torch.equal(targets[:, :2].t(), parts[0].edge_label_index[:, inside])
    rows = torch.randn(own.numel(), 3)
    task.see(rows, own)
    source, target = torch.searchsorted(own, targets[:, :2].t().contiguous())
    scores, label = (rows[source] * rows[target]).sum(dim=1), targets[:, 2].float()
    torch.testing.assert_close(task.loss(rows, targets), F.binary_cross_entropy_with_logits(scores, label))


@pytest.mark.parametrize(
    ("mode", "negatives", "metric"),  # each kind of metric with and without negatives
    [
        ("binary", True, "ROC-AUC"),
        ("triplet", False, "average-precision"),
        ("triplet", True, "MRR"),
        ("binary", False, "Hits@3"),
    ],
)
def test_links_are_learned(mode: str, negatives: bool, metric: str) -> None:
    parts = splits(negatives=negatives)
    parts = parts if mode == "binary" else tuple(map(as_triplets, parts))
    result = fit_links(parts, epochs=25, metric=metric)
    assert (result.metric, result.percent) == (metric, True)
    losses = [epoch.loss for epoch in result.epochs]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert result.scores["val"] == max(epoch.scores["val"] for epoch in result.epochs)
    assert 0 <= result.scores["test"] <= 100


def test_typed_edges_and_a_decoder_of_one_s_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.score = nn.Embedding(3, 4), nn.Linear(20, 1)

        def forward(self, source: Tensor, target: Tensor, relation: Tensor) -> Tensor:
            score: Tensor = self.score(torch.cat([source, target, self.kinds(relation)], dim=1))
            return score.squeeze(1)

    for decoder in ("distmult", Own()):
        torch.manual_seed(1)
        task = LinkPrediction(decoder, metric="MRR", negatives=4, width=8)
        result = gas.fit(Relational(), typed_splits(), task=task, num_parts=4, batch_size=2, epochs=8, lr=0.03)
        assert result.epochs[-1].loss < result.epochs[0].loss
        assert 0 < result.scores["val"] <= 100


@pytest.mark.parametrize("negatives", [True, False])
def test_a_run_resumes_with_the_same_bits(tmp_path: Path, negatives: bool) -> None:
    parts = splits(negatives=negatives)

    def task() -> LinkPrediction:
        torch.manual_seed(2)
        return LinkPrediction(Bilinear(8))

    options: dict[str, Any] = {"num_parts": 6, "batch_size": 2}
    whole, resumed, first, second = encoder(), encoder(), task(), task()
    gas.fit(whole, parts, task=first, epochs=4, **options)
    options |= {"run_dir": str(tmp_path / "run")}
    gas.fit(encoder(), parts, task=task(), epochs=2, checkpoint_dir=str(tmp_path / "kept"), **options)
    gas.fit(resumed, parts, task=second, epochs=4, resume=str(tmp_path / "kept"), **options)
    assert same_bits(weights_of(gas.detach(whole)), weights_of(gas.detach(resumed)))
    assert first.module is not None
    assert second.module is not None
    assert same_bits(weights_of(first.module), weights_of(second.module))
    record = read_run(tmp_path / "run")
    assert record.run["data"]["train positives"] == int((parts[0].edge_label > 0).sum())
    other = splits(negatives=negatives)
    other[0].edge_label_index = other[0].edge_label_index.flip(1)
    with pytest.raises(InputError, match="graph"):
        gas.fit(encoder(), other, task=task(), epochs=4, resume=str(tmp_path / "kept"), **options)


def test_partners_leave_out_what_is_known() -> None:
    parts, task = splits(), LinkPrediction()
    task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    out = torch.rand(48, 4)
    nodes, scores = task.partners(out, node=5, count=10)
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    torch.testing.assert_close(scores, out[nodes] @ out[5])
    known = torch.cat([part.edge_index for part in parts], dim=1)
    assert not set(nodes.tolist()) & {5, *known[1, known[0] == 5].tolist()}
    everybody, _ = task.partners(out, node=5, count=99, new=False)
    assert sorted(everybody.tolist()) == [node for node in range(48) if node != 5]
    with pytest.raises(InputError, match="node must be from 0 to 47"):
        task.partners(out, node=48, count=1)
