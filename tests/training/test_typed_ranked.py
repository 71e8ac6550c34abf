"""``fit`` on several ranks that share a heterogeneous graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import ranks
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.data import TypedDataset
from gnnautoscale.models import build_model
from gnnautoscale.runs import read_run
from gnnautoscale.training import summary_of
from gnnautoscale.training.checkpoint import load_latest
from gnnautoscale.training.resharding import pieces_of, read_shards
from gnnautoscale.training.strategies import HistoryStrategy
from gnnautoscale.training.typed_ranked import TypedRankStrategy
from support.communities import Weights, same_bits, weights_of
from support.ranks import outcomes, run_ranks
from support.typed import MODELS, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
SETTINGS: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "epochs": 2, "lr": 0.02, "progress": False}


class StopError(Exception):
    """Ends a run."""


class Run(NamedTuple):
    """What a rank returns."""

    scores: dict[str, float]
    losses: list[float]
    weights: Weights


def graph() -> HeteroData:
    """Papers to classify; terms have no features, and one rank no papers to train on."""
    data = typed_graph(6).apply(lambda x: x.float() if x.is_floating_point() else x)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    place = torch.arange(40) % 4
    for name, which in (("train", place < 2), ("val", place == 2), ("test", place == 3)):
        data["paper"][f"{name}_mask"] = which
    del data["term"].x
    data["term"].num_nodes = 12
    return data


def model(data: HeteroData, name: str = "hetero-sage") -> nn.Module:
    torch.manual_seed(1)
    return build_model(name, data, 2, ["paper"], hidden=8, layers=2, dropout=0.3)


def fit(name: str, data: Any, **options: Any) -> Run:
    made = model(graph(), name)
    result = gas.fit(made, data, **{**SETTINGS, **options})
    return Run(result.scores, [epoch.loss for epoch in result.epochs], weights_of(made))


def whole(weights: Weights, name: str) -> Tensor:
    """The outputs of a trained model for all papers."""
    data = graph()
    trained = model(data, name)
    trained.load_state_dict(weights)
    out: Tensor = gas.infer(gas.autoscale(trained, data), data)
    return out


def test_all_ranks_end_with_the_same_weights_and_scores_of_all_nodes(tmp_path: Path) -> None:
    data, folder, name = graph(), tmp_path / "run", "rgcn"
    found = run_ranks(3, fit, name, data, run_dir=str(folder), refresh=1, evaluate_parts=5, verify=True)
    assert all(same_bits(run.weights, found[0].weights) for run in found)
    assert all(run[:2] == found[0][:2] for run in found)
    right = (whole(found[0].weights, name).argmax(1) == data["paper"].y)[data["paper"].test_mask]
    assert 100 * float(right.double().mean()) == pytest.approx(found[0].scores["test"])
    record = read_run(folder)
    assert record.run["data"]["nodes"] == data.num_nodes
    assert record.run["data"]["train nodes in split"] == 20
    assert record.verification is not None
    assert record.verification["exact"]
    assert [each["epoch"] for each in record.staleness] == [1, 2]
    assert {layer["type"] for layer in record.staleness[0]["layers"]} <= set(data.node_types)
    assert sum(record.run["parts"]["sizes"]) == data.num_nodes
    edges = record.run["parts"]["batches"]
    assert sum(edges["edges_inside"]) + sum(edges["edges_crossing"]) == data.num_edges


def test_a_folder_of_shards_gives_the_same_bits_as_the_graph(tmp_path: Path) -> None:
    data, folder = graph(), tmp_path / "shards"
    ranks.write_shards(folder, data, gas.HaloLoader(data, 6).labels, 2)
    given, read = (run_ranks(2, fit, "rgcn", each) for each in (data, folder))
    for one, other in zip(given, read, strict=True):
        assert one[:2] == other[:2]
        assert same_bits(one.weights, other.weights)


def test_a_rank_may_have_no_nodes_of_the_type_with_targets(tmp_path: Path) -> None:
    data, folder = graph(), tmp_path / "shards"
    labels = {kind: torch.full((data[kind].num_nodes,), int(kind == "paper")) for kind in data.node_types}
    manifest = ranks.write_shards(folder, data, labels, 2)
    assert sorted(shard["types"]["paper"]["own"] for shard in manifest["shards"]) == [0, 40]
    found = run_ranks(2, fit, "rgcn", folder, batch_size=1, epochs=1)
    assert same_bits(found[0].weights, found[1].weights)
    right = (whole(found[0].weights, "rgcn").argmax(1) == data["paper"].y)[data["paper"].test_mask]
    assert 100 * float(right.double().mean()) == pytest.approx(found[0].scores["test"])


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    dataset = summary_of(folder)
    assert isinstance(dataset, TypedDataset)
    return {name: tuple(each.shape) for name, each in model(dataset.graph).state_dict().items()}


@pytest.mark.parametrize("without", ["term", "paper"])
def test_models_are_built_from_what_a_folder_says(without: str, tmp_path: Path) -> None:
    data = graph()
    if without == "paper":
        del data["paper"].x
        data["paper"].num_nodes = 40
    ranks.write_shards(tmp_path / "shards", data, gas.HaloLoader(data, 6).labels, 2)
    expected = {name: tuple(each.shape) for name, each in model(data).state_dict().items()}
    assert run_ranks(2, weight_shapes, tmp_path / "shards") == [expected, expected]


def fit_lazy(name: str, **options: Any) -> Run:
    """A model whose weights get their shapes on the first batch."""
    torch.manual_seed(1)
    made, data = MODELS[name](), typed_graph(6)
    data["paper"].train_mask = torch.arange(40) < 6
    data["paper"].val_mask = data["paper"].test_mask = ~data["paper"].train_mask
    result = gas.fit(made.double(), data, **{**SETTINGS, **options})
    return Run(result.scores, [epoch.loss for epoch in result.epochs], weights_of(made))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("residual", {"sync_norms": True, "lag": 1}),
        ("weighted", {"lipschitz": 0.1, "history_dtype": "int8", "storage": "disk", "history_dir": "histories"}),
    ],
)
def test_options_of_steps_run_on_ranks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if "history_dir" in options:
        options = {**options, "history_dir": str(tmp_path / "histories")}
    found = run_ranks(2, fit_lazy, name, **options)
    assert same_bits(found[0].weights, found[1].weights)
    assert all(bool(torch.isfinite(weight).all()) for weight in found[0].weights.values())
    assert found[0].losses == found[1].losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compensate": "momentum"}, "by gradients"),
        ({"mode": "cluster"}, "mode 'gas', 'history' or 'exact'"),
        ({"num_parts": 1, "batch_size": 1}, "a part of its own"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    for error in outcomes(2, fit_with, options):
        assert isinstance(error, gas.InputError), error
        assert message in str(error)


def fit_with(options: dict[str, Any]) -> Run:
    return fit("hetero-sage", graph(), **options)


# Checkpoints #########################################################################################################


def interrupted(folder: Path, after: int, **options: Any) -> None:
    """A run that fails on all ranks after some epochs."""

    def fail(epoch: Any) -> None:
        if epoch.number == after:
            raise StopError

    given = {**SETTINGS, "batch_size": 1, "callback": fail, "checkpoint_dir": str(folder), **options}
    with pytest.raises(StopError):
        gas.fit(model(graph()), graph(), **given)


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 1, "compensate": "gradient"}
    plain = run_ranks(2, fit, "hetero-sage", graph(), **options)
    run_ranks(2, interrupted, tmp_path, 2, checkpoint_every=1, **options)
    newest = load_latest(tmp_path)
    assert newest is not None
    for path in tmp_path.glob(f"checkpoint-{newest.step:09d}.*"):  # go on in the middle of the second epoch
        path.unlink()
    resumed = run_ranks(2, fit, "hetero-sage", graph(), resume=str(tmp_path), **options)
    for one, other in zip(plain, resumed, strict=True):
        assert one[:2] == other[:2]
        assert same_bits(one.weights, other.weights)


@pytest.mark.parametrize(("before", "after"), [(3, 2)])
def test_a_run_resumes_on_other_ranks_with_the_rows_of_all_nodes(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(before, interrupted, tmp_path, 2)
    written, read = rows_in(tmp_path), run_ranks(after, rows_found, tmp_path)[0]
    assert written.keys() == read.keys() != set()
    for slot, rows in written.items():
        assert torch.equal(rows, read[slot]), slot


def rows_in(folder: Path) -> Weights:
    """The rows of all nodes in the newest checkpoint, by slot."""
    checkpoint, data = load_latest(folder), graph()
    assert checkpoint is not None
    counts = {kind: data[kind].num_nodes for kind in data.node_types}
    pieces, found = pieces_of(checkpoint, read_shards(checkpoint), counts), {}
    for kind in counts:
        of_kind = [piece.of(kind) for piece in pieces]
        nodes = torch.cat([piece.nodes for piece in of_kind])
        for slot in of_kind[0].rows["histories"]:
            rows = torch.cat([piece.rows["histories"][slot]["raw"] for piece in of_kind])
            found[slot] = torch.empty_like(rows).index_copy_(0, nodes, rows)
    return found


def rows_found(folder: Path) -> Weights:
    """The rows of all nodes as a run finds them when it resumes."""
    found: Weights = {}
    alone = ranks.current().size == 1
    kind: Any = HistoryStrategy if alone else TypedRankStrategy
    restore = kind.restore

    def look(strategy: Any, checkpoint: Any, device: Any) -> None:
        restore(strategy, checkpoint, device)
        loader = strategy._loader
        for kind, memory in attached(strategy._model).memory.kinds.items():
            for slot, history in memory.histories.items():
                if alone:
                    order = loader.row_orders[kind].nodes.long()
                    found[slot] = torch.empty_like(history.raw).index_copy_(0, order, history.raw)
                    continue
                shard = loader.shard.kinds[kind]
                every = loader.gathered({kind: history.raw[: shard.num_own].clone()})
                found[slot] = loader.world.broadcast(every)[kind]
                ghosts = slice(shard.num_own, shard.nodes.numel())
                assert torch.equal(history.raw[ghosts], found[slot][shard.nodes[ghosts]]), "ghosts are up to date"
        raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "restore", look)
        with pytest.raises(StopError):
            gas.fit(model(graph()), graph(), **{**SETTINGS, "batch_size": 1, "resume": str(folder)})
    return found
