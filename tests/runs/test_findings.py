"""Findings about a run: each just over its threshold, and none just below it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gnnautoscale.cli as cli
from gnnautoscale.runs import findings as module
from gnnautoscale.runs.findings import Finding, explain
from gnnautoscale.runs.folder import RunFolder, RunRecord

QUIET = {"seconds": {"train": 10.0}, "scores": {"train": 80.0, "val": 75.0}, "best_epoch": 50, "connectivity": 0.5}
DEFAULT: Any = object()


def epoch(number: int, **values: Any) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": number, "loss": 1.0, "scores": {}, "seconds": 1.0, "steps": number, **values}


def record(
    *,
    options: dict[str, Any] | None = None,
    epochs: list[dict[str, Any]] | None = None,
    result: Any = DEFAULT,
    parts: dict[str, Any] | None = None,
    staleness: list[dict[str, Any]] | None = None,
    gradients: list[dict[str, Any]] | None = None,
) -> RunRecord:
    return RunRecord(
        Path("runs/a"),
        {"title": "a run", "options": options or {}, "parts": parts},
        epochs=[epoch(number) for number in range(1, 101)] if epochs is None else epochs,
        staleness=staleness or [],
        gradients=gradients or [],
        result=QUIET if result is DEFAULT else result,
    )


def only(found: RunRecord) -> Finding:
    findings = explain(found)
    assert len(findings) == 1, findings
    return findings[0]


def test_nothing_stands_out() -> None:
    assert explain(record()) == []
    assert explain(RunRecord(Path("a"), {}, result={})) == []
    assert explain(record(epochs=[], result={"seconds": {}, "scores": {}})) == []


def test_unfinished() -> None:
    finding = only(record(result=None, options={"checkpoint_dir": "runs/c"}))
    assert finding.name == "unfinished"
    assert "after epoch 100" in finding.sentence
    assert "--resume runs/c" in finding.change
    assert finding.times == math.inf
    assert finding.to_dict()["times"] is None
    assert "--checkpoint-dir" in only(record(result=None, epochs=[])).change


def test_a_model_that_is_not_exact() -> None:
    found = {"summary": "NOT exact: 9 nodes", "inference": 2e-4, "training": 1e-3, "tolerance": 1e-4, "exact": False}
    finding = only(replace(record(), verification=found))
    assert finding.name == "not exact"
    assert finding.sentence == "The trained model is NOT exact: 9 nodes"
    assert "detach and autoscale it again" in finding.change
    assert finding.times == pytest.approx(10.0)
    alone = {**found, "training": None}  # not compared
    assert only(replace(record(), verification=alone)).times == pytest.approx(2.0)
    unequal = {**found, "inference": None, "training": None}  # infinite
    assert only(replace(record(), verification=unequal)).times == math.inf
    assert explain(replace(record(), verification={**found, "exact": True})) == []


def layers(*relative: float | None) -> list[dict[str, Any]]:
    return [
        {"layer": f"convs.{number}", "staleness": None if value is None else {"relative": value}}
        for number, value in enumerate(relative)
    ]


def test_staleness_names_the_worst_layer_its_course_and_the_age() -> None:
    measured = [{"epoch": 1, "layers": layers(0.2, 0.4, None)}, {"epoch": 9, "layers": layers(0.12, 0.11, None)}]
    finding = only(record(staleness=measured, epochs=[epoch(1), epoch(2, age={"mean": 7.4, "max": 20})]))
    assert finding.name == "staleness"
    assert "'convs.0' are off by 0.12" in finding.sentence
    assert "It hardly shrinks: at first it was 0.2" in finding.sentence
    assert "7 steps old" in finding.sentence
    assert "--refresh-every epoch" in finding.change
    assert finding.times == pytest.approx(0.12 / module.STALENESS)


def test_staleness_that_shrinks_and_with_refresh() -> None:
    measured = [{"layers": layers(0.5)}, {"layers": layers(0.2)}]
    finding = only(record(staleness=measured, options={"refresh_every": "epoch"}))
    assert "It is shrinking: at first it was 0.5" in finding.sentence
    assert "steps old" not in finding.sentence
    assert "--refresh-every" not in finding.change
    assert "--num-parts" in finding.change
    assert "measured only once" in only(record(staleness=[{"layers": layers(0.2)}])).sentence


def test_staleness_at_the_threshold_and_without_histories() -> None:
    assert explain(record(staleness=[{"layers": layers(module.STALENESS)}])) == []
    assert explain(record(staleness=[{"layers": layers(None)}])) == []
    assert explain(record(staleness=[{"layers": []}])) == []


def test_staleness_that_hardly_reaches_the_output() -> None:
    def measured(error: float) -> list[dict[str, Any]]:
        last = {"layer": "output", "staleness": None, "closeness": {"relative": error}}
        return [{"layers": [*layers(0.5), last]}]

    assert explain(record(staleness=measured(module.OUTPUT_ERROR))) == []
    assert "0.5 of the embeddings' norm, and outputs by 0.03 of" in only(record(staleness=measured(0.03))).sentence


def test_gradient_error() -> None:
    def measured(error: float | None) -> list[dict[str, Any]]:
        worst = [{"layer": "convs.0.bias", "relative_error": 0.1}, {"layer": "convs.1.bias", "relative_error": 0.9}]
        return [{"relative_error": 9.0, "cosine": 0.1}, {"relative_error": error, "cosine": 0.8, "layers": worst}]

    finding = only(record(gradients=measured(0.75)))
    assert finding.name == "gradient error"
    assert "0.75" in finding.sentence
    assert "cosine 0.80" in finding.sentence
    assert "'convs.1.bias'" in finding.sentence
    assert finding.times == 1.5
    assert explain(record(gradients=measured(module.GRADIENT_ERROR))) == []
    assert explain(record(gradients=measured(None))) == []


def test_gradient_error_is_that_of_the_steps_that_were_made() -> None:
    found = [{"relative_error": 0.9, "cosine": 0.96, "compensated": {"relative_error": 0.1, "cosine": 0.99}}]
    assert only(record(gradients=found)).name == "gradient error"
    assert explain(record(options={"compensate": "gradient"}, gradients=found)) == []


def test_what_the_border_of_batches_costs() -> None:
    def measured(plain: float, compensated: float | None) -> list[dict[str, Any]]:
        other = None if compensated is None else {"cosine": compensated}
        return [{"relative_error": 0.3, "cosine": plain, "compensated": other}]

    finding = only(record(gradients=measured(0.9, 0.99)))
    assert finding.name == "border"
    assert "a cosine of 0.900 to that of full batch; compensated" in finding.sentence
    assert "0.990" in finding.sentence
    assert "--compensate gradient" in finding.change
    assert finding.times == pytest.approx(2.0)
    assert explain(record(gradients=measured(0.9, 0.94))) == []  # less than half of the way
    assert explain(record(gradients=measured(0.96, 1.0))) == []
    assert explain(record(gradients=measured(0.9, None))) == []
    assert explain(record(options={"compensate": "gradient"}, gradients=measured(0.9, 0.99))) == []


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"storage": "disk"}, "--storage auto). Or move fewer bytes: --history-dtype bfloat16"),
        ({"storage": "disk", "history_dtype": "int8"}, "--storage auto)."),
        ({"storage": "host", "device": "cuda"}, "--storage device). Or move fewer bytes"),
        ({"storage": "device"}, "Cut into fewer parts"),
    ],
)
def test_transfers(options: dict[str, Any], change: str) -> None:
    slow_start = epoch(1, time={"pull": 1.0})  # does not count
    finding = only(record(options=options, epochs=[slow_start, epoch(2, time={"pull": 0.25, "push": 0.05})]))
    assert finding.name == "transfers"
    assert "30 % of training (25 and 5 %)" in finding.sentence
    assert change in finding.change
    assert finding.times == pytest.approx(0.3 / module.WAITING_SHARE)
    assert explain(record(epochs=[epoch(1), epoch(2, time={"pull": 0.125, "push": 0.125})])) == []


def test_loader() -> None:
    waiting = [epoch(1), epoch(2, time={"loader": 0.5})]
    assert "50 %" in only(record(epochs=waiting)).sentence
    assert "--num-workers" in only(record(epochs=waiting)).change
    assert "--drawings 10" in only(record(epochs=waiting, options={"batch_size": 2})).change
    assert "--num-workers" in only(record(epochs=waiting, options={"batch_size": 2, "drawings": 3})).change
    assert explain(record(epochs=[epoch(1), epoch(2, time={"loader": 0.25})])) == []


def small(nodes: int, count: int, seconds: float, **options: Any) -> RunRecord:
    parts = {"count": count, "batches": {"nodes": [nodes] * count, "halo": [0] * count}}
    return record(parts=parts, options=options, epochs=[epoch(1, seconds=99.0), epoch(2, seconds=seconds)])


def test_tiny_batches() -> None:
    finding = only(small(500, 16, 0.08, batch_size=1))
    assert finding.name == "tiny batches"
    assert "16 steps of 500 nodes" in finding.sentence
    assert "5.0 ms" in finding.sentence
    assert "--batch-size 2" in finding.change
    assert "--num-parts 8" in finding.change
    assert finding.times == 2.0
    assert explain(small(module.TINY_BATCH_NODES, 16, 0.08)) == []
    assert explain(small(500, module.MANY_STEPS - 1, 0.035)) == []
    assert explain(small(500, 16, 16 * module.TINY_STEP_SECONDS)) == []
    # Two parts make a batch that is large enough.
    assert explain(small(500, 32, 0.08, batch_size=2)) == []


def test_empty_histories_matter_in_a_short_run() -> None:
    short = [epoch(number, hit_ratio=0.3 if number == 1 else 1.0) for number in range(1, 11)]
    finding = only(record(epochs=short))
    assert finding.name == "empty histories"
    assert "first of 10 epochs, 70 %" in finding.sentence
    assert finding.times == pytest.approx(2.0)
    assert explain(record(epochs=[*short, epoch(11)])) == []
    assert explain(record(epochs=[epoch(1, hit_ratio=module.FIRST_HIT_RATIO)])) == []


def test_memory() -> None:
    def used(peak: int | None, histories: int, **options: Any) -> RunRecord:
        result = {**QUIET, "peak_memory": peak, "history_bytes": histories, "storage": "host: it fits"}
        return record(result=result, options={"storage": "device", "num_parts": 8, "mode": "gas", **options})

    finding = only(used(2 * 10**9, 15 * 10**8))
    assert (finding.name, finding.times) == ("memory of histories", 1.5)
    assert "1.5 GB, 75 % of the peak of 2 GB" in finding.sentence
    assert "--storage disk" in finding.change
    assert "--storage host" in only(used(2 * 10**9, 15 * 10**8, device="cuda")).change
    batches = only(used(2 * 10**9, 10**9))  # half is not more than half
    assert (batches.name, batches.times) == ("memory of batches", 1.0)
    assert "--num-parts 16" in batches.change
    # Histories in host memory are no part of a GPU's peak, but of a CPU's; "auto" says where they are.
    assert only(used(2 * 10**9, 15 * 10**8, device="cuda", storage="host")).name == "memory of batches"
    assert only(used(2 * 10**9, 15 * 10**8, device="cuda", storage="auto")).name == "memory of batches"
    assert only(used(2 * 10**9, 15 * 10**8, storage="auto")).name == "memory of histories"
    assert "gas tune" in only(used(2 * 10**9, 0, mode="full")).change
    assert explain(used(10**9 - 1, 10**8)) == []
    assert explain(used(None, 10**8)) == []


def test_connectivity() -> None:
    def cut(ratio: float, **options: Any) -> RunRecord:
        return record(result={**QUIET, "connectivity": ratio}, options={"num_parts": 40, **options})

    finding = only(cut(2.5))
    assert finding.name == "connectivity"
    assert "2.5 halo nodes" in finding.sentence
    assert finding.change == "Cut into fewer parts: --num-parts 20."
    assert finding.times == 2.5
    assert only(cut(2.5, partition="random")).change == "Cut with METIS: --partition metis."
    assert only(cut(2.5, mode="history")).change == "Cut with METIS: --partition metis and --mode gas."
    assert explain(cut(module.CONNECTIVITY)) == []


def test_connectivity_of_an_unfinished_run() -> None:
    parts = {"count": 2, "batches": {"nodes": [10, 10], "halo": [30, 20]}}
    assert [finding.name for finding in explain(record(result=None, parts=parts))] == ["unfinished", "connectivity"]


def test_overfitting() -> None:
    def scored(train: float, val: float) -> RunRecord:
        return record(result={**QUIET, "scores": {"train": train, "val": val}})

    finding = only(scored(99.0, 69.0))
    assert finding.name == "overfitting"
    assert "30.0 points less" in finding.sentence
    assert finding.times == 2.0
    assert explain(scored(90.0, 75.0)) == []


def test_underfitting() -> None:
    def ended(best: int, gap: float, count: int = 100) -> RunRecord:
        result = {**QUIET, "best_epoch": best, "scores": {"train": 60.0 + gap, "val": 60.0}}
        return record(result=result, epochs=[epoch(number) for number in range(1, count + 1)])

    finding = only(ended(95, 1.9))
    assert finding.name == "underfitting"
    assert "95 of 100" in finding.sentence
    assert "--epochs 200" in finding.change
    assert explain(ended(94, 1.9)) == []
    assert explain(ended(95, module.UNDERFITTING)) == []
    assert explain(ended(19, 1.9, count=19)) == []


def test_nothing_learned() -> None:
    def ended(train: float, metric: str = "accuracy") -> RunRecord:
        made = record(result={**QUIET, "metric": metric}, epochs=[epoch(1, scores={"train": train}), epoch(2)])
        return replace(made, run={**made.run, "data": {"classes": 5}})

    finding = only(ended(24.0))
    assert finding.name == "nothing learned"
    assert "The last training score is 24.0; guessing one of 5 classes gives 20.0" in finding.sentence
    assert finding.times == pytest.approx(2.0)
    assert only(ended(10.0)).times == pytest.approx(10.0)
    assert explain(ended(28.1)) == []
    assert explain(ended(24.0, metric="micro-F1")) == []


def test_early_best_epoch() -> None:
    def best(number: int, count: int = 100) -> RunRecord:
        return record(result={**QUIET, "best_epoch": number}, epochs=[epoch(one) for one in range(1, count + 1)])

    finding = only(best(15))
    assert finding.name == "early best epoch"
    assert "15 of 100" in finding.sentence
    assert "remaining 85 epochs" in finding.consequence
    assert "--epochs 30" in finding.change
    assert finding.times == pytest.approx(2.0)
    assert only(best(30)).times == pytest.approx(1.0)
    assert explain(best(31)) == []
    assert explain(best(1, count=19)) == []


@pytest.mark.parametrize(
    ("name", "threshold", "options", "change"),
    [
        ("refresh", module.SIDE_SHARE, {"refresh_every": "epoch"}, "--refresh-every never"),
        ("refresh", module.SIDE_SHARE, {"refresh_every": "10"}, "--refresh-every 20"),
        ("evaluate", module.SIDE_SHARE, {"evaluate_every": 2}, "--evaluate-every 10"),
        ("diagnose", module.SIDE_SHARE, {}, "--diagnose-every"),
        ("checkpoint", module.SIDE_SHARE, {}, "--checkpoint-every"),
        ("partition", module.PARTITION_SHARE, {}, "--cache-dir"),
    ],
)
def test_side_work(name: str, threshold: float, options: dict[str, Any], change: str) -> None:
    def took(share: float) -> RunRecord:
        return record(result={**QUIET, "seconds": {"train": 100 * (1 - share), name: 100 * share}}, options=options)

    finding = only(took(threshold + 0.01))
    assert finding.name == f"time of {name}"
    assert f"{100 * (threshold + 0.01):.0f} % of the run's 100.0 seconds" in finding.sentence
    assert change in finding.change
    assert finding.times == pytest.approx((threshold + 0.01) / threshold)
    assert explain(took(threshold - 0.01)) == []


def test_most_important_first() -> None:
    result = {**QUIET, "connectivity": 1.5, "scores": {"train": 100.0, "val": 40.0}, "best_epoch": 3}
    findings = explain(record(result=result))
    assert [finding.name for finding in findings] == ["early best epoch", "overfitting", "connectivity"]
    assert [finding.times for finding in findings] == pytest.approx([10.0, 4.0, 1.5])


def test_command(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {"title": "a", "options": {}, "parts": None}) as folder:
        folder.append(epoch(1))
        folder.finish({**QUIET, "connectivity": 3.0})
    said = CliRunner().invoke(cli.app, ["explain", str(tmp_path / "run")])
    assert said.stdout.startswith("1. A part has 3.0 halo nodes for each of its own.")
    assert "did not measure staleness" in said.stderr
    found = json.loads(CliRunner().invoke(cli.app, ["explain", str(tmp_path / "run"), "--json"]).stdout)
    assert [finding["name"] for finding in found["findings"]] == ["connectivity"]
    assert found["findings"][0]["times"] == 3.0
    with RunFolder.create(tmp_path / "quiet", {"title": "a", "options": {}, "parts": None}) as folder:
        folder.finish(QUIET)
    assert CliRunner().invoke(cli.app, ["explain", str(tmp_path / "quiet")]).stdout == "Nothing stands out.\n"
