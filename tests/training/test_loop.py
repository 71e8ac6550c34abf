"""The training loop, on tiny graphs, against loops written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]
from torch_geometric.nn import GCNConv, GraphConv  # type: ignore[import-untyped]

import gnnautoscale as gas
import gnnautoscale.training.strategies as modes_module
from conftest import history_rows
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.data import datasets, generate
from gnnautoscale.graph.partitioning import partition
from gnnautoscale.models import GAT, GCN, GIN, MODELS, GraphSAGE, build_model
from gnnautoscale.runs.result import Epoch, FitResult
from gnnautoscale.tasks import NodeClassification
from gnnautoscale.training.loop import fit
from support.communities import (
    CLASSES,
    FEATURES,
    Weights,
    community_graph,
    multilabel_graph,
    same_bits,
    train_on,
    train_on_nearly_all,
    two_cliques,
    weights_of,
)


def gcn(seed: int = 1, **options: Any) -> GCN:
    torch.manual_seed(seed)
    return GCN(FEATURES, CLASSES, **{"hidden": 8, **options})


@dataclass
class Run:
    """What a call of ``fit`` gave, and the weights after each of its epochs."""

    model: nn.Module
    result: FitResult
    weights: list[Weights]

    @property
    def losses(self) -> list[float]:
        return [epoch.loss for epoch in self.result.epochs]


def run(model: nn.Module | None = None, data: Data | gas.Dataset | None = None, **options: Any) -> Run:
    model = gcn() if model is None else model
    weights: list[Weights] = []
    options = {"num_parts": 4, "batch_size": 2, "epochs": 3, **options}
    result = fit(
        model,
        community_graph() if data is None else data,
        callback=lambda _: weights.append(weights_of(model)),
        **options,
    )
    return Run(model, result, weights)


def score(out: Tensor, data: Data, split: str) -> float:
    """The score that the data's own task gives."""
    return NodeClassification.of(gas.Dataset.of(data)).score(out, data, split)


def exact_scores(model: nn.Module, data: Data) -> dict[str, float]:
    """Scores of the model on a graph, by calling it on all of it at once."""
    plain = gas.detach(model).eval()
    with torch.no_grad():
        out = plain(data.x, data.edge_index)
    return {split: score(out, data, split) for split in ("train", "val", "test")}


# Full batch ##########################################################################################################


