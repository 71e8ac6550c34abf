"""``fit`` on several ranks, with targets of links, of graphs, and with graphs of their own for validation and test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics.functional  # noqa: F401  # it takes long, and ranks inherit what is imported
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCN, GIN  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import whole
from gnnautoscale import ranks
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.data import Dataset, generate
from gnnautoscale.runs import read_run
from gnnautoscale.tasks import Bilinear, GraphPrediction, LinkPrediction, NodeClassification, Task
from gnnautoscale.tasks.link_rows import PairRows
from gnnautoscale.training import FitOptions
from gnnautoscale.training.checkpoint import load_latest
from gnnautoscale.training.optimizer import make_optimizer
from support.communities import CLASSES, FEATURES, Weights, community_graph, same_bits, weights_of
from support.links import Splits, splits
from support.ranks import outcomes, run_ranks

SPLITS = ("train", "val", "test")
LINKS: dict[str, Any] = {"num_parts": 16, "batch_size": 4, "epochs": 2}


class Run(NamedTuple):
    """What a rank returns."""

    result: gas.FitResult
    weights: Weights


def encoder(width: int = 8) -> GCN:
    torch.manual_seed(1)
    return GCN(FEATURES, 16, num_layers=2, out_channels=width)


def learner(model: nn.Module, task: Task) -> nn.ModuleDict:
    """All that is trained."""
    return nn.ModuleDict({"model": model, **({} if task.module is None else {"task": task.module})})


def fit(model: nn.Module, data: Any, task: Any, **options: Any) -> Run:
    result = gas.fit(model, data, task=task, **options)
    return Run(result, weights_of(learner(model, task)))


def fit_links(parts: Splits, **options: Any) -> Run:
    model, metric = encoder(), options.pop("metric", "ROC-AUC")
    return fit(model, parts, LinkPrediction(Bilinear(8), metric=metric), **{**LINKS, **options})


def plain(result: gas.FitResult) -> dict[str, Any]:
    """What does not depend on the time that it took, nor on the rank."""
    values = result.to_dict()
    for name in ("seconds", "options", "peak_memory"):
        del values[name]
    return {**values, "epochs": [{**epoch, "seconds": 0} for epoch in values["epochs"]]}


def check_alike(found: list[Run]) -> None:
    """All ranks have the same weights and the same result."""
    assert all(same_bits(run.weights, found[0].weights) for run in found)
    assert all(plain(run.result) == plain(found[0].result) for run in found)


# Links ###############################################################################################################


def few_pairs(parts: Splits) -> Splits:
    """Few pairs to train on, so that some batches have none."""
    train = parts[0].clone()
    train.edge_label_index, train.edge_label = train.edge_label_index[:, :3], train.edge_label[:3]
    return train, *parts[1:]


class Recorded(LinkPrediction):
    """Keeps what it meets, so that one process can do the same."""

    def prepare(self, loader: Any) -> None:
        """Also keep what parts a rank has."""
        super().prepare(loader)
        self.met = loader.nodes, loader.parts_in_batches, loader.labels_of_all()
        self.steps: list[Tensor] = []
        self.random: dict[int, Tensor] = {}

    def see(self, out: Any, nodes: Tensor) -> None:
        """Also keep the nodes of the batch."""
        super().see(out, nodes)
        self.steps.append(nodes.clone())

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """Also keep what random numbers come next."""
        self.random[len(self.steps) - 1] = torch.get_rng_state()
        return super().loss(out, targets)


def train_recorded(parts: Splits) -> tuple[Any, list[Tensor], dict[int, Tensor], Weights, list[float]]:
    torch.manual_seed(2)
    task, model, last = Recorded(Bilinear(8)), encoder(), dict[str, Tensor]()

    def keep(epoch: Any) -> None:
        last.update(weights_of(learner(model, task)))

    result = gas.fit(model, parts, task=task, callback=keep, **LINKS)
    return task.met, task.steps, task.random, last, [epoch.loss for epoch in result.epochs]


class OneProcess:
    """Runs a model on the batches of all ranks, each with the histories as of the step before."""

    def __init__(self, model: nn.Module, graph: Data) -> None:
        self.model, self.loader = gas.autoscale(model, graph), gas.HaloLoader(graph, num_parts=1)

    def outs(self, step: list[Tensor]) -> list[Tensor]:
        """The outputs of batches, given their nodes."""
        histories = attached(self.model).memory.histories
        before = {slot: history.raw.clone() for slot, history in histories.items()}
        outs, after = [], []
        for nodes in step:
            for slot, history in histories.items():
                history.raw.copy_(before.get(slot, torch.zeros_like(history.raw)))
            outs.append(self.model(self.loader.batch_for(nodes)))
            after.append({slot: history.raw[nodes].clone() for slot, history in histories.items()})
        for nodes, pushed in zip(step, after, strict=True):
            for slot, rows in pushed.items():
                histories[slot].raw[nodes] = rows
        return outs


class OneOf:
    """Stands for a rank in one process that does the work of all of them."""

    def __init__(self, rank: int, met: list[Any]) -> None:
        self.rank, self.met, self.outs = rank, met, list[tuple[Tensor, Tensor]]()
        self.loader: Any = SimpleNamespace(
            world=self, joined_nodes=met[rank][0], parts_in_batches=met[rank][1], shuffle=True
        )
        self.loader.labels_of_all = lambda: met[rank][2]

    def gather(self, value: Any) -> list[Any]:
        """What all ranks gave."""
        return [(nodes, sizes) for nodes, sizes, _ in self.met]

    def rows_of_others(self, *tables: Tensor) -> list[Tensor]:
        """What the others computed in this step."""
        others = [each for rank, each in enumerate(self.outs) if rank != self.rank]
        return [torch.cat(each) for each in zip(*others, strict=True)]


def in_one_process(
    parts: Splits, met: list[Any], steps: list[list[Tensor]], random: list[dict[int, Tensor]]
) -> tuple[Weights, list[float]]:
    """Adds up the gradients of all ranks' batches, each with the histories as of the step before, and its negatives."""
    torch.manual_seed(2)
    decoder, model = Bilinear(8), encoder()
    alone = OneProcess(model, Data(x=parts[0].x, edge_index=parts[0].edge_index))
    optimizer = make_optimizer(model, FitOptions.of(LINKS), also=decoder)
    everyone, tasks = [OneOf(rank, met) for rank in range(len(met))], []
    for rank in everyone:
        task = LinkPrediction(decoder)
        task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
        task._rows = PairRows.on_ranks(task._training_pairs, rank.loader)
        tasks.append(task)
    losses, total, count = [], 0.0, 0
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        outs = alone.outs(step)
        counting = [number in each for each in random]
        for place, (task, nodes, out) in enumerate(zip(tasks, step, outs, strict=True)):
            everyone[place].outs = [(each, rows.detach()) for each, rows in zip(step, outs, strict=True)]
            task.see(out, nodes)
            _, targets = task.targets(Data(n_id=nodes, batch_size=nodes.numel(), num_nodes=nodes.numel()))
            assert counting[place] == (targets.size(0) > 0)
            if counting[place]:
                torch.set_rng_state(random[place][number])
                loss = task.loss(out, targets)
                (loss / sum(counting)).backward()  # type: ignore[no-untyped-call]
                total, count = total + float(loss.detach()) * targets.size(0), count + targets.size(0)
        if any(counting):
            optimizer.step()
        if (number + 1) % (len(steps) // LINKS["epochs"]) == 0:
            losses.append(total / count)
            total, count = 0.0, 0
    return weights_of(nn.ModuleDict({"model": gas.detach(model), "task": decoder})), losses


@pytest.mark.parametrize(("size", "few"), [(2, True), (3, False)])
def test_a_step_on_links_is_that_of_one_process_on_all_batches(size: int, few: bool) -> None:
    parts = splits(negatives=False)
    parts = few_pairs(parts) if few else parts
    found = run_ranks(size, train_recorded, parts)
    steps = [list(step) for step in zip(*(nodes for _, nodes, *_ in found), strict=True)]
    random = [each for _, _, each, *_ in found]
    alone = [number for number in range(len(steps)) if len({number in each for each in random}) > 1]
    assert bool(alone) == few, "some ranks have nothing to learn in steps in which others have"
    weights, losses = in_one_process(parts, [met for met, *_ in found], steps, random)
    for *_, last, loss in found:
        assert loss == pytest.approx(losses, rel=1e-4)
        for name, wanted in weights.items():
            torch.testing.assert_close(last[name], wanted, rtol=1e-3, atol=1e-4)


def test_links_are_scored_as_in_one_process_and_the_same_seed_gives_the_same(tmp_path: Path) -> None:
    parts = splits(negatives=False)
    found = run_ranks(2, fit_links, parts, metric="MRR", run_dir=str(tmp_path / "run"))
    check_alike(found)
    again = run_ranks(2, fit_links, parts, metric="MRR", run_dir=str(tmp_path / "again"))
    for one, other in zip(found, again, strict=True):
        assert same_bits(one.weights, other.weights)
        assert plain(one.result) == plain(other.result)
    model, task = encoder(), LinkPrediction(Bilinear(8), metric="MRR")
    task.bound_to(Dataset("links", *parts), metric=None, class_weight="none")
    learner(model, task).load_state_dict(found[0].weights)
    scores = {split: task.score(whole(model, each), each, split) for split, each in zip(SPLITS, parts, strict=True)}
    assert found[0].result.scores == pytest.approx(scores, rel=1e-4)
    record = read_run(tmp_path / "run")
    assert record.run["data"]["nodes"] == 48
    assert record.run["data"]["ranks"] == 2
    assert record.run["data"]["train positives"] == parts[0].edge_label_index.size(1)


def test_one_rank_is_no_torchrun() -> None:
    parts = splits(negatives=False)
    (alone,), plain_run = run_ranks(1, fit_links, parts), fit_links(parts)
    assert same_bits(alone.weights, plain_run.weights)


@pytest.mark.parametrize(
    "options",
    [
        {"compensate": "gradient", "drawings": 2},
        {"lipschitz": 0.1, "refresh_every": "epoch", "lag": 1, "history_dtype": "int8", "edge_dropout": 0.2},
    ],
)
def test_options_of_steps_run_with_links_on_ranks(options: dict[str, Any]) -> None:
    found = run_ranks(2, fit_links, few_pairs(splits()), **options)
    check_alike(found)
    assert found[0].result.steps > 0


class StopError(Exception):
    """Ends a run."""


def interrupted(work: Any, folder: Path, data: Any, **options: Any) -> None:
    """A run that fails on all ranks after two epochs."""

    def fail(epoch: Any) -> None:
        if epoch.number == 2:
            raise StopError

    with pytest.raises(StopError):
        work(data, callback=fail, checkpoint_dir=str(folder), **options)


@pytest.mark.parametrize("kind", ["links", "graphs"])
def test_a_run_resumes_with_the_same_bits_and_on_other_ranks(kind: str, tmp_path: Path) -> None:
    work, data = (fit_links, few_pairs(splits(negatives=False))) if kind == "links" else (fit_graphs, large_graphs())
    options = {"epochs": 2, "checkpoint_every": 1}
    plain_run = run_ranks(2, work, data, **options)
    run_ranks(2, interrupted, work, tmp_path, data, **options)
    for path in sorted(tmp_path.glob("checkpoint-?????????.pt"))[-1:]:  # go on in the middle of the second epoch
        for each in tmp_path.glob(f"{path.stem}.*"):
            each.unlink()
    resumed = run_ranks(2, work, data, resume=str(tmp_path), **options)
    for one, other in zip(plain_run, resumed, strict=True):
        assert same_bits(one.weights, other.weights)
        assert plain(one.result) == plain(other.result)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    rows = checkpoint.state["task"]["outputs" if kind == "links" else "pooled"]
    assert int((rows != 0).any(dim=1).sum()) == (48 if kind == "links" else 9), "rows of all ranks"
    found = run_ranks(1 if kind == "links" else 3, work, data, resume=str(tmp_path), **options)
    check_alike(found)
    assert [epoch.number for epoch in found[0].result.epochs] == [1, 2]


# Graphs ##############################################################################################################


def small_graphs(count: int = 24, nodes: int = 3, *, dtype: torch.dtype = torch.float32) -> Dataset:
    """Random graphs, whose class shifts their features, and one of no known class."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        size, kind = nodes + number % 7, number % 2
        edge_index = torch.randint(size, (2, 3 * size), generator=generator)
        x = torch.randn(size, 4, generator=generator).to(dtype) + kind
        found.append(Data(x=x, edge_index=edge_index, y=torch.tensor([-1 if number == 3 else kind])))
    return Dataset.of_graphs((found[: count - 8], found[count - 8 : count - 4], found[count - 4 :]))


def large_graphs(dtype: torch.dtype = torch.float32) -> Dataset:
    """Graphs of several parts each, which ranks share."""
    return small_graphs(12, 20, dtype=dtype)


def gin(dtype: torch.dtype = torch.float32) -> GIN:
    torch.manual_seed(1)
    return GIN(4, 6, num_layers=2, out_channels=5, norm=None).to(dtype)


def fit_graphs(data: Dataset, **options: Any) -> Run:
    torch.manual_seed(3)
    task = GraphPrediction(options.pop("readout", "mean"), width=5)
    return fit(gin(), data, task, **{"num_parts": 12, "batch_size": 2, "epochs": 2, **options})


@pytest.mark.parametrize(("size", "kind", "readout"), [(3, "small", "max"), (2, "large", "attention")])
def test_graphs_are_scored_as_in_one_process(size: int, kind: str, readout: str) -> None:
    data = small_graphs() if kind == "small" else large_graphs()
    found = run_ranks(size, fit_graphs, data, readout=readout)
    check_alike(found)
    torch.manual_seed(3)
    model, task = gin(), GraphPrediction(readout, width=5)  # type: ignore[arg-type]
    task.bound_to(data, metric=None, class_weight="none")
    learner(model, task).load_state_dict(found[0].weights)
    expected = {split: task.score(whole(model, graph), graph, split) for graph, (split,) in data.graphs()}
    assert found[0].result.scores == pytest.approx(expected)


def test_options_of_steps_run_with_graphs_on_ranks() -> None:
    found = run_ranks(2, fit_graphs, large_graphs(), compensate="gradient", refresh_every="epoch", patience=1, epochs=3)
    check_alike(found)
    assert found[0].result.steps > 0


def train_graphs(data: Dataset, parts: int, each: int) -> tuple[Weights, list[Tensor]]:
    """Weights after some steps in double precision, and the nodes of this rank's batches."""
    torch.manual_seed(3)
    model, task, last = gin(torch.double), SeenGraphs("mean", width=5), dict[str, Tensor]()

    def keep(epoch: Any) -> None:
        last.update(weights_of(learner(model, task)))

    task.bound_to(data, metric=None, class_weight="none")
    assert task.module is not None
    task.module.double()
    gas.fit(model, data, task=task, callback=keep, num_parts=parts, batch_size=each, epochs=3)
    return last, task.steps


class SeenGraphs(GraphPrediction):
    """Keeps the nodes of batches."""

    def prepare(self, loader: Any) -> None:
        """Begin anew."""
        super().prepare(loader)
        self.steps: list[Tensor] = []

    def see(self, out: Any, nodes: Tensor) -> None:
        """Also keep the nodes of the batch."""
        super().see(out, nodes)
        self.steps.append(nodes.clone())


def plainly(data: Dataset, steps: list[list[Tensor]]) -> Weights:
    """Each batch pools its own nodes with gradients, and those of other batches of the step as constants."""
    torch.manual_seed(3)
    graph, model, task = data.train, gin(torch.double), GraphPrediction("mean", width=5)
    task.bound_to(data, metric=None, class_weight="none")
    assert isinstance(task.module, nn.ModuleDict)
    head: Any = task.module["head"].double()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.01)
    sizes, known = torch.bincount(graph.graph_id).double(), graph.graph_y >= 0
    alone = OneProcess(model, Data(x=graph.x, edge_index=graph.edge_index))
    for step in steps:
        optimizer.zero_grad()
        outs, losses, none = alone.outs(step), [], torch.zeros(sizes.numel(), 5, dtype=torch.double)
        every = graph.graph_id[torch.cat(step)]
        mean = none.index_add(0, every, torch.cat(outs).detach()) / sizes.unsqueeze(1)
        for nodes, out in zip(step, outs, strict=True):
            number = graph.graph_id[nodes]
            own = none.index_add(0, number, out) / sizes.unsqueeze(1)
            share = torch.bincount(number, minlength=sizes.numel()) / sizes
            there = (share > 0) & known
            pooled = mean + (own - own.detach()) / share.clamp(min=1e-9).unsqueeze(1)
            if bool(there.any()):  # else the rank does not count
                each = F.cross_entropy(head(pooled[there]), graph.graph_y[there], reduction="none")
                losses.append((each * share[there]).sum() / share[there].sum())
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights_of(learner(gas.detach(model), task))


