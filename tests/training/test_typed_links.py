"""Links of heterogeneous graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import seed_everything  # type: ignore[import-untyped]
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit, ToUndirected  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.data import TypedLinks
from gnnautoscale.errors import InputError
from gnnautoscale.models import build_model
from gnnautoscale.tasks import LinkPrediction
from gnnautoscale.tasks.pairs import Pairs
from support.ranks import run_ranks

LIKES, LIKED = ("user", "likes", "item"), ("item", "rev_likes", "user")


def graph() -> HeteroData:
    """Users of two kinds like items of their kind; shops have nothing to do with it."""
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    for kind, count in (("shop", 3), ("item", 40), ("user", 30)):
        data[kind].x = torch.randn(count, 4, generator=generator)
        data[kind].x[:, 0] = torch.arange(count) % 2 * 4.0 - 2.0
    pairs = torch.cartesian_prod(torch.arange(30), torch.arange(40))
    pairs = pairs[(pairs.sum(1) % 2 == 0) & (torch.rand(1200, generator=generator) < 0.5)]
    data[LIKES].edge_index = pairs.t().contiguous()
    data["shop", "sells", "item"].edge_index = torch.stack([torch.arange(40) % 3, torch.arange(40)])
    return data


def splits(**options: Any) -> list[HeteroData]:
    seed_everything(0)  # PyG draws negatives by random numbers of Python's own
    given: dict[str, Any] = {"edge_types": [LIKES], "rev_edge_types": [LIKED], "disjoint_train_ratio": 0.3}
    given |= {"add_negative_train_samples": False, **options}
    made: list[HeteroData] = list(RandomLinkSplit(**given)(ToUndirected()(graph())))
    return made


def trained(data: Any = None, **options: Any) -> tuple[gas.FitResult, nn.Module, LinkPrediction]:
    data = splits() if data is None else data
    torch.manual_seed(0)
    task = LinkPrediction(width=8, metric=options.pop("metric", "ROC-AUC"))
    model = build_model("hetero-sage", data[0], 8, ["user", "item"], hidden=8, dropout=0.0)
    defaults = {"num_parts": 8, "batch_size": 4, "epochs": 25, "lr": 0.02, "device": "cpu", "evaluate_every": 5}
    return gas.fit(model, data, task=task, **{**defaults, **options}), model, task


Trained = tuple[gas.FitResult, dict[str, Tensor]]


def trained_on_a_rank(data: list[HeteroData], folder: Path | None = None, **options: Any) -> Trained:
    saved = {} if folder is None else {"checkpoint_dir": str(folder), "resume": str(folder)}
    result, model, _ = trained(data, evaluate_every=1, **saved, **options)
    return result, gas.detach(model).state_dict()


@pytest.mark.filterwarnings("ignore:.*holds no checkpoint yet")
def test_ranks_share_them_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    data = splits()
    options: dict[str, Any] = {"compensate": "gradient", "drawings": 2}
    found = run_ranks(2, trained_on_a_rank, data, epochs=2, **options)
    run_ranks(2, trained_on_a_rank, data, tmp_path, epochs=1, **options)
    resumed = run_ranks(2, trained_on_a_rank, data, tmp_path, epochs=2, **options)
    result, weights = found[0]
    for other, others in (*found, *resumed):
        assert other.scores == result.scores
        assert [epoch.loss for epoch in other.epochs] == [epoch.loss for epoch in result.epochs]
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
    links = TypedLinks.of_splits(data)
    model = build_model("hetero-sage", data[0], 8, ["user", "item"], hidden=8, dropout=0.0)
    model.load_state_dict(weights)
    task, numbers = (
        LinkPrediction(width=8),
        {kind: torch.arange(data[0][kind].num_nodes) for kind in data[0].node_types},
    )
    task.bound_to(links, metric=None, class_weight="none")
    for split, graph, view in zip(("train", "val", "test"), data, (links.train, links.val, links.test), strict=True):
        with torch.no_grad():
            out = links.all_rows(model.eval()(graph.edge_index_dict, numbers, graph.x_dict))
        assert result.scores[split] == pytest.approx(task.score(out, view, split), abs=1e-3)


def test_batches_without_nodes_of_one_end_score_the_edges_to_others() -> None:
    data = splits()
    parts = {"item": torch.arange(40) % 2, "user": 2 + torch.arange(30) % 2, "shop": torch.zeros(3, dtype=torch.long)}
    loader = gas.HaloLoader(data[0], partition=parts, batch_size=2, shuffle=True)
    links = TypedLinks.of_splits(data)
    task = LinkPrediction()
    task.bound_to(links, metric=None, class_weight="none")
    task.prepare(loader)
    count = links.train.edge_label_index.size(1)
    for group, drawn in (([0, 1], 0), ([2, 3], 0), ([0, 2], 5)):
        seen = links.seen(loader.batch_of(group))
        out = torch.zeros(seen.num_nodes, 2)
        task.see(out, seen.n_id)
        _, targets = task.targets(seen)
        assert targets.size(0) == count if not drawn else targets.size(0) < count
        assert float(task.loss(out, targets)) == pytest.approx(0.6931, abs=1e-4)
        source, target, label, relation = targets.unbind(dim=1)
        assert task._draw(source, target, relation, label.float())[0].numel() == drawn * targets.size(0)


@pytest.mark.parametrize("mode", ["gas", "full", "cluster", "sage"])
def test_every_mode_learns_who_likes_what(mode: str) -> None:
    result, _, _ = trained(mode=mode, **({"fan_out": [4, 4]} if mode == "sage" else {}))
    assert result.metric == "ROC-AUC"
    # A third of the negatives are of the same kind, which nothing tells from edges: 83 is what can be had on average.
    assert result.scores["test"] > 78.0
    again, _, _ = trained(mode=mode, epochs=2, **({"fan_out": [4, 4]} if mode == "sage" else {}))
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in result.epochs[:2]]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["gas", "full", "cluster", "sage"])
def test_a_gpu_learns_as_a_cpu_does(mode: str) -> None:
    more = {"fan_out": [4, 4]} if mode == "sage" else {}
    on_gpu, on_cpu = (trained(mode=mode, device=device, **more)[0] for device in ("cuda", "cpu"))
    # Other weights and negatives are drawn, so that scores differ by some points; see above for what can be had.
    assert min(on_gpu.scores["test"], on_cpu.scores["test"]) > 72.0


@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "exact", "num_parts": 5}, {"exact_epochs": 4}])
def test_one_part_and_exact_steps_are_plain_full_batch(options: dict[str, Any]) -> None:
    data = splits(add_negative_train_samples=True)
    result, _, _ = trained(data, epochs=4, evaluate_every=1, **options)
    torch.manual_seed(0)
    plain, train = build_model("hetero-sage", data[0], 8, ["user", "item"], hidden=8, dropout=0.0), data[0]
    numbers = {kind: torch.arange(store.num_nodes) for kind, store in train.node_items()}
    optimizer, losses = torch.optim.Adam(plain.parameters(), lr=0.02), []
    for _ in range(4):
        out = plain.train()(train.edge_index_dict, numbers, train.x_dict)
        user, item = train[LIKES].edge_label_index
        scores, labels = (out["user"][user] * out["item"][item]).sum(1), train[LIKES].edge_label
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels.float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert [epoch.loss for epoch in result.epochs] == pytest.approx(losses, rel=1e-4)


def test_naive_histories_and_evaluation_in_one_part() -> None:
    data = splits()  # whose negatives are drawn anew every time
    ways: list[dict[str, Any]] = [{"mode": "history"}, {"partition": "random"}]
    naive, random = (trained(data, epochs=2, **how)[0] for how in ways)
    assert [epoch.loss for epoch in naive.epochs] == [epoch.loss for epoch in random.epochs]
    one, many = (trained(data, epochs=2, evaluate_parts=parts)[0] for parts in (1, 3))
    assert one.scores == pytest.approx(many.scores, abs=0.01)


def test_gradients_are_compared_with_those_of_full_batch() -> None:
    train = splits(add_negative_train_samples=True)[0]
    torch.manual_seed(0)
    model = build_model("hetero-sage", train, 8, ["user", "item"], hidden=8, dropout=0.0)
    gas.autoscale(model, train)
    found = []
    for parts in (1, 6):
        loader = gas.HaloLoader(train, parts, partition="random", bidirectional=True)
        gas.refresh(model, loader)
        found.append(gas.diagnose(model, loader, ["gradients"], task=LinkPrediction("dot"))["gradients"])
    assert found[0]["relative_error"] < 1e-5
    assert 1e-3 < found[1]["relative_error"] < 2.0


def test_scores_are_those_of_plain_pyg() -> None:
    data = splits()
    result, model, _ = trained(data, epochs=5)
    gas.detach(model)
    test = data[2]
    numbers = {kind: torch.arange(store.num_nodes) for kind, store in test.node_items()}
    with torch.no_grad():
        out = model.eval()(test.edge_index_dict, numbers, test.x_dict)
    user, item = test[LIKES].edge_label_index
    scores = (out["user"][user] * out["item"][item]).sum(1)
    positive, negative = scores[test[LIKES].edge_label > 0], scores[test[LIKES].edge_label == 0]
    above = (positive.unsqueeze(1) > negative).double() + 0.5 * (positive.unsqueeze(1) == negative)
    assert 100 * float(above.mean()) == pytest.approx(result.scores["test"], abs=0.01)


def test_negatives_and_ranks_stay_within_the_types() -> None:
    links = TypedLinks.of_splits(splits())
    pairs = Pairs.of(links.train)
    (low, high), (first, last) = pairs.range_of(0), pairs.range_of(1)
    assert (low, high, first, last, pairs.num_ends) == (43, 73, 3, 43, 70)
    for end, (start, stop) in enumerate((pairs.range_of(0), pairs.range_of(1))):
        drawn = pairs.draw((200,), torch.Generator().manual_seed(0), end)
        assert int(drawn.min()) >= start
        assert int(drawn.max()) < stop
        assert ((pairs.ends[end] >= start) & (pairs.ends[end] < stop)).all()
    result, model, task = trained(metric="MRR", epochs=3)
    assert 0.0 < result.scores["test"] <= 100.0
    rows: dict[str, Tensor] = gas.infer(model, splits()[2])
    whole = links.all_rows(rows)
    assert whole.shape == (73, 8)
    assert not whole[:3].any()
    partners, _ = task.partners(whole, 43, 5)
    assert ((partners >= 3) & (partners < 43)).all()


def test_leaks_are_found_in_the_type_and_in_its_reverse() -> None:
    data = splits()
    asked = data[2][LIKES]
    leaked = asked.edge_label_index[:, asked.edge_label > 0][:, :3]
    for kind, edges in ((LIKES, leaked), (LIKED, leaked.flip(0))):
        broken = [each.clone() for each in data]
        broken[0][kind].edge_index = torch.cat([broken[0][kind].edge_index, edges], dim=1)
        with pytest.raises(
            InputError, match=r"positives of the test split must not be edges .* train graph, but got 3"
        ):
            trained(broken)
    # The reverse is known by its edges as well, whatever its name.
    renamed = splits(rev_edge_types=None)
    for each in renamed:
        each["item", "pleases", "user"].edge_index = each[LIKED].edge_index
        del each[LIKED]
    with pytest.raises(InputError, match="must not be edges that pass messages"):
        trained(renamed)


def test_links_within_one_type() -> None:
    generator = torch.Generator().manual_seed(1)
    data = HeteroData()
    data["user"].x = torch.randn(40, 4, generator=generator)
    data["user"].x[:, 0] = torch.arange(40) % 2 * 4.0 - 2.0
    data["shop"].num_nodes = 2
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(40))
    pairs = pairs[(pairs[:, 0] < pairs[:, 1]) & (pairs.sum(1) % 2 == 0)]
    pairs = pairs[torch.rand(pairs.size(0), generator=generator) < 0.4].t()
    data["user", "knows", "user"].edge_index = torch.cat([pairs, pairs.flip(0)], dim=1)
    data["shop", "serves", "user"].edge_index = torch.stack([torch.arange(40) % 2, torch.arange(40)])
    torch.manual_seed(0)
    kind = [("user", "knows", "user")]
    split = RandomLinkSplit(is_undirected=True, disjoint_train_ratio=0.3, edge_types=kind)(data)
    model = build_model("hetero-sage", data, 8, ["user"], hidden=8, dropout=0.0)
    options: dict[str, Any] = {"num_parts": 8, "batch_size": 4, "epochs": 25, "lr": 0.02, "device": "cpu"}
    options["evaluate_every"] = 5
    result = gas.fit(model, split, **options)
    assert result.scores["test"] > 70.0  # of about 82 that can be had


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    data = splits()
    whole, model, _ = trained(data, epochs=2, evaluate_every=1)
    trained(data, epochs=1, evaluate_every=1, checkpoint_dir=str(tmp_path / "saved"))
    saved: dict[str, Any] = {"resume": str(tmp_path / "saved"), "checkpoint_dir": str(tmp_path / "saved")}
    resumed, other, _ = trained(data, epochs=2, evaluate_every=1, **saved)
    assert [epoch.loss for epoch in resumed.epochs] == [epoch.loss for epoch in whole.epochs]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    data = splits()
    with pytest.raises(InputError, match="one type of edges has edge_label_index"):
        trained([graph()] * 3)
    with pytest.raises(InputError, match="the val graph must have edge_label_index"):
        trained([data[0], graph(), data[2]])
    other = data[1].clone()
    other["shop"].x = torch.ones(4, 4)
    with pytest.raises(InputError, match="have the same nodes"):
        trained([data[0], other, data[2]])
    with pytest.raises(InputError, match="y must hold the targets of nodes"):
        gas.fit(nn.Identity(), data, task="classification")