class Reference(nn.Module):
    """The two layers of a GCN as PyG's examples write them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = GCNConv(FEATURES, 8), GCNConv(8, CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, self.dropout, self.training)
        out: Tensor = self.conv2(x, edge_index)
        return out


def loop_by_hand(
    model: nn.Module,
    data: Data,
    groups: list[dict[str, Any]],
    *,
    epochs: int,
    lr: float = 0.01,
    grad_norm: float | None = None,
    seed: int = 0,
) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(groups, lr=lr)
    losses = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()  # type: ignore[no-untyped-call]
        if grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay_conv": 0.3, "weight_decay_other": 0.05}, {"grad_norm": 0.05, "lr": 0.05}],
    ids=["plain", "decay", "clipped"],
)
def test_full_batch_is_the_loop_everyone_writes(dropout: float, options: dict[str, Any]) -> None:
    data = community_graph()
    reference = Reference(dropout)
    groups = [
        {"params": list(reference.conv1.parameters()), "weight_decay": options.get("weight_decay_conv", 0.0)},
        {"params": list(reference.conv2.parameters()), "weight_decay": options.get("weight_decay_other", 0.0)},
    ]
    rest = {name: value for name, value in options.items() if not name.startswith("weight")}
    expected = loop_by_hand(reference, data, groups, epochs=8, seed=3, **rest)
    got = run(gcn(dropout=dropout), data, mode="full", epochs=8, seed=3, **options)
    assert got.losses == pytest.approx(expected, abs=1e-6)
    for name, value in reference.state_dict().items():
        mine = got.weights[-1][name.replace("conv1", "convs.0").replace("conv2", "convs.1")]
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-5)


def test_weight_decay_and_clipping_matter() -> None:
    plain = run(mode="full", epochs=2).weights[-1]
    for option in ("weight_decay_conv", "weight_decay_other", "grad_norm"):
        options: dict[str, Any] = {option: 0.01}
        other = run(mode="full", epochs=2, **options).weights[-1]
        assert not same_bits(plain, other), option


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"batch_norm": True, "dropout": 0.2, "layers": 3}])
def test_one_part_is_full_batch_bit_for_bit(options: dict[str, Any]) -> None:
    settings = {"epochs": 5, "grad_norm": 1.0, "weight_decay_conv": 0.01}
    full = run(gcn(**options), mode="full", num_parts=5, batch_size=3, **settings)
    gas_run = run(gcn(**options), mode="gas", num_parts=1, batch_size=1, **settings)
    assert full.losses == gas_run.losses
    assert full.result.scores == gas_run.result.scores
    assert all(same_bits(a, b) for a, b in zip(full.weights, gas_run.weights, strict=True))
    assert full.result.steps == gas_run.result.steps == 5
    assert full.result.history_bytes == 0


def test_full_batch_has_no_penalty() -> None:
    assert same_bits(run(mode="full", lipschitz=5.0).weights[-1], run(mode="full").weights[-1])


def test_gas_is_not_full_batch() -> None:
    assert not same_bits(run(mode="gas").weights[-1], run(mode="full").weights[-1])


# Exact steps #########################################################################################################


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay_conv": 0.3, "weight_decay_other": 0.05}, {"grad_norm": 0.05, "schedule": "cosine"}]
)
def test_exact_steps_are_those_of_full_batch(options: dict[str, Any]) -> None:
    for batch_norm, method in ((False, "metis"), (True, "random")):
        settings: dict[str, Any] = {"dropout": 0.0, "batch_norm": batch_norm, "layers": 3}
        full = run(gcn(**settings), mode="full", epochs=4, **options)
        exact = run(gcn(**settings), mode="exact", num_parts=4, epochs=4, partition=method, **options)
        assert exact.losses == pytest.approx(full.losses, abs=1e-5)
        assert exact.result.steps == full.result.steps == 4
        assert exact.result.how == "exact steps, uncaptured: CUDA graphs need a GPU"
        for name, value in full.weights[-1].items():
            if not batch_norm:  # biases before a norm have no gradient, and Adam blows up its rounding
                torch.testing.assert_close(exact.weights[-1][name], value, rtol=1e-3, atol=2e-4)


@pytest.mark.gpu
def test_a_gpu_captures_exact_steps() -> None:
    settings: dict[str, Any] = {"mode": "exact", "num_parts": 6, "epochs": 8}
    cpu, gpu = (run(gcn(dropout=0.0, layers=3), device=device, **settings) for device in ("cpu", "cuda"))
    assert gpu.losses == pytest.approx(cpu.losses, abs=1e-4)
    assert gpu.losses[-1] < gpu.losses[0]
    # Two levels forward, two and the output backward, for each of three batches.
    assert gpu.result.how == "exact steps, captured as 15 CUDA graphs"


def test_exact_steps_have_a_penalty_over_all_nodes() -> None:
    """The same in one part and in several, up to the noise that each node gets."""
    settings: dict[str, Any] = {"mode": "exact", "batch_size": 1, "epochs": 15, "lr": 0.05, "evaluate_every": 15}
    losses = {
        (parts, weight): run(gcn(dropout=0.0), num_parts=parts, lipschitz=weight, **settings).losses[-1]
        for parts in (1, 3)
        for weight in (0.0, 10.0)
    }
    assert losses[3, 0.0] == pytest.approx(losses[1, 0.0], abs=1e-4)
    assert losses[3, 10.0] == pytest.approx(losses[1, 10.0], rel=0.1)
    assert losses[3, 10.0] > 1.2 * losses[3, 0.0]


def test_the_last_epochs_may_be_exact() -> None:
    mixed = run(epochs=6, exact_epochs=2)
    plain = run(epochs=4)
    assert mixed.losses[:4] == plain.losses
    assert mixed.result.steps == plain.result.steps + 2
    one = run(mode="gas", epochs=3, exact_epochs=3, num_parts=4)
    assert one.losses == run(mode="exact", epochs=3, num_parts=4).losses


def test_several_batches_may_make_one_step() -> None:
    data, parts, weights = community_graph(), torch.arange(community_graph().num_nodes) % 5, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnnautoscale.graph.loader.cut", lambda *_, **__: parts)
        got = run(gcn(dropout=0.0), data, num_parts=5, batch_size=1, epochs=2, accumulate=3)
    assert got.result.steps == 4
    model = gas.autoscale(gcn(dropout=0.0), data)
    loader, optimizer = (
        gas.HaloLoader(data, partition=parts, shuffle=True),
        torch.optim.Adam(model.parameters(), lr=0.01),
    )
    for _ in range(2):
        batches = list(loader)
        for group in (batches[:3], batches[3:]):
            optimizer.zero_grad()
            for batch in group:
                mask = batch.train_mask[: batch.batch_size]
                loss = F.cross_entropy(model(batch)[mask], batch.y[: batch.batch_size][mask])
                (loss / len(group)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        weights.append(weights_of(model))
    for name, value in weights[-1].items():
        torch.testing.assert_close(got.weights[-1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["cluster", "sage"])
def test_batches_of_baselines_are_accumulated(mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "num_parts": 6, "batch_size": 1, "epochs": 2}
    options |= {"fan_out": [3, 3]} if mode == "sage" else {}
    assert run(accumulate=4, **options).result.steps == 4
    assert run(**options).result.steps == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "full", "exact_epochs": 1}, "exact_epochs belongs to mode 'gas'"),
        ({"exact_epochs": 4}, "exact_epochs must be at most epochs, 3, but got 4"),
        ({"mode": "exact", "edge_dropout": 0.2}, "exact steps take all edges, but got edge_dropout=0.2"),
        ({"exact_epochs": 1, "edge_dropout": 0.2}, "exact steps take all edges"),
        ({"mode": "exact", "accumulate": 2}, "an epoch of mode 'exact' is one step"),
        ({"mode": "exact", "steps_per_epoch": 2}, "an epoch of mode 'exact' is one step"),
        ({"mode": "cluster", "exact_epochs": 1}, "exact_epochs must be 0 with mode 'cluster'"),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1"),
    ],
)
def test_what_exact_steps_do_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gas.InputError, match=message):
        run(**options)


# Compensated steps ###################################################################################################


@pytest.mark.parametrize("compensate", ["gradient", "momentum"])
def test_one_compensated_part_is_full_batch_bit_for_bit(compensate: str) -> None:
    full = run(gcn(dropout=0.5), mode="full")
    one = run(gcn(dropout=0.5), num_parts=1, batch_size=1, compensate=compensate)
    assert full.losses == one.losses
    assert same_bits(full.weights[-1], one.weights[-1])


def test_compensated_batches_add_up_to_the_whole_loss() -> None:
    data, parts = community_graph(), torch.arange(community_graph().num_nodes) % 3
    data.train_mask = data.train_mask & (parts != 1)  # a batch without targets trains too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnnautoscale.graph.loader.cut", lambda *_, **__: parts)
        got = run(gcn(dropout=0.0), data, num_parts=3, batch_size=1, epochs=3, compensate="gradient")
    assert got.result.steps == 9
    model = gas.autoscale(gcn(dropout=0.0), data, compensate="gradient")
    loader = gas.HaloLoader(data, partition=parts, shuffle=True)
    optimizer, count = torch.optim.Adam(model.parameters(), lr=0.01), int(data.train_mask.sum())
    for _ in range(3):
        for batch in loader:
            mask = batch.train_mask[: batch.batch_size]
            out, y = model(batch)[mask], batch.y[: batch.batch_size][mask]
            optimizer.zero_grad()
            (F.cross_entropy(out, y, reduction="sum") * 3 / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in weights_of(model).items():
        torch.testing.assert_close(got.weights[-1][name], value, rtol=1e-4, atol=1e-5)
    gradients = attached(got.model).memory.last_gradients
    assert gradients
    assert got.result.history_bytes == sum(
        history.num_bytes for kept in (gradients, attached(got.model).memory.histories) for history in kept.values()
    )


def test_compensation_finds_neighbours_in_both_directions() -> None:
    data = community_graph()
    data.edge_index = data.edge_index[:, data.edge_index[0] < data.edge_index[1]]
    assert run(gcn(), data, compensate="gradient").result.steps == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "steps of mode 'exact' have no border to make up for, but got compensate='gradient'"),
        ({"lipschitz": 0.5}, "compensated steps run each layer once, but got lipschitz=0.5"),
        ({"mode": "cluster"}, "compensate must be 'none' with mode 'cluster'"),
    ],
)
def test_what_compensation_does_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gas.InputError, match=message):
        run(compensate="gradient", **options)


# Refreshed batches ###################################################################################################


def test_one_refresh_sweep_makes_a_history_exact() -> None:
    """As many sweeps as there are histories on top of each other make all of them exact, in spite of few steps."""
    data = community_graph()

    def errors(epochs: int, **options: Any) -> list[float]:
        still: dict[str, Any] = {"num_parts": 8, "lr": 1e-30, "steps_per_epoch": 1}
        got = run(gcn(layers=3, dropout=0.0), data, epochs=epochs, **still, **options)
        rows = history_rows(got.model)
        gas.refresh(got.model, gas.HaloLoader(data, 3))
        exact = history_rows(got.model)
        return [float((rows[slot] - exact[slot]).abs().max()) for slot in ("convs.0", "convs.1")]

    first, second = errors(1, refresh=4)  # four batches are all
    assert first < 1e-6
    assert second > 1e-3
    assert max(errors(2, refresh=4)) < 1e-6
    assert min(errors(2, refresh=1)) > 1e-3  # of some parts there is nothing yet


@pytest.mark.parametrize(("compensate", "storage"), [("none", "device"), ("gradient", "disk")])
def test_the_oldest_parts_are_refreshed_before_each_step(
    compensate: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that ``fit`` runs, written out."""
    data, parts = community_graph(), torch.arange(48) % 6
    monkeypatch.setattr("gnnautoscale.graph.loader.cut", lambda *_, **__: parts)
    options: dict[str, Any] = {"num_parts": 6, "batch_size": 2, "compensate": compensate, "refresh": 2}
    options |= {"storage": storage, "history_dir": str(tmp_path)} if storage == "disk" else {}
    got = run(gcn(dropout=0.5), data, epochs=2, **options)
    model = gas.autoscale(gcn(dropout=0.5), data, compensate=compensate)  # type: ignore[arg-type]
    loader = gas.HaloLoader(data, partition=parts, batch_size=2, shuffle=True)
    optimizer, count = torch.optim.Adam(model.parameters(), lr=0.01), int(data.train_mask.sum())

    def loss_of(out: Tensor, batch: Data) -> Tensor:
        mask = batch.train_mask[: batch.batch_size]
        loss = F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask])
        return loss if compensate == "none" else loss * len(loader) * mask.sum() / count

    torch.manual_seed(0)
    written, step = [-1] * 6, 0
    for _ in range(2):
        for batch in loader:
            for _ in range(2):
                oldest = sorted(range(6), key=lambda part: (written[part], part))[:2]
                other = loader.batch_of(oldest)
                gas.refresh(model, other, loss=partial(loss_of, batch=other))
                for part in oldest:
                    written[part] = step
            step += 1
            optimizer.zero_grad()
            loss_of(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for part in set(parts[batch.n_id[: batch.batch_size]].tolist()):
                written[part] = step
    for name, value in weights_of(model).items():
        torch.testing.assert_close(got.weights[-1][name], value, rtol=1e-4, atol=1e-5)
    ours, theirs = (attached(each).memory.last_gradients for each in (got.model, model))
    assert ours.keys() == theirs.keys()
    assert bool(ours) is (compensate == "gradient")
    for slot, history in ours.items():
        torch.testing.assert_close(history.raw, theirs[slot].raw, rtol=1e-4, atol=1e-5)
    gas.detach(got.model)  # another run may have the folder
    without = run(gcn(dropout=0.5), data, epochs=2, **{**options, "refresh": 0})
    assert not same_bits(got.weights[-1], without.weights[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "full"}, "steps of mode 'full' find all rows fresh, but got refresh=1"),
        ({"mode": "exact"}, "steps of mode 'exact' find all rows fresh"),
        ({"mode": "cluster"}, "refresh must be 0 with mode 'cluster', which has no histories"),
        ({"mode": "sage", "fan_out": (2, 2)}, "refresh must be 0 with mode 'sage', which has no histories"),
        ({"batch_size": 4}, "refresh needs several batches, but got refresh=1 and all 4 parts in one batch"),
    ],
)
def test_what_a_refresh_before_steps_does_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gas.InputError, match=message):
        run(refresh=1, **options)