@pytest.mark.parametrize(
    ("data", "parts", "each"),
    [
        (small_graphs(dtype=torch.double), 16, 2),  # in some step a rank has no graph of a known class
        (large_graphs(torch.double), 12, 12),  # all parts in each step, so that no pooled row is stale
    ],
    ids=["whole graphs", "shared graphs"],
)
def test_a_step_on_graphs_is_that_of_one_process_on_all_batches(data: Dataset, parts: int, each: int) -> None:
    found = run_ranks(3, train_graphs, data, parts, each)
    steps = [list(step) for step in zip(*(nodes for _, nodes in found), strict=True)]
    graphs = [[set(data.train.graph_id[nodes].tolist()) for nodes in step] for step in steps]
    if each == 2:
        assert any({3} in step for step in graphs), "a rank has nothing to learn"
    else:
        assert len(steps) == 3
        assert any(one & other for one, other in zip(graphs[0], graphs[0][1:], strict=False)), "ranks share graphs"
    expected = plainly(data, steps)
    for weights, _ in found:
        for name, wanted in expected.items():
            torch.testing.assert_close(weights[name], wanted, rtol=1e-6, atol=1e-8)


# Nodes, tasks of the user's own, and what is refused ##################################################################


def apart() -> tuple[Data, Data, Data]:
    """Three graphs: to train, to validate and to test on."""
    found = []
    for number, split in enumerate(("train", "val", "test")):
        data = generate.communities(
            48 - 6 * number, degree=4.0, num_features=FEATURES, num_classes=CLASSES, seed=number
        )
        everywhere = torch.ones(data.num_nodes, dtype=torch.bool)
        found.append(Data(x=data.x, edge_index=data.edge_index, y=data.y, **{f"{split}_mask": everywhere}))
    return found[0], found[1], found[2]


