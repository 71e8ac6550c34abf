"""Errors of histories and gradients on heterogeneous graphs, by type of nodes."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.analysis.bounds import error_by_sweep, measure
from gnnautoscale.attach.autoscaler import attached
from gnnautoscale.errors import InputError
from gnnautoscale.forward import TypedPlan
from gnnautoscale.report import write_report
from gnnautoscale.runs import explain, read_run
from support.typed import MODELS, typed_graph

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")


def graph() -> HeteroData:
    data = typed_graph(6)
    data["paper"].train_mask = torch.arange(40) % 2 == 0
    return data


def stale(name: str, *, bidirectional: bool = False) -> tuple[nn.Module, gas.HaloLoader]:
    """A model whose weights have changed since its histories were written."""
    torch.manual_seed(0)
    data = graph()
    model = gas.autoscale(MODELS[name]().double().eval(), data)
    loader = gas.HaloLoader(data, 4, partition="random", bidirectional=bidirectional)
    gas.refresh(model, loader)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return model, loader


@pytest.mark.parametrize("name", ["SAGE sum", "GCN", "HGT", "SGC", "residual"])
def test_errors_are_those_of_rows_of_a_type(name: str) -> None:
    model, loader = stale(name)
    before = {slot: history.raw.clone() for slot, history in attached(model).memory.histories.items()}
    layers = {layer["layer"]: layer for layer in gas.diagnose(model, loader)["staleness"]["layers"]}
    for slot, history in attached(model).memory.histories.items():
        assert torch.equal(history.raw, before[slot])
    plan = attached(model).plan
    assert isinstance(plan, TypedPlan)
    kinds = {slot: plan.kinds[slot] for slot in plan.live}
    outputs = {"output": "paper"} if name != "residual" else {f"output of {kind}": kind for kind in ("author", "paper")}
    assert {slot: layer["type"] for slot, layer in layers.items()} == {**kinds, **outputs}
    assert all(layers[slot]["staleness"]["mean"] > 1e-3 for slot in plan.live)
    assert all(layers[slot]["staleness"] is None and layers[slot]["closeness"]["max"] > 1e-3 for slot in outputs)

    measured = {errors.name: errors for errors in measure(model, loader)}
    slot = next(iter(plan.live))
    halos = [batch[kinds[slot]].n_id[batch[kinds[slot]].batch_size :].as_subclass(torch.Tensor) for batch in loader]
    pulled = torch.unique(torch.cat(halos))
    assert layers[slot]["staleness"]["mean"] == pytest.approx(float(measured[slot].staleness[pulled].mean()))

    exact = gas.infer(model, loader)
    out = exact["author"] if isinstance(exact, dict) else exact
    assert torch.allclose(measured[next(iter(outputs))].norm, out.norm(dim=1))
    gas.refresh(model, loader)
    layers = {layer["layer"]: layer for layer in gas.diagnose(model, loader)["staleness"]["layers"]}
    assert max(layer["closeness"]["max"] for layer in layers.values()) < 1e-9
    assert max(layers[slot]["staleness"]["max"] for slot in plan.live) < 1e-9
    assert error_by_sweep(model, loader, 1)[0] < 1e-9


def test_rows_are_grouped_by_the_age_of_their_type() -> None:
    model, loader = stale("SAGE sum")
    first = loader.graph.first
    ages = torch.zeros(loader.graph.num_nodes, dtype=torch.long)
    for number, kind in enumerate(first):
        ages[first[kind] :] = number
    for layer in gas.diagnose(model, loader, ages=ages)["staleness"]["layers"]:
        assert {group["age"] for group in layer["by_age"]} <= {list(first).index(layer["type"])}


@pytest.mark.parametrize("name", ["SAGE sum", "weighted", "residual"])
def test_gradients_are_compared_with_those_of_full_batch(name: str) -> None:
    model, loader = stale(name, bidirectional=True)
    gas.refresh(model, loader)
    found = gas.diagnose(model, loader, "gradients")["gradients"]
    assert 0.1 < found["cosine"] < 0.99999

    def loss_of(batch: Any, out: Any) -> torch.Tensor:
        out = out["paper"] if isinstance(out, dict) else out
        size = out.size(0)
        mask = batch["paper"].train_mask[:size]
        return F.cross_entropy(out[mask], batch["paper"].y[:size][mask], reduction="sum") / 20

    weights = list(model.parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    for batch in loader.in_order():
        out = model(batch)
        pieces = torch.autograd.grad(loss_of(batch, out), weights, allow_unused=True)
        for total, piece in zip(sums, pieces, strict=True):
            total += 0.0 if piece is None else piece
    whole = next(iter(gas.HaloLoader(loader.data, 1)))
    full = torch.autograd.grad(loss_of(whole, model(whole)), weights, allow_unused=True)
    ours = torch.cat([total.flatten() for total in sums])
    wanted = torch.cat(
        [torch.zeros_like(w).flatten() if g is None else g.flatten() for w, g in zip(weights, full, strict=True)]
    )
    assert found["cosine"] == pytest.approx(float(F.cosine_similarity(ours, wanted, dim=0)), rel=1e-6)
    assert found["relative_error"] == pytest.approx(float((ours - wanted).norm() / wanted.norm()), rel=1e-6)
    assert found["compensated"]["relative_error"] < 1e-2 * found["relative_error"]  # linear in their messages


def test_gradients_need_a_type_with_targets() -> None:
    model, loader = stale("residual")
    loader.data["author"].y = torch.zeros(30, dtype=torch.long)
    with pytest.raises(InputError, match=r"one type of nodes with outputs.*author, paper"):
        gas.diagnose(model, loader, "gradients")
    assert gas.diagnose(model, loader, "gradients", target="paper")["gradients"]["cosine"] > 0


@pytest.mark.parametrize("name", ["SAGE sum", "HGT"])
def test_jacobians_are_those_of_all_rows_that_a_layer_gets(name: str) -> None:
    model, loader = stale(name)
    found = gas.diagnose(model, loader, "lipschitz")["lipschitz"]["layers"][0]
    plain: Any = gas.detach(model)
    data, writes = graph(), ("author", "writes", "paper")
    rows = {kind: plain.first[kind](data[kind].x).detach() for kind in data.node_types}
    kinds: list[str] = data.node_types if name == "HGT" else ["author", "paper"]
    if name == "HGT":
        rows = {kind: x.relu() for kind, x in rows.items()}

    def out(*given: Tensor) -> Tensor:
        if name != "HGT":
            only: Tensor = plain.convs[0].convs[writes](given, data[writes].edge_index)
            return only.flatten()
        found = plain.convs[0](dict(zip(kinds, given, strict=True)), data.edge_index_dict)
        return torch.cat([x.flatten() for x in found.values() if x is not None])

    inputs = tuple(rows[kind] for kind in kinds)
    pieces = torch.autograd.functional.jacobian(out, inputs)  # type: ignore[no-untyped-call]
    whole = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
    assert found["whole"] == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-3)
    assert (found["message"] is None) == (name == "HGT")


def test_a_run_is_measured_reported_and_explained(tmp_path: Path) -> None:
    data = graph().apply(lambda x: x.float() if x.is_floating_point() else x)
    for name in ("val_mask", "test_mask"):
        data["paper"][name] = ~data["paper"].train_mask
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_parts": 4, "epochs": 2, "lr": 0.3, "device": "cpu", "diagnose_every": 1}
    what = ["staleness", "gradients"]
    gas.fit(MODELS["SAGE sum"](), data, **options, run_dir=str(tmp_path / "run"), diagnose=what)
    record = read_run(tmp_path / "run")
    assert len(record.staleness) == len(record.gradients) == 2
    assert {layer["type"] for layer in record.staleness[-1]["layers"]} >= {"paper", "author"}
    assert any(layer["by_age"] for layer in record.staleness[-1]["layers"])
    write_report([tmp_path / "run"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert all(each["layer"] in html.unescape(text) for each in record.staleness[-1]["layers"])
    record.staleness[-1]["layers"] = [
        {"layer": "convs.0 to paper", "type": "paper", "staleness": {"relative": 0.9}},
        {"layer": "output of author", "type": "author", "closeness": {"relative": 0.001}},
        {"layer": "output of paper", "type": "paper", "closeness": {"relative": 0.8}},
    ]
    (found,) = (finding for finding in explain(record) if finding.name == "staleness")
    assert found.sentence.startswith(
        "Histories of 'convs.0 to paper' are off by 0.9 of the embeddings' norm, and outputs by 0.8"
    )