# The naive baseline ##################################################################################################


def test_history_mode_cuts_at_random_and_has_neither_penalty_nor_clipping() -> None:
    baseline = run(mode="history", lipschitz=5.0, grad_norm=0.01, partition="metis")
    same = run(mode="gas", partition="random")
    assert same_bits(baseline.weights[-1], same.weights[-1])
    assert baseline.result.connectivity == same.result.connectivity > run(mode="gas").result.connectivity
    assert not same_bits(same.weights[-1], run(mode="gas", partition="random", grad_norm=0.01).weights[-1])


# Cluster-GCN and neighbour sampling ##################################################################################

BASELINES: dict[str, dict[str, Any]] = {
    "cluster": {"mode": "cluster"},
    "sage": {"mode": "sage", "fan_out": [2, 3]},
}
each_baseline = pytest.mark.parametrize("baseline", BASELINES)


def sage(**options: Any) -> GraphSAGE:
    torch.manual_seed(1)
    return GraphSAGE(FEATURES, CLASSES, **{"hidden": 8, "dropout": 0.0, **options})


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.5}, {"batch_norm": True, "dropout": 0.2, "layers": 3}], ids=["plain", "drop", "norm"]
)
def test_one_part_of_cluster_is_full_batch(options: dict[str, Any]) -> None:
    settings = {"epochs": 5, "grad_norm": 1.0, "weight_decay_conv": 0.01, "schedule": "cosine"}
    full = run(gcn(**options), mode="full", **settings)
    cluster = run(gcn(**options), mode="cluster", num_parts=1, batch_size=1, **settings)
    assert cluster.losses == pytest.approx(full.losses, abs=1e-5)
    assert cluster.result.scores == full.result.scores
    for a, b in zip(cluster.weights, full.weights, strict=True):
        for name in a:
            # The gradient of a bias before a batch norm is nothing but rounding, which Adam makes large.
            if not (options.get("batch_norm") and name.endswith(("bias", "running_mean"))):
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)


def test_all_parts_in_one_batch_of_cluster_are_full_batch() -> None:
    full, cluster = run(gcn(dropout=0.0), mode="full"), run(gcn(dropout=0.0), mode="cluster", num_parts=4, batch_size=4)
    assert cluster.losses == pytest.approx(full.losses, abs=1e-5)


def test_cluster_normalizes_by_degrees_inside_of_a_batch() -> None:
    data, model = community_graph(), gcn(dropout=0.0)
    labels = partition(data.edge_index, 48, 4)
    total = 0.0
    for part in range(4):
        inside = data.subgraph(labels == part)
        with torch.no_grad():
            out = model(inside.x, inside.edge_index)
        total += float(F.cross_entropy(out[inside.train_mask], inside.y[inside.train_mask], reduction="sum"))
    # A rate of almost zero leaves the weights alone.
    (loss,) = run(model, data, mode="cluster", batch_size=1, lr=1e-12, epochs=1).losses
    assert loss == pytest.approx(total / int(data.train_mask.sum()), abs=1e-5)
    assert loss != pytest.approx(run(gcn(dropout=0.0), data, mode="full", lr=1e-12, epochs=1).losses[0], abs=1e-3)


@pytest.mark.parametrize("settings", [{}, {"grad_norm": 0.05, "weight_decay_conv": 0.1}], ids=["plain", "clipped"])
def test_sampling_everything_around_all_training_nodes_is_full_batch(settings: dict[str, Any]) -> None:
    full = run(sage(), mode="full", epochs=6, **settings)
    sampled = run(sage(), mode="sage", fan_out=[-1, -1], num_parts=3, batch_size=3, epochs=6, **settings)
    assert sampled.losses == pytest.approx(full.losses, abs=1e-5)
    assert sampled.result.scores == full.result.scores


def test_sampling_everything_gives_the_full_batch_loss_in_several_batches() -> None:
    full = run(sage(), mode="full", epochs=1, lr=1e-12).losses
    assert run(sage(), mode="sage", fan_out=[-1, -1], epochs=1, lr=1e-12).losses == pytest.approx(full, abs=1e-5)
    # One neighbour each gives another loss.
    assert run(sage(), mode="sage", fan_out=[1, 1], epochs=1, lr=1e-12).losses != pytest.approx(full, abs=1e-3)


@each_baseline
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"rgcn"}))
def test_every_model_trains_as_a_baseline(baseline: str, name: str) -> None:
    data = community_graph()
    torch.manual_seed(1)
    got = run(build_model(name, data, CLASSES, hidden=8, layers=2), data, epochs=8, **BASELINES[baseline])
    assert min(got.losses[1:]) < got.losses[0]
    assert got.result.scores == exact_scores_plain(got.model, data)


def exact_scores_plain(model: nn.Module, data: Data) -> dict[str, float]:
    with torch.no_grad():
        out = model.eval()(data.x, data.edge_index)
    return {split: score(out, data, split) for split in ("train", "val", "test")}


@each_baseline
def test_a_baseline_leaves_the_model_plain_and_with_its_best_weights(baseline: str) -> None:
    got = run(gcn(batch_norm=True), epochs=6, **BASELINES[baseline])
    assert not hasattr(got.model, "_autoscaler")
    assert same_bits(weights_of(got.model), got.weights[got.result.best_epoch - 1])
    assert got.result.scores == exact_scores_plain(got.model, community_graph())
    assert got.result.connectivity == 0.0
    assert got.result.history_bytes == 0
    assert got.result.how.startswith("uncaptured: a plain model on ")
    assert set(got.result.seconds) == {"partition", "train", "evaluate"}
    assert got.result.peak_memory is None or got.result.peak_memory >= 0
    json.dumps(got.result.to_dict(), allow_nan=False)


