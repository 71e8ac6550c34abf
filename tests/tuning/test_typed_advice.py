"""Settings for heterogeneous graphs."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]
from torch_geometric.transforms import RandomLinkSplit  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.data import TypedDataset, TypedLinks
from gnnautoscale.tasks import task_for
from gnnautoscale.training import FitOptions
from gnnautoscale.tuning import tune
from gnnautoscale.tuning.trials import Cut, Trials
from support.typed import MODELS, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


def graph() -> HeteroData:
    data = typed_graph(6).apply(lambda x: x.float() if x.is_floating_point() else x)
    place = torch.arange(40) % 4
    for name, which in (("train", place < 2), ("val", place == 2), ("test", place == 3)):
        data["paper"][f"{name}_mask"] = which
    return data


def test_a_part_is_measured_over_all_types() -> None:
    data = HeteroData()
    data["a"].x = torch.zeros(4, 2)  # 32 bytes
    data["b"].num_nodes = 4
    data["b"].y = torch.tensor([0, 0, 1, 1])  # 32 bytes
    data["b"].train_mask = torch.ones(4, dtype=torch.bool)  # 4 bytes
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])  # 64 bytes
    dataset = TypedDataset.of_types(data)
    labels = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    cut = Cut.of(data, labels, task_for(dataset), dataset.target)
    assert (cut.rows, cut.skew, cut.connectivity) == (5, 0.5, 0.125)
    assert cut.work == (5 + 3 + 4 + 1) / 2
    assert cut.kept == 9 * (32 // 8 + 32 // 8 + 4 // 8) + 4 * 16


def test_histories_are_those_of_all_types() -> None:
    data = graph()
    dataset = TypedDataset.of_types(data)
    options = FitOptions.of({"device": "cpu"})
    trials = Trials(MODELS["SAGE sum"], dataset, task_for(dataset), [1, 2], None, options)
    model = gas.autoscale(MODELS["SAGE sum"](), data)
    model(next(iter(gas.HaloLoader(data, 2))))
    kept = sum(history.raw.nbytes for history in attached(model).memory.histories.values())
    assert trials._history_bytes("same") == 2 * kept
    found = trials.agreement(2, 1, trials.places[0])
    assert 0 < found["cosine"] < 1 < found["sweeps"]


def test_settings_are_proposed() -> None:
    data = graph()
    advice = tune(MODELS["SAGE sum"], data, device="cpu")
    assert [candidate.num_parts for candidate in advice.candidates] == [1, 2]
    assert advice.options["mode"] == "full" or advice.options["num_parts"] == 2
    named = tune("hetero-sage", data, device="cpu", model_options={"hidden": 8, "layers": 2})
    gas.fit(MODELS["SAGE sum"](), data, epochs=1, device="cpu", **named.options)


def test_settings_for_links_are_proposed() -> None:
    kinds = [("author", "writes", "paper")], [("paper", "written_by", "author")]
    split = RandomLinkSplit(
        edge_types=kinds[0], rev_edge_types=kinds[1], disjoint_train_ratio=0.3, add_negative_train_samples=False
    )
    advice = tune("hetero-sage", split(graph()), task="link", device="cpu", model_options={"hidden": 8})
    assert advice.options.get("compensate", "none") == "none"
    (train, _, _) = graphs = split(graph())
    dataset = TypedLinks.of_splits(graphs)
    trials = Trials(MODELS["residual"], dataset, task_for(dataset, "link"), [1], None, FitOptions.of({"device": "cpu"}))
    assert not trials.compares_gradients
    assert trials.cuts[1].rows == train.num_nodes