def fit_nodes(data: Any, **options: Any) -> Run:
    task = options.pop("task", NodeClassification(CLASSES))
    return fit(encoder(CLASSES), data, task, **{"num_parts": 8, "batch_size": 2, "epochs": 2, **options})


def test_graphs_of_their_own_are_validated_and_tested_on() -> None:
    data = apart()
    found = run_ranks(2, fit_nodes, data, compensate="gradient", class_weight="balanced")
    check_alike(found)
    model, task = encoder(CLASSES), NodeClassification(CLASSES)
    learner(model, task).load_state_dict(found[0].weights)
    scores = {split: task.score(whole(model, each), each, split) for split, each in zip(SPLITS, data, strict=True)}
    assert found[0].result.scores == pytest.approx(scores)


class Closeness(Task):
    """Predict a number of each node, which is looked up by the node, or is its first feature; score with all data."""

    metric, higher_is_better = "distance", False

    def __init__(self, known: Tensor | None = None) -> None:
        self.known = known

    def targets(self, batch: Data) -> tuple[Tensor | None, Tensor]:
        """Of the nodes to train on."""
        rows = batch.train_mask[: batch.batch_size].nonzero().squeeze(1)
        return rows, batch.x[rows, 0] if self.known is None else self.known[batch.n_id[rows]]

    def loss(self, out: Any, targets: Tensor) -> Tensor:
        """The mean square."""
        return F.mse_loss(out[:, 0], targets)

    def score(self, out: Tensor, data: Data, split: str) -> float:
        """The distance from features, and a sum over edges that only the whole graph has."""
        mask = data[f"{split}_mask"]
        return float((out[mask, 0] - data.x[mask, 0]).abs().mean() + out[data.edge_index[0], 0].sum())