@each_baseline
def test_baselines_give_the_same_bits_for_the_same_seed(baseline: str) -> None:
    options = BASELINES[baseline]
    first = run(gcn(), seed=5, **options)
    # Without dropout too, another seed gives other batches.
    calm = [run(gcn(dropout=0.0), seed=seed, **options).losses for seed in (5, 6)]
    assert calm[0] != calm[1]
    model = gcn()
    torch.rand(17)
    second = run(model, seed=5, **options)
    assert first.losses == second.losses
    assert same_bits(first.weights[-1], second.weights[-1])
    assert same_bits(first.weights[-1], run(gcn(), seed=5, num_workers=1, **options).weights[-1])
    assert not same_bits(first.weights[-1], run(gcn(), seed=6, **options).weights[-1])


@each_baseline
def test_evaluation_leaves_baselines_alone(baseline: str) -> None:
    often, once = (
        run(gcn(dropout=0.5, batch_norm=True), epochs=4, evaluate_every=every, **BASELINES[baseline])
        for every in (1, 4)
    )
    assert often.losses == once.losses
    assert same_bits(often.weights[-1], once.weights[-1])


@each_baseline
def test_decay_and_clipping_reach_baselines(baseline: str) -> None:
    plain = run(gcn(), epochs=1, **BASELINES[baseline]).weights[-1]
    for options in ({"weight_decay_conv": 0.1}, {"weight_decay_other": 0.1}, {"grad_norm": 0.01}):
        other = run(gcn(), epochs=1, **BASELINES[baseline], **options).weights[-1]
        assert not same_bits(plain, other), options


@pytest.mark.parametrize(("batch_size", "most", "expected"), [(1, None, 8), (2, None, 4), (1, 1, 2), (4, 9, 2)])
def test_baselines_take_as_many_steps_as_gas(batch_size: int, most: int | None, expected: int) -> None:
    data = community_graph()
    train_on_nearly_all(data)
    options: dict[str, Any] = {"batch_size": batch_size, "steps_per_epoch": most, "epochs": 2, "evaluate_every": 2}
    for mode in ({"mode": "gas"}, *BASELINES.values()):
        assert run(data=data, **options, **mode).result.steps == expected, mode


@each_baseline
def test_baselines_stop_and_return_to_the_best_epoch(monkeypatch: pytest.MonkeyPatch, baseline: str) -> None:
    scripted(monkeypatch, [50.0, 60.0, 55.0, 60.0, 70.0])
    got = run(epochs=8, patience=2, **BASELINES[baseline])
    assert (len(got.result.epochs), got.result.best_epoch) == (4, 2)
    assert same_bits(weights_of(got.model), got.weights[1])


def test_cluster_takes_no_step_without_training_nodes() -> None:
    data = two_cliques()
    data.x = data.x.double()  # Adam takes whole steps along gradients that are rounding errors
    got = run(gcn(dropout=0.0, batch_norm=True).double(), data, mode="cluster", num_parts=2, batch_size=1, epochs=3)
    assert got.result.steps == 3
    # What the two parts learn from is what the first clique alone gives.
    alone = data.subgraph(data.train_mask)
    alone.val_mask = alone.train_mask
    expected = run(gcn(dropout=0.0, batch_norm=True).double(), alone, mode="full", epochs=3)
    assert got.losses == pytest.approx(expected.losses, abs=1e-5)
    assert int(got.weights[-1]["norms.0.num_batches_tracked"]) == 3


@each_baseline
def test_baselines_take_inductive_data(baseline: str) -> None:
    dataset = gas.load("cluster", graphs=4)
    torch.manual_seed(1)
    model = GIN(dataset.num_features, dataset.num_classes, hidden=8, layers=2)
    result = fit(model, dataset, num_parts=8, batch_size=2, epochs=2, **BASELINES[baseline])
    assert result.steps == 8
    model.eval()
    with torch.no_grad():
        for split, graph in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
            expected = score(model(graph.x, graph.edge_index), graph, split)
            assert result.scores[split] == pytest.approx(expected), split


@each_baseline
def test_baselines_take_several_labels_edge_weights_and_other_attributes(baseline: str) -> None:
    data = multilabel_graph()
    torch.manual_seed(1)
    assert fit(GCN(FEATURES, 4), data, num_parts=4, epochs=1, **BASELINES[baseline]).metric == "micro-F1"
    data = community_graph()
    data.edge_weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(0)) + 0.5
    weighted, plain = run(data=data, **BASELINES[baseline]), run(**BASELINES[baseline])
    assert weighted.losses != plain.losses

    class Placed(Own):
        def forward(self, x: Tensor, edge_index: Tensor, place: Tensor, n_id: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + place[:, :1] * 0 + self.table[n_id], edge_index)

        table = torch.ones(48, FEATURES)

    data = community_graph()
    data.place = torch.ones(48, 2)
    shifted = community_graph()
    shifted.x = shifted.x + 1
    assert run(Placed(), data, **BASELINES[baseline]).losses == run(Own(), shifted, **BASELINES[baseline]).losses


@each_baseline
def test_a_model_that_takes_the_batch_itself_is_trained_as_a_baseline(baseline: str) -> None:
    class OfBatch(Own):
        def forward(self, batch: Data) -> Tensor:  # type: ignore[override]
            return super().forward(batch.x, batch.edge_index)

    assert run(OfBatch(), **BASELINES[baseline]).losses == run(Own(), **BASELINES[baseline]).losses


@each_baseline
def test_a_model_that_writes_into_its_input_spoils_nothing(baseline: str) -> None:
    class Writes(Own):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0), edge_index)

    data, doubled = community_graph(), community_graph()
    doubled.x = 2.0 * doubled.x
    got = run(Writes(), data, batch_size=1, **BASELINES[baseline])
    assert torch.equal(data.x, community_graph().x)
    expected = run(Own(), doubled, batch_size=1, **BASELINES[baseline])
    assert got.losses == expected.losses
    assert got.result.scores == expected.result.scores


@each_baseline
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lipschitz", 0.1),
        ("edge_dropout", 0.1),
        ("refresh_every", "epoch"),
        ("refresh_every", 3),
        ("evaluation", "histories"),
        ("drawings", 2),
        ("checkpoint_dir", "somewhere"),
        ("resume", "somewhere"),
    ],
)
def test_baselines_refuse_what_belongs_to_histories(baseline: str, name: str, value: Any) -> None:
    options: dict[str, Any] = {**BASELINES[baseline], name: value}
    with pytest.raises(gas.InputError, match=f"{name} must be .* with mode '{baseline}', which has no histories"):
        fit(gcn(), Data(), **options)


@pytest.mark.parametrize("fan_out", [None, [], [0, 2], [1.5], "10,10", 10])
def test_sampling_needs_a_fan_out(fan_out: Any) -> None:
    with pytest.raises(gas.InputError, match="fan_out must be a list of integers"):
        fit(gcn(), Data(), mode="sage", fan_out=fan_out)


@pytest.mark.parametrize("mode", ["gas", "full", "history", "cluster"])
def test_only_sampling_has_a_fan_out(mode: Any) -> None:
    with pytest.raises(gas.InputError, match="fan_out belongs to mode 'sage'"):
        fit(gcn(), Data(), mode=mode, fan_out=[10, 10])


@each_baseline
def test_what_cannot_be_right_on_subgraphs_is_refused(baseline: str) -> None:
    class Cached(Own):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(5, CLASSES, cached=True)

    with pytest.raises(gas.UnsupportedModelError, match=r"GCNConv \('conv'\).*cached=True"):
        run(Cached(), **BASELINES[baseline])

    class Pooled(Own):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index).mean(0, keepdim=True)

    with pytest.raises(gas.InputError, match="one row for each of the"):
        run(Pooled(), **BASELINES[baseline])
    with pytest.raises(gas.InputError, match="class"):
        run(GCN(FEATURES, CLASSES - 1), **BASELINES[baseline])
    with pytest.raises(FloatingPointError, match="lower lr"):
        run(lr=1e30, epochs=6, **BASELINES[baseline])


@pytest.mark.gpu
@each_baseline
def test_baselines_train_on_a_gpu_as_on_a_cpu(baseline: str) -> None:
    cpu, gpu = (run(gcn(dropout=0.0), device=device, **BASELINES[baseline]) for device in ("cpu", "cuda"))
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3)
    assert gpu.result.peak_memory is not None
    assert gpu.result.peak_memory > 0


def test_more_parts_than_nodes_are_refused_by_cluster() -> None:
    with pytest.raises(gas.InputError, match="num_parts"):
        fit(gcn(), community_graph(), mode="cluster", num_parts=49)


def test_the_fan_out_may_be_a_tuple_and_goes_through_json() -> None:
    first, second = (run(mode="sage", fan_out=fan_out) for fan_out in ([2, 1], (2, 1)))
    assert first.losses == second.losses
    assert second.result.options["fan_out"] == [2, 1]


# Reproducibility #####################################################################################################


@pytest.mark.parametrize("mode", ["gas", "full", "history"])
def test_same_seed_same_bits(mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "lipschitz": 0.1, "edge_dropout": 0.2}
    first, second = run(seed=5, **options), run(seed=5, **options)
    assert first.losses == second.losses
    assert [epoch.scores for epoch in first.result.epochs] == [epoch.scores for epoch in second.result.epochs]
    assert same_bits(first.weights[-1], second.weights[-1])
    assert not same_bits(first.weights[-1], run(seed=6, **options).weights[-1])


def test_what_ran_before_does_not_matter() -> None:
    first = run(gcn(), seed=5)
    model = gcn()
    torch.rand(17)
    assert same_bits(first.weights[-1], run(model, seed=5).weights[-1])


@pytest.mark.parametrize(("mode", "evaluation"), [("gas", "exact"), ("gas", "histories"), ("history", "exact")])
def test_evaluation_leaves_training_alone(mode: str, evaluation: str) -> None:
    options: dict[str, Any] = {"mode": mode, "evaluation": evaluation, "epochs": 4, "edge_dropout": 0.25}
    often = run(gcn(dropout=0.5, batch_norm=True, layers=3), evaluate_every=1, **options)
    once = run(gcn(dropout=0.5, batch_norm=True, layers=3), evaluate_every=4, **options)
    assert often.losses == once.losses
    assert same_bits(often.weights[-1], once.weights[-1])
    assert [bool(epoch.scores) for epoch in often.result.epochs] == [True] * 4
    assert [bool(epoch.scores) for epoch in once.result.epochs] == [False] * 3 + [True]


def test_exact_evaluation_of_another_graph_leaves_training_alone() -> None:
    dataset = gas.load("cluster", graphs=2)

    def last(evaluate_every: int) -> Weights:
        torch.manual_seed(1)
        model = GraphSAGE(dataset.num_features, dataset.num_classes, hidden=4, dropout=0.5)
        return run(model, dataset, evaluate_every=evaluate_every).weights[-1]

    assert same_bits(last(1), last(3))


def test_storage_in_host_memory_gives_the_same_bits() -> None:
    device, host = run(gcn(layers=3), storage="device"), run(gcn(layers=3), storage="host")
    assert device.losses == host.losses
    assert same_bits(device.weights[-1], host.weights[-1])
    # Two histories of 48 rows and 8 columns of four bytes.
    assert device.result.history_bytes == host.result.history_bytes == 2 * 48 * 8 * 4


def test_workers_give_the_same_bits() -> None:
    assert same_bits(run(epochs=1).weights[-1], run(epochs=1, num_workers=1).weights[-1])


# Refresh #############################################################################################################


def test_histories_are_refreshed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(model: nn.Module, loader: gas.HaloLoader) -> None:
        nonlocal calls
        calls += 1
        gas.refresh(model, loader)

    data = community_graph()
    train_on_nearly_all(data)
    plain = run(gcn(layers=3), data, batch_size=1)
    monkeypatch.setattr(modes_module, "refresh", counted)
    expected: list[tuple[str | int, int]] = [("epoch", 3), (1, 12), ("5", 2), (13, 0)]
    for every, count in expected:
        calls = 0
        refreshed = run(gcn(layers=3), data, batch_size=1, refresh_every=every)
        assert refreshed.result.steps == 12
        assert calls == count
        assert ("refresh" in refreshed.result.seconds) == (count > 0)
        assert same_bits(plain.weights[-1], refreshed.weights[-1]) == (count == 0)


def test_a_number_of_steps_may_be_written_as_text() -> None:
    assert same_bits(run(refresh_every=2).weights[-1], run(refresh_every="2").weights[-1])