def test_a_task_of_ones_own_sees_numbers_of_the_whole_graph_and_scores_with_all_data() -> None:
    data = community_graph()
    looked_up, given = (run_ranks(2, fit_nodes, data, task=Closeness(known)) for known in (data.x[:, 0].clone(), None))
    check_alike(given)
    assert same_bits(given[0].weights, looked_up[0].weights)
    model = encoder(CLASSES)
    model.load_state_dict({name.removeprefix("model."): value for name, value in given[0].weights.items()})
    out = whole(model, data)
    assert given[0].result.scores == pytest.approx({each: Closeness().score(out, data, each) for each in SPLITS})
    looked_up, alone = run_ranks(2, fit_exactly, data), fit_exactly(data)
    assert [run.result.epochs[-1].loss for run in looked_up] == pytest.approx([alone.result.epochs[-1].loss] * 2)


def fit_exactly(data: Data) -> Run:
    return fit_nodes(data, task=Closeness(data.x[:, 0].clone()), mode="exact")


def test_classes_are_balanced_over_shards_in_files(tmp_path: Path) -> None:
    data = community_graph()
    data.y[:30] = 0
    ranks.write_shards(tmp_path / "shards", data, gas.HaloLoader(data, 8).labels, 2)
    options: dict[str, Any] = {"class_weight": "balanced", "epochs": 1}
    given, read = (run_ranks(2, fit_nodes, each, **options) for each in (data, tmp_path / "shards"))
    assert same_bits(given[0].weights, read[0].weights)


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        ("link", "shards", "folders of shards serve the library's tasks of nodes"),
        (
            GraphPrediction(),
            "shards",
            "folders of shards serve the library's tasks of nodes, but got the task GraphPrediction",
        ),
        (Closeness(torch.ones(0)), "shards", "tasks of nodes, but got the task Closeness"),
        (LinkPrediction(), "few parts", "batches must consist of several parts"),
        (LinkPrediction(), "other pairs", "all ranks must have the same targets"),
        (LinkPrediction(), "other decoder", "all ranks must have the same task"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(task: Any, data: str, message: str, tmp_path: Path) -> None:
    if data == "shards":
        graph = community_graph()
        ranks.write_shards(tmp_path / "shards", graph, torch.arange(graph.num_nodes) % 4, 2)
    for error in outcomes(2, refused, task, data, tmp_path / "shards"):
        assert isinstance(error, gas.InputError), error
        assert message in str(error)


def refused(task: Any, what: str, folder: Path) -> None:
    parts: Any = splits()
    rank = ranks.current().rank
    if what == "other pairs" and rank == 1:
        parts = few_pairs(parts)
    if what == "other decoder" and rank == 1:
        task = LinkPrediction("bilinear", width=8)
    options: dict[str, Any] = {**LINKS, "num_parts": 4, "batch_size": 1} if what == "few parts" else LINKS
    gas.fit(encoder(), folder if what == "shards" else parts, task=task, **options)