# Evaluation, the best epoch and stopping #############################################################################


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    left = iter(values)

    def evaluate(*_: Any, **__: Any) -> dict[str, float]:
        value = next(left)
        return {"train": 0.0, "val": value, "test": value / 2}

    monkeypatch.setattr(NodeClassification, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("values", "every", "patience", "last", "best"),
    [
        ([50.0, 60.0, 55.0, 60.0, 70.0], 1, 2, 4, 2),  # as good is not better
        ([50.0, 60.0, 55.0, 61.0, 60.0, 60.0, 90.0], 1, 2, 6, 4),  # counts from the best
        ([50.0, 40.0, 40.0, 90.0, 80.0, 80.0, 80.0], 1, 3, 7, 4),
        ([50.0, 40.0, 40.0, 40.0, 90.0], 1, 3, 4, 1),
        ([50.0, 40.0, 40.0], 2, 1, 4, 2),  # counts evaluations, not epochs
        ([1.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 1, None, 8, 2),
        ([10.0, 40.0, 20.0], 3, None, 8, 6),  # the last epoch is evaluated too
    ],
)
def test_training_stops_and_returns_to_the_best_epoch(
    monkeypatch: pytest.MonkeyPatch, values: list[float], every: int, patience: int | None, last: int, best: int
) -> None:
    scripted(monkeypatch, values)
    got = run(gcn(batch_norm=True), epochs=8, evaluate_every=every, patience=patience)
    assert [epoch.number for epoch in got.result.epochs] == list(range(1, last + 1))
    assert got.result.best_epoch == best
    assert got.result.scores == got.result.epochs[best - 1].scores
    assert got.result.scores["val"] == max(values[: -(-last // every)])
    assert same_bits(weights_of(got.model), got.weights[best - 1])
    assert all(not same_bits(got.weights[best - 1], other) for i, other in enumerate(got.weights) if i != best - 1)


@pytest.mark.parametrize("options", [{}, {"edge_dropout": 0.5}, {"mode": "history"}, {"mode": "full"}])
def test_scores_are_those_of_the_whole_graph(options: dict[str, Any]) -> None:
    data = community_graph()
    got = run(gcn(dropout=0.5, layers=3), data, epochs=6, **options)
    assert got.result.scores == exact_scores(got.model, data)


def test_scores_from_histories_are_exact_right_after_a_refresh() -> None:
    data = community_graph()
    got = run(gcn(layers=3), data, evaluation="histories", refresh_every="epoch", epochs=4)
    assert got.result.scores == exact_scores(got.model, data)


def test_edge_dropout_changes_training() -> None:
    assert not same_bits(run(edge_dropout=0.5).weights[-1], run().weights[-1])
    assert not same_bits(run(mode="full", edge_dropout=0.5).weights[-1], run(mode="full").weights[-1])


def test_inductive_data_are_evaluated_on_their_own_graphs() -> None:
    dataset = gas.load("cluster", graphs=8)
    torch.manual_seed(1)
    model = GIN(dataset.num_features, dataset.num_classes, hidden=8, layers=2)
    result = fit(model, dataset, num_parts=16, batch_size=4, epochs=2)
    assert dataset.train.num_nodes != dataset.val.num_nodes
    plain = gas.detach(model).eval()
    with torch.no_grad():
        for split, graph in (("train", dataset.train), ("val", dataset.val), ("test", dataset.test)):
            expected = score(plain(graph.x, graph.edge_index), graph, split)
            assert result.scores[split] == pytest.approx(expected, abs=0.2), split
    assert result.steps == 8


def test_evaluation_from_histories_needs_the_training_graph() -> None:
    dataset = gas.load("cluster", graphs=2)
    model = GCN(dataset.num_features, dataset.num_classes)
    with pytest.raises(gas.InputError, match=r"histories.*exact"):
        fit(model, dataset, evaluation="histories")


def test_several_labels_are_scored_by_micro_f1() -> None:
    data = multilabel_graph()
    torch.manual_seed(1)
    model = GCN(FEATURES, 4, hidden=8)
    result = fit(model, data, num_parts=4, epochs=5)
    assert result.metric == "micro-F1"
    assert result.scores == exact_scores(model, data)
    assert result.epochs[0].loss > result.epochs[-1].loss


def test_first_loss_of_several_labels_by_hand() -> None:
    data = multilabel_graph()
    torch.manual_seed(1)
    model = GCN(FEATURES, 4, hidden=8, dropout=0.0)
    with torch.no_grad():
        out = model(data.x, data.edge_index)[data.train_mask]
    y = data.y[data.train_mask]
    expected = -(y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out)).mean()
    assert fit(model, data, mode="full", epochs=1).epochs[0].loss == pytest.approx(float(expected), abs=1e-6)


# Schedules and epochs ################################################################################################


def test_cosine_schedule() -> None:
    rates = [epoch.learning_rate for epoch in run(schedule="cosine", lr=0.2, epochs=6).result.epochs]
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * number / 6)) for number in range(6)])


def test_cosine_schedule_does_not_wait_for_evaluations() -> None:
    often, once = (run(schedule="cosine", epochs=4, evaluate_every=every).result for every in (1, 4))
    assert [e.learning_rate for e in often.epochs] == [e.learning_rate for e in once.epochs]


def test_constant_schedule() -> None:
    assert {epoch.learning_rate for epoch in run(lr=0.03).result.epochs} == {0.03}


def test_plateau_schedule_halves_after_ten_evaluations_without_a_better_score(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [50.0, 60.0] + [60.0] * 30)
    result = run(schedule="plateau", lr=0.08, epochs=14, mode="full").result
    # The second epoch is the best; the tenth evaluation after it is that of epoch 12.
    rates = [epoch.learning_rate for epoch in result.epochs]
    assert rates == pytest.approx([0.08] * 12 + [0.04] * 2)


def test_plateau_schedule_goes_on_while_scores_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [float(number) for number in range(1, 16)])
    assert {epoch.learning_rate for epoch in run(schedule="plateau", epochs=15, mode="full").result.epochs} == {0.01}


@pytest.mark.parametrize(("steps", "expected"), [(None, 12), (1, 3), (3, 9), (4, 12), (99, 12)])
def test_epochs_end_early(steps: int | None, expected: int) -> None:
    data = community_graph()
    train_on_nearly_all(data)
    assert run(data=data, batch_size=1, steps_per_epoch=steps).result.steps == expected


@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "gas"}, *BASELINES.values()], ids=str)
def test_a_graph_made_of_several_trains_like_any_other(options: dict[str, Any]) -> None:
    several = Batch.from_data_list([community_graph(), community_graph()])
    joined = Data(**{name: value for name, value in several if name not in ("batch", "ptr")})
    one, other = (run(data=data, num_parts=4, epochs=3, **options) for data in (several, joined))
    assert one.losses == other.losses
    assert one.result.scores == other.result.scores


@pytest.mark.parametrize("batch_size", [1, 2])
def test_labels_that_change_between_epochs_are_learned_from_then_on(batch_size: int) -> None:
    def losses(change_after: int | None) -> list[float]:
        data = community_graph()

        def change(epoch: Epoch) -> None:
            if epoch.number == change_after:
                data.y = (data.y + 1) % CLASSES

        result = fit(gcn(), data, num_parts=4, batch_size=batch_size, epochs=3, callback=change)
        return [epoch.loss for epoch in result.epochs]

    before, after = losses(None), losses(2)
    assert after[:2] == before[:2]
    assert after[2] > before[2] + 0.1


def test_features_that_change_between_epochs_are_refused() -> None:
    data = community_graph()

    def change(epoch: Epoch) -> None:
        data.x = data.x + 1

    with pytest.raises(gas.InputError, match="takes batches of its training graph"):
        fit(gcn(), data, num_parts=4, epochs=3, callback=change)


def test_the_callback_hears_of_every_epoch_in_order_while_it_happens() -> None:
    heard: list[Epoch] = []
    model, states = gcn(), []

    def listen(epoch: Epoch) -> None:
        heard.append(epoch)
        states.append(weights_of(model))

    result = fit(model, community_graph(), num_parts=4, epochs=5, evaluate_every=2, callback=listen)
    assert heard == result.epochs
    assert [epoch.number for epoch in heard] == [1, 2, 3, 4, 5]
    assert [bool(epoch.scores) for epoch in heard] == [False, True, False, True, True]
    assert all(not same_bits(a, b) for a, b in pairwise(states))
    assert sum(epoch.seconds for epoch in heard) == pytest.approx(result.seconds["train"])


def test_phases_are_told_as_they_begin() -> None:
    told: list[str] = []
    fit(gcn(), community_graph(), num_parts=4, epochs=2, evaluate_every=2, refresh_every="epoch", on_phase=told.append)
    assert [name for name in told if name] == ["partition", "train", "refresh", "train", "refresh", "evaluate"]
    assert told[1::2] == [""] * 6


def test_a_callback_may_end_training() -> None:
    class EnoughError(Exception):
        pass

    def stop(epoch: Epoch) -> None:
        if epoch.number == 2:
            raise EnoughError

    with pytest.raises(EnoughError):
        fit(gcn(), community_graph(), num_parts=4, epochs=5, callback=stop)


# Batches without training nodes ######################################################################################


def history_of(model: nn.Module, slot: str) -> Tensor:
    return history_rows(model)[slot]


def test_a_batch_without_training_nodes_moves_histories_only() -> None:
    data = two_cliques()
    got = run(gcn(dropout=0.0), data, num_parts=2, batch_size=1, epochs=3)
    assert got.result.steps == 3
    # What the two parts learn from is what the first clique alone gives.
    alone = Data(
        **{name: data[name][:4] for name in ("x", "y", "train_mask")},
        edge_index=data.edge_index[:, :12],
        val_mask=data.train_mask[:4],
    )
    expected = run(gcn(dropout=0.0), alone, mode="full", epochs=3)
    assert got.losses == pytest.approx(expected.losses, abs=1e-6)
    rows = history_of(got.model, "convs.0")
    assert bool((rows.abs().sum(1) > 0).all())


def test_a_batch_without_training_nodes_pushes_what_its_weights_give() -> None:
    data, model = two_cliques(), gcn(dropout=0.0)
    with torch.no_grad():
        before = model.convs[0](data.x, data.edge_index)
    fit(model, data, num_parts=2, batch_size=1, epochs=1)
    rows = history_of(model, "convs.0")
    with torch.no_grad():
        after = gas.detach(model).convs[0](data.x, data.edge_index)
    # The first clique is pushed before the only step, the second before or after it.
    torch.testing.assert_close(rows[:4], before[:4])
    assert any(torch.allclose(rows[4:], given[4:], atol=1e-6) for given in (before, after))


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_an_epoch_may_pass_without_a_step(schedule: str) -> None:
    steps = [
        run(gcn(), two_cliques(), num_parts=2, batch_size=1, epochs=1, steps_per_epoch=1, seed=seed, schedule=schedule)
        for seed in range(3)
    ]
    assert {got.result.steps for got in steps} == {0, 1}


# Refusals ############################################################################################################


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "fast"),
        ("partition", "louvain"),
        ("schedule", "linear"),
        ("evaluation", "sampled"),
        ("storage", "tape"),
        ("storage", "disk"),  # without a folder
        ("num_parts", 0),
        ("num_parts", 2.5),
        ("batch_size", 0),
        ("batch_size", 9),
        ("epochs", 0),
        ("epochs", 1.5),
        ("evaluate_every", 0),
        ("steps_per_epoch", 0),
        ("patience", 0),
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lipschitz_radius", 0.0),
        ("grad_norm", 0.0),
        ("grad_norm", math.nan),
        ("weight_decay_conv", -0.1),
        ("weight_decay_other", -0.1),
        ("lipschitz", -0.1),
        ("num_workers", -1),
        ("seed", -1),
        ("edge_dropout", -0.1),
        ("edge_dropout", 1.0),
        ("edge_dropout", math.nan),
        ("refresh_every", "sometimes"),
        ("refresh_every", 0),
        ("refresh_every", "0"),
        ("refresh_every", -2),
        ("refresh_every", 1.5),
        ("refresh_every", True),
        ("refresh_every", "²"),
        ("checkpoint_every", "never"),
        ("checkpoint_every", "steps"),
        ("checkpoint_every", 0),
        ("checkpoint_every", "0"),
        ("checkpoint_every", -1),
        ("checkpoint_every", 2.5),
        ("checkpoint_every", True),
        ("checkpoint_every", None),
        ("device", "nowhere"),
    ],
)
def test_impossible_options_are_refused_before_anything_else(name: str, value: Any) -> None:
    model = gcn()
    with pytest.raises(gas.InputError, match=name):
        # Data that would be refused too: options are looked at first.
        fit(model, Data(), **{name: value})
    assert not hasattr(model, "_autoscaler")


def test_histories_on_disk_need_a_folder() -> None:
    with pytest.raises(gas.InputError, match=r"need a folder, but got storage='disk' without history_dir"):
        fit(gcn(), Data(), storage="disk")


@pytest.mark.parametrize("every", ["epoch", 1, 7, "7"])
def test_checkpoints_are_written_after_epochs_or_steps(every: Any) -> None:
    with pytest.raises(gas.InputError, match="x must"):  # the options are fine
        fit(gcn(), Data(), checkpoint_every=every)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be used here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(gas.InputError, match="device"):
        fit(gcn(), Data(), device="cuda")


def _without(name: str) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        del data[name]

    return change


def _with(name: str, make: Callable[[Data], Any]) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        data[name] = make(data)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("x"), "^x must"),
        (_without("y"), "^y must"),
        (_without("edge_index"), "^edge_index must"),
        (_without("train_mask"), "^train_mask must"),
        (_without("val_mask"), "^val_mask must"),
        (_with("val_mask", lambda data: torch.zeros(48, dtype=torch.bool)), "^val_mask must hold"),
        (_with("train_mask", lambda data: torch.zeros(48, dtype=torch.bool)), "^train_mask must hold"),
        (_with("train_mask", lambda data: data.train_mask[:47]), "^train_mask must have one row for each of the 48"),
        (_with("test_mask", lambda data: data.test_mask.float()), "^test_mask must be bool, "),
        (_with("x", lambda data: data.x.masked_fill(data.x > 0, math.nan)), "^x must be finite"),
        (_with("x", lambda data: data.x.masked_fill(data.x > 0, math.inf)), "^x must be finite"),
        (_with("x", lambda data: data.x.long()), "^x must be floating"),
        (_with("y", lambda data: data.y - 2), "^y must"),
        (_with("y", lambda data: data.y[:40]), "^y must"),
        (_with("edge_index", lambda data: data.edge_index + 1), "^edge_index must"),
        (_with("edge_weight", lambda data: torch.ones(3)), "^edge_weight must"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(change: Callable[[Data], None], message: str) -> None:
    data, model = community_graph(), gcn()
    change(data)
    with pytest.raises(gas.InputError, match=message):
        fit(model, data, num_parts=4)
    assert not hasattr(model, "_autoscaler")


@pytest.mark.parametrize("broken", ["train", "val", "test"])
def test_every_graph_of_a_data_set_is_checked(broken: str) -> None:
    dataset = gas.load("cluster", graphs=2)
    getattr(dataset, broken).x[0, 0] = math.nan
    with pytest.raises(gas.InputError, match="finite"):
        fit(GCN(dataset.num_features, dataset.num_classes), dataset, num_parts=2, epochs=1)


def test_an_autoscaled_model_gets_new_histories() -> None:
    data = community_graph()
    attached_before = fit(gas.autoscale(gcn(), data), data, num_parts=4, epochs=2)
    assert [epoch.loss for epoch in attached_before.epochs] == [
        epoch.loss for epoch in fit(gcn(), data, num_parts=4, epochs=2).epochs
    ]


def test_more_parts_than_nodes_are_refused() -> None:
    with pytest.raises(gas.InputError, match="num_parts"):
        fit(gcn(), community_graph(), num_parts=49)


def test_a_model_with_too_few_outputs_is_refused() -> None:
    torch.manual_seed(1)
    with pytest.raises(gas.InputError, match="class"):
        fit(GCN(FEATURES, CLASSES - 1), community_graph(), num_parts=4, epochs=1)


def test_a_model_without_message_passing_is_refused() -> None:
    with pytest.raises(gas.UnsupportedModelError, match="message-passing"):
        fit(nn.Linear(FEATURES, CLASSES), community_graph(), num_parts=4)


@pytest.mark.parametrize(("model", "taken"), [(GCN, True), (GIN, False), (GraphSAGE, False), (GAT, False)])
def test_edge_weights_are_used_or_refused(model: type[nn.Module], taken: bool) -> None:
    data = community_graph()
    data.edge_weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(0)) + 0.5
    made = model(FEATURES, CLASSES)
    if taken:
        fit(made, data, num_parts=4, epochs=1)
        return
    with pytest.raises(gas.InputError, match="edge weights"):
        fit(made, data, num_parts=4, epochs=1)


@pytest.mark.parametrize("lr", [1e20, 1e30])
def test_a_loss_that_is_no_number_ends_training(lr: float) -> None:
    with pytest.raises(FloatingPointError, match=r"(the loss is|not finite).* in batch \d+ of epoch .* lower lr"):
        run(lr=lr, epochs=6)


def test_weights_that_end_as_no_numbers_are_not_returned_as_a_result() -> None:
    """The loss of the only step is fine; what the step leaves behind is not."""
    with pytest.raises(FloatingPointError, match=r"not finite .*after epoch 1: lower lr"):
        run(lr=1e30, epochs=1, num_parts=1, batch_size=1)


# Results #############################################################################################################


def test_the_result_goes_through_json() -> None:
    result = run(evaluate_every=2, refresh_every="epoch", patience=3, cache_dir=None).result
    text = json.dumps(result.to_dict(), allow_nan=False)
    back = json.loads(text)
    assert back == result.to_dict()
    back["epochs"] = [Epoch(**epoch) for epoch in back["epochs"]]
    assert FitResult(**back) == result


def test_the_result_goes_through_json_without_test_nodes() -> None:
    data = community_graph()
    del data.test_mask
    result = run(data=data).result
    assert not result.scores.get("test", math.nan) >= 0
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_result_says_what_was_asked_for() -> None:
    result = run(lr=0.02, seed=4, mode="history").result
    assert result.options["lr"] == 0.02
    assert result.options["seed"] == 4
    assert result.options["mode"] == "history"
    assert "model" not in result.options
    assert "callback" not in result.options
    assert result.metric == "accuracy"
    assert set(result.seconds) == {"partition", "train", "evaluate"}


def test_connectivity_is_that_of_the_parts() -> None:
    # The cliques are the parts, and no node of one has an edge to the other.
    assert run(data=two_cliques(), num_parts=2, batch_size=1).result.connectivity == 0.0


def test_the_loss_is_a_mean_over_training_nodes() -> None:
    data = community_graph()
    train_on(data, torch.arange(48) < 7)
    model = GCN(FEATURES, CLASSES, layers=1, dropout=0.0)
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    # One layer needs no history, and a rate of almost zero leaves the weights alone.
    expected = F.cross_entropy(out[:7], data.y[:7])
    losses = run(model, data, lr=1e-12, epochs=2, batch_size=1).losses
    assert losses == pytest.approx([float(expected)] * 2, abs=1e-5)


# The penalty #########################################################################################################


def penalty_of(model: nn.Module, data: Data) -> float:
    model.eval()
    torch.manual_seed(0)
    batch = next(iter(gas.HaloLoader(data, 1)))
    with torch.no_grad(), gas.LocalLipschitz(model, radius=0.1) as penalty:
        model(batch)
    return float(penalty.value())


def test_the_penalty_makes_layers_smoother() -> None:
    data = community_graph()
    without, with_penalty = (
        run(gcn(dropout=0.0), data, lipschitz=weight, epochs=20, lr=0.05) for weight in (0.0, 30.0)
    )
    assert without.weights[-1].keys() == with_penalty.weights[-1].keys()
    for got in (without, with_penalty):
        got.model.load_state_dict(got.weights[-1])
    assert penalty_of(with_penalty.model, data) < 0.5 * penalty_of(without.model, data)


def test_the_radius_of_the_penalty_matters() -> None:
    first, second = (run(lipschitz=0.5, lipschitz_radius=radius).weights[-1] for radius in (0.1, 0.2))
    assert not same_bits(first, second)


def test_the_loss_is_told_without_the_penalty() -> None:
    plain, penalized = (run(gcn(dropout=0.0), epochs=1, num_parts=1, batch_size=1, lipschitz=w) for w in (0.0, 100.0))
    assert plain.losses == penalized.losses
    assert not same_bits(plain.weights[-1], penalized.weights[-1])


# Models of one's own #################################################################################################


class Own(nn.Module):
    """A linear layer, then a convolution; names no modules for weight decay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.conv = nn.Linear(FEATURES, 5), GraphConv(5, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.linear(x).relu(), edge_index)
        return out


def test_layers_that_pass_messages_are_the_first_group_by_default() -> None:
    data, reference = community_graph(), Own()
    groups = [
        {"params": list(reference.conv.parameters()), "weight_decay": 0.2},
        {"params": list(reference.linear.parameters()), "weight_decay": 0.01},
    ]
    expected = loop_by_hand(reference, data, groups, epochs=6)
    got = run(Own(), data, mode="full", epochs=6, weight_decay_conv=0.2, weight_decay_other=0.01)
    assert got.losses == pytest.approx(expected, abs=1e-6)


def test_a_model_of_one_s_own_is_scored_on_the_whole_graph() -> None:
    data = community_graph()
    got = run(Own(), data, epochs=4)
    assert got.result.scores == exact_scores(got.model, data)


def test_a_model_may_take_other_attributes_of_the_data() -> None:
    class Placed(Own):
        def forward(self, x: Tensor, edge_index: Tensor, place: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + place, edge_index)

    data = community_graph()
    data.place = torch.ones(48, FEATURES)
    shifted = community_graph()
    shifted.x = shifted.x + 1
    assert run(Placed(), data).losses == run(Own(), shifted).losses


def test_double_precision_stays_double() -> None:
    data = community_graph()
    data.x = data.x.double()
    got = run(Own().double(), data)
    assert got.losses == pytest.approx(run(Own()).losses, abs=1e-5)


def test_the_user_s_data_are_left_alone() -> None:
    data = multilabel_graph()
    data.y = data.y.bool()
    before = data.clone()
    torch.manual_seed(1)
    fit(GCN(FEATURES, 4), data, num_parts=4, epochs=1)
    assert data.keys() == before.keys()
    assert all(torch.equal(data[name], before[name]) for name in data.keys())  # noqa: SIM118


def test_a_data_set_is_taken_as_it_is() -> None:
    dataset = datasets.Dataset.of(community_graph())
    assert same_bits(run(data=dataset).weights[-1], run().weights[-1])


def test_the_model_stays_autoscaled_and_can_be_detached_and_trained_on() -> None:
    data = community_graph()
    got = run(data=data)
    assert gas.infer(got.model, gas.HaloLoader(data, 4)).shape == (48, CLASSES)
    again = run(gas.detach(got.model), data)
    assert not same_bits(got.weights[-1], again.weights[-1])


@pytest.mark.parametrize("refresh_every", ["never", "epoch"])
def test_the_number_of_batches_to_evaluate_in_changes_time_only(refresh_every: str) -> None:
    data = generate.communities(120, degree=4.0, num_features=6, num_classes=3)
    found = []
    for evaluate_parts in (None, 1, 5):
        torch.manual_seed(0)
        model = GCN(6, 3, hidden=8, layers=3, dropout=0.0)
        options: dict[str, Any] = {"num_parts": 4, "epochs": 4, "refresh_every": refresh_every}
        result = fit(model, data, evaluate_parts=evaluate_parts, **options)
        found.append([(epoch.loss, *epoch.scores.values()) for epoch in result.epochs])
    for other in found[1:]:
        assert [pytest.approx(row, abs=1e-4) for row in found[0]] == other
