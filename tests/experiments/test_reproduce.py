"""The paper's experiments: their configurations, how runs are kept and continued, and what reports say."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale.data import datasets
from gnnautoscale.data.datasets import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import bench
from gnnautoscale.experiments.reproduce import (
    Experiment,
    Job,
    Report,
    Store,
    config,
    experiment_names,
    load_experiment,
    make_report,
    pool,
    published,
    run_all,
    tables,
    work,
    write_files,
)
from gnnautoscale.experiments.reproduce.neighbourhood import measure_steps
from gnnautoscale.experiments.reproduce.work import perform
from gnnautoscale.models import check_model_options
from gnnautoscale.runs.folder import read_run
from gnnautoscale.tasks import GraphPrediction, LinkPrediction
from gnnautoscale.training.journal import describe_machine
from gnnautoscale.training.options import FitOptions
from support.command import invoke

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HYPERPARAMETERS = Path(__file__).parents[3] / "shared" / "paper" / "hyperparameters.toml"
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "reproduction"
CPU = torch.device("cpu")
# Two cells of two runs each that take no time.
TINY = """
kind = "train"
seeds = 1
train = { mode = "gas", num_parts = 3, epochs = 2 }
variants = { full = { mode = "full" }, gas = { refresh_every = "never" } }

[cells.gcn.communities]
data = { nodes = 60, degree = 4.0, features = 5, classes = 3 }
model = { hidden = 4 }

[cells.gat.communities]
data = { nodes = 60, degree = 4.0, features = 5, classes = 3 }
model = { hidden = 2, heads = 2 }
"""
STEPS = """
kind = "step"
seeds = 1
train = { nodes = 80, batch_nodes = 10, batches = 2, degree = 3, halo_degree = 2, layers = 2, epochs = 1 }
variants = { gin = { features = 4, classes = 3 } }
cells = { halo-0 = { ratio = 0.0 }, halo-2 = { ratio = 2.0 } }
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the configurations by others."""

    def configure(**texts: str) -> None:
        folder = tmp_path / "configs"
        folder.mkdir()
        for name, text in texts.items():
            (folder / f"{name}.toml").write_text(text)
        monkeypatch.setattr(config, "_folder", lambda: folder)

    return configure


def some_runs(count: int, kind: str = "connectivity") -> list[Job]:
    return [Job("cell", "variant", seed, {"kind": kind, "seed": seed}) for seed in range(count)]


def call(*arguments: str | Path) -> Any:
    return invoke(["reproduce", *map(str, arguments)])


def done(*arguments: str | Path) -> Any:
    result = call(*arguments)
    if result.exception is not None:
        raise result.exception
    return result


def cells_of(text: str) -> list[list[str]]:
    """The cells of a table that was printed as tab-separated lines."""
    return [line.split("\t") for line in text.splitlines() if "\t" in line]


# Configurations ######################################################################################################


def test_every_experiment_has_a_configuration_and_a_report() -> None:
    assert experiment_names() == tuple(sorted(tables._REPORTS))
    assert {"table1", "table2", "table3", "table4", "table5", "table6", "table7", "figure3", "figure4"} < set(
        experiment_names()
    )


@pytest.mark.parametrize("name", experiment_names())
def test_all_runs_of_a_configuration_can_be_done(name: str) -> None:
    for run in load_experiment(name).jobs(seeds=1):  # others differ in the seed only
        check = {"train": check_train, "connectivity": check_connectivity, "neighbourhood": check_neighbourhood}
        check.get(run.work["kind"], check_step)(run.work)


def check_train(work: Mapping[str, Any]) -> None:
    FitOptions.of({**work["train"], "seed": work["seed"], "device": "cpu"})
    if work["model"] != "rgcn":
        check_model_options(work["model"], work["options"])
    if "task" in work:
        (GraphPrediction if "readout" in work["task"] else LinkPrediction)(**work["task"])
    assert {"file", "typed"} & work["data"].keys() or work["data"].get("source", work["dataset"]) in datasets.names()
    if work["train"]["mode"] == "sage":
        assert len(work["train"]["fan_out"]) == work["options"].get("layers", 2)


def check_connectivity(work: Mapping[str, Any]) -> None:
    assert work["cell"] in datasets.names()
    assert work["method"] in ("metis", "random")
    assert work["num_parts"] > 1


def check_neighbourhood(work: Mapping[str, Any]) -> None:
    assert work["cell"] in datasets.names()
    wanted = inspect.signature(measure_steps).parameters.keys() - {"dataset", "device", "cache_dir"}
    assert wanted == work.keys() - {"kind", "cell", "device"}


def check_step(work: Mapping[str, Any]) -> None:
    graph = bench.BenchGraph(**{field.name: work[field.name] for field in fields(bench.BenchGraph)})
    graph.check(work["ratio"])
    assert graph == bench.BenchGraph()
    assert work["layers"] == 4


@pytest.mark.skipif(not HYPERPARAMETERS.exists(), reason="needs the paper's hyperparameters")
@pytest.mark.parametrize(("name", "size"), [("table1", "small"), ("table5", "large")])
def test_hyperparameters_are_the_published_ones(name: str, size: str) -> None:
    renamed = {"parts": "num_parts", "parts_per_batch": "batch_size", "steps_per_epoch_at_most": "steps_per_epoch"}
    ours = load_experiment(name).cells
    paper = tomllib.loads(HYPERPARAMETERS.read_text())[size]
    theirs = {f"{model}.{dataset}": options for model, by in paper.items() for dataset, options in by.items()}
    assert ours.keys() == theirs.keys()
    for cell, options in theirs.items():
        train = {renamed.get(key, key): value for key, value in options["train"].items()}
        train = {key: value for key, value in train.items() if key not in ("runs", "self_loops", "gcn_norm")}
        no_decay = {"weight_decay_conv": 0.0, "weight_decay_other": 0.0}
        assert {**no_decay, **ours[cell]["train"]} == train, cell
        assert ours[cell]["model"] == options["model"], cell


def test_published_numbers_cover_the_cells() -> None:
    paper = published()
    assert all(cell in paper["table4"] for cell in load_experiment("table4").cells)
    assert all(cell.split(".")[1] in paper["table3"]["datasets"] for cell in load_experiment("table3").cells)
    assert all(len(row) == 4 for model in ("gcn", "gat", "appnp", "gcnii") for row in paper["table1"][model].values())


def test_unknown_experiments_and_keys_are_refused(configured: Callable[..., None]) -> None:
    with pytest.raises(InputError, match=r"an experiment is one of compensation, .*, but got table9"):
        load_experiment("table9")
    configured(table1=TINY + "\n[cellz]\n")
    with pytest.raises(InputError, match=r"table1\.toml may hold .*, but got cellz"):
        load_experiment("table1")


# Runs ################################################################################################################


def test_published_results_belong_to_jobs() -> None:
    lines = [json.loads(line) for line in (PUBLISHED / "runs.jsonl").read_text().splitlines()]
    stored = {line["key"] for line in lines}
    assert all(line["key"] == Job("", "", 0, line["work"]).key for line in lines)
    machines = sorted({line["machine"] for line in lines})
    known = {
        job.key
        for name in experiment_names()
        for machine in machines
        for job in load_experiment(name).jobs(device=machine)
    }
    # Four results are of jobs that the configurations no longer have.
    assert (len(stored), len(stored & known)) == (780, 776)


def test_equal_work_has_an_equal_key() -> None:
    first = Job("a", "b", 0, {"x": 1, "y": {"z": [1, 2]}})
    assert first.key == Job("c", "d", 1, {"y": {"z": [1, 2]}, "x": 1}).key
    assert first.key != Job("a", "b", 0, {"x": 1, "y": {"z": [2, 1]}}).key


def test_full_batch_runs_of_tables_1_and_2_are_the_same() -> None:
    first, second = (
        {str(run): run.key for run in load_experiment(name).jobs(only=["gcnii.*/full"], seeds=2)}
        for name in ("table1", "table2")
    )
    assert first == second
    assert len(first) == 16
    assert len(set(first.values())) == 16


def test_full_batch_does_not_depend_on_what_belongs_to_batches() -> None:
    experiment = Experiment(
        "table1",
        "train",
        1,
        {"gcn.cora": {"train": {"num_parts": 4, "batch_size": 2, "drawings": 3, "lr": 0.1}}},
        {"full": {"mode": "full"}, "gas": {"grad_norm": "none", "model": {"layers": 3}}},
        {"mode": "gas", "storage": "host"},
    )
    full, gas = (run.work for run in experiment.jobs())
    assert full["train"] == {"mode": "full", "lr": 0.1}
    assert full["options"] == {}
    assert gas["train"]["num_parts"] == 4
    assert gas["train"]["drawings"] == 3
    assert gas["train"]["grad_norm"] is None
    assert gas["options"] == {"layers": 3}
    assert "model" not in gas["train"]


def test_a_fan_out_is_kept_for_sampling_only() -> None:
    runs = {run.variant: run.work["train"] for run in load_experiment("wordnet").jobs(only=["gcnii.*"])}
    assert [variant for variant, train in runs.items() if "fan_out" in train] == ["sage"]


def test_ways_are_compared_at_equal_steps() -> None:
    experiment = load_experiment("compensation")
    ways = ["full", "exact", "gas", "gradient", "momentum", "cluster", "sage"]
    runs = {run.variant: run.work["train"] for run in experiment.jobs(only=["gin.pubmed"], seeds=1)}
    assert list(runs) == ways
    assert [train["epochs"] for train in runs.values()] == [400, 400, *[50] * 5]  # of eight batches
    assert [train["evaluate_every"] for train in runs.values()] == [20, 20, *[2] * 5]
    assert "num_parts" not in runs["full"]
    assert runs["exact"]["num_parts"] == runs["gas"]["num_parts"] == 40
    assert [way for way, train in runs.items() if train.get("compensate") == way] == ["gradient", "momentum"]
    fewer = experiment.jobs(only=["gin.pubmed"], seeds=1, steps=24)
    assert [run.work["train"]["epochs"] for run in fewer] == [24, 24, *[3] * 5]
    assert not any("steps" in run.work["train"] for run in experiment.jobs(seeds=1))


def test_a_cell_says_how_often_it_is_evaluated_and_sampling_drops_no_further_edges() -> None:
    cell = "rgcn.wn18rr"
    runs = {run.variant: run.work["train"] for run in load_experiment("links").jobs(only=[cell])}
    assert [train["epochs"] for train in runs.values()] == [600] * 4  # a step takes the gradients of all four batches
    assert [train.get("accumulate") for train in runs.values()] == [None, 4, 4, 4]
    assert {train["evaluate_every"] for train in runs.values()} == {60}
    assert [way for way, train in runs.items() if "edge_dropout" in train] == ["full", "gas"]


def test_a_grid_has_every_model_on_every_graph() -> None:
    experiment = load_experiment("compensation")
    assert len(experiment.cells) == 7 * 9
    assert experiment.seeds == 3
    cell = experiment.cells["gat.wordnet3"]
    assert cell["model"] == {"layers": 3, "hidden": 32, "heads": 4, "dropout": 0.3}  # the model's width wins
    assert cell["train"]["fan_out"] == [10, 10, 10]
    assert cell["train"]["num_parts"] == 240
    assert cell["data"]["undirected"] is True


def test_variants_on_request_run_only_if_they_are_named() -> None:
    table7 = load_experiment("table7")

    def variants(*only: str) -> set[str]:
        return {run.variant for run in table7.jobs(only=only)}

    paper = {"full_batch", "history_only", "metis", "metis_and_lipschitz"}
    assert variants() == variants("gin.*") == variants("*/*") == paper
    assert variants("gin.cluster/gradient", "*/momentum") == {"gradient", "momentum"}
    for run in table7.jobs(only=["*/gradient", "*/momentum"]):
        check_train(run.work)
        assert run.work["train"]["compensate"] == run.variant


def test_the_device_belongs_to_times_only() -> None:
    for name in experiment_names():
        here, there = (
            [run.key for run in load_experiment(name).jobs(seeds=1, device=device)] for device in ("here", "there")
        )
        assert (here != there) == (name in ("table4", "figure4")), name


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ([], 780),
        (["gcn.cora"], 30),
        (["gcn.*"], 240),
        (["*.cora"], 105),
        (["*.cora/full"], 35),
        (["gcn.cora/full", "gcn.cora/gas"], 20),
        (["gcn.cora", "gcn.cora/full"], 30),
    ],
)
def test_patterns_choose_cells_and_variants(patterns: list[str], count: int) -> None:
    assert len(load_experiment("table1").jobs(only=patterns)) == count


def test_a_pattern_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"such as gcn\.cora, or .* such as gcn\.cora/full, but got gcn/cora, x"):
        load_experiment("table1").jobs(only=["gcn/cora", "x"])


# The store ###########################################################################################################


def test_results_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    first, second = some_runs(2)
    store = Store(path)
    store.add(first, {"value": 1.0}, seconds=1.234, machine="one")
    whole = path.read_text()
    store.add(second, {"value": 2.0}, seconds=1.0, machine="two")
    path.write_text(path.read_text()[:-7])
    again = Store(path)
    assert again.get(first) == {"value": 1.0}
    assert again.get(second) is None
    assert path.read_text() == whole
    again.add(second, {"value": 3.0}, seconds=1.0, machine="two")
    assert Store(path).get(second) == {"value": 3.0}
    assert Store(path).origin([first, second])["machines"] == ["one", "two"]
    line = json.loads(whole)
    assert line["seconds"] == 1.23
    assert line["work"] == first.work


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"key": "a", "result": {}}\nsomething else\n')
    with pytest.raises(InputError, match=r"every line of runs\.jsonl is a result, but got line 2: something else"):
        Store(path)
    with pytest.raises(InputError, match="must be readable and writable"):
        Store(path / "below" / "runs.jsonl")


# Doing runs ##########################################################################################################


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the runs that are done; seed 1 fails the first time, and seed 2 is refused the first time."""
    seeds: list[int] = []

    def fake(work: Mapping[str, Any], *, root: str, device: str) -> dict[str, Any]:
        seeds.append(work["seed"])
        if work["seed"] in (1, 2) and seeds.count(work["seed"]) == 1:
            raise RuntimeError("out of luck") if work["seed"] == 1 else InputError("a", got="b", fix="C.")
        return {"value": float(work["seed"])}

    monkeypatch.setattr(pool, "perform", fake)
    return seeds


def test_only_what_is_missing_is_done_and_failures_are_tried_again(tmp_path: Path, performed: list[int]) -> None:
    store, runs, said = Store(tmp_path / "runs.jsonl"), some_runs(4), list[str]()

    def go(wanted: Sequence[Job]) -> list[Job]:
        said.clear()
        return run_all(wanted, store, root="", device="cpu", show=said.append)

    assert go([*runs, runs[0]]) == [runs[1], runs[2]]
    assert performed == [0, 1, 2, 3]
    assert [store.get(run) for run in runs] == [{"value": 0.0}, None, None, {"value": 3.0}]
    assert "[1/4] cell variant seed 0: value 0, " in said[-4]
    assert said[-3].startswith("[2/4] cell variant seed 1 failed:\nTraceback")
    assert "RuntimeError: out of luck" in said[-3]
    assert said[-2] == "[3/4] cell variant seed 2 failed:\na, but got b. C."
    assert go(runs) == []
    assert performed == [0, 1, 2, 3, 1, 2]
    assert said[0] == "2 of 4 runs have results already"
    assert go(runs) == []
    assert said == ["4 of 4 runs have results already"]
    assert performed == [0, 1, 2, 3, 1, 2]


def test_long_runs_come_first(tmp_path: Path, performed: list[int]) -> None:
    trains = [{"epochs": 5}, {"epochs": 50}, {"epochs": 5, "num_parts": 40, "batch_size": 2}]
    runs = [
        Job("cell", "variant", 10 + n, {"kind": "train", "train": train, "options": {}, "seed": 10 + n})
        for n, train in enumerate(trains)
    ]
    run_all(runs, Store(tmp_path / "runs.jsonl"), root="", device="cpu", show=lambda _: None)
    assert performed == [11, 12, 10]


def test_times_are_not_taken_side_by_side(
    tmp_path: Path, performed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_side_by_side", None)
    store = Store(tmp_path / "runs.jsonl")
    run_all(some_runs(1, "step"), store, root="", device="cpu", processes=2, show=lambda _: None)
    assert performed == [0]


def test_other_processes_give_the_same_results(
    tmp_path: Path, configured: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(processes: int, *args: Any, **options: Any) -> ProcessPoolExecutor:
        assert processes == 2
        return ProcessPoolExecutor(1, *args, **options)  # a second one would take seconds to start, and show no more

    monkeypatch.setattr(pool, "ProcessPoolExecutor", start)
    configured(table1=TINY)
    runs = load_experiment("table1").jobs(only=["gcn.*"])
    found = []
    for jobs in (1, 2):
        store = Store(tmp_path / f"{jobs}" / "runs.jsonl")
        assert run_all(runs, store, root=str(tmp_path), device="cpu", processes=jobs, show=lambda _: None) == []
        found.append([timeless(store.get(run)) for run in runs])
    assert found[0] == found[1]
    assert found[0][0]["curve"]["epoch"] == [1, 2]
    assert found[0][0]["steps"] == 2


def timeless(result: Any) -> dict[str, Any]:
    found = {key: value for key, value in result.items() if key not in ("seconds", "peak_memory")}
    return {**found, "curve": {**found["curve"], "seconds": None}}


def ring(num_nodes: int) -> Dataset:
    nodes = torch.arange(num_nodes)
    edges = torch.stack([nodes, (nodes + 1) % num_nodes])
    mask = torch.ones(num_nodes, dtype=torch.bool)
    graph = Data(x=torch.ones(num_nodes, 2), edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=nodes % 2)
    graph.train_mask = graph.val_mask = mask
    return Dataset.of(graph)


@pytest.mark.parametrize(("method", "nodes", "edges"), [("gas", 5, 6), ("recursive", 7, 10)])
def test_steps_of_both_methods_are_measured(method: str, nodes: int, edges: int) -> None:
    """Parts of 3 nodes on a ring: 2 halo nodes; 2 hops reach 2 nodes on each side, whose edges count up to 1 hop."""
    found = measure_steps(ring(12), CPU, method=method, batch_nodes=3, hidden=4, layers=2, steps=3, epochs=2)
    assert (found["nodes"], found["edges"]) == (nodes, edges)
    assert found["step_seconds"] > found["build_seconds"] >= 0
    assert (found["build_seconds"] > 0) == (method == "recursive")
    assert found["peak_memory"] is None or found["peak_memory"] >= 0


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match="a method is one of gas, recursive, but got 'magic'"):
        measure_steps(ring(4), CPU, method="magic", batch_nodes=2, hidden=2, layers=2, steps=1, epochs=1)


# Reports #############################################################################################################


Results = dict[tuple[str, str], list[dict[str, Any]]]


def report_of(tmp_path: Path, name: str, results: Results, only: Sequence[str] = ()) -> Report:
    """A report from made-up results."""
    experiment, store = load_experiment(name), Store(tmp_path / "runs.jsonl")
    runs = experiment.jobs(only=only, seeds=max(map(len, results.values())))
    for run in runs:
        of_cell = results.get((run.cell, run.variant), [])
        if run.seed < len(of_cell) and store.get(run) is None:
            store.add(run, of_cell[run.seed], seconds=1.0, machine="a machine")
    return make_report(experiment, runs, store)


def scored(*scores: float) -> list[dict[str, Any]]:
    return [{"scores": {"train": 90.0, "val": 80.0, "test": score}} for score in scores]


def test_table1_shows_means_deviations_and_what_is_far(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        "table1",
        {
            ("gcn.cora", "full"): scored(81.0, 82.0, 83.0),
            ("gcn.cora", "gas"): scored(80.0, 82.0, 84.0),
            ("gcn.citeseer", "full"): scored(60.0),
            ("gcn.citeseer", "gas"): scored(61.0),
            ("gcn.citeseer", "refreshed"): scored(71.0),
            ("gat.cora", "gas"): scored(83.0),
        },
    )
    assert report.rows == [
        ["gcn cora", "81.88 ± 0.75", "82.00 ± 1.00", "82.29 ± 0.76", "82.00 ± 2.00", "-", "+0.00", "all"],
        ["gcn citeseer", "70.98 ± 0.66", "60.00", "71.18 ± 0.97", "61.00", "71.00", "+1.00", "full, gas"],
        ["gat cora", "82.80 ± 0.47", "-", "83.32 ± 0.62", "83.00", "-", "-", "all"],
    ]
    assert report.notes[:2] == [
        "gcn: mean difference gas - full batch +0.50 points over 2 data sets (paper +0.13).",
        "gcn: mean difference refreshed - full batch +11.00 points over 1 data sets (paper +0.13).",
    ]
    assert report.notes[-1].startswith("Seeds: 3; made on a machine with python ")
    assert report.values["test"]["gcn.cora"]["full"] == [81.0, 82.0, 83.0]
    assert report.values["experiment"] == "table1"
    assert report.values["seeds"] == [0, 1, 2]


def test_table2_shows_points_relative_to_full_batch(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        "table2",
        {("gcnii.pubmed", "full"): scored(80.0), ("gcnii.pubmed", "baseline"): scored(77.5)},
    )
    assert report.rows == [["pubmed", "80.00", "-2.50 (-3.20)", "- (-1.24)", "- (-1.50)", "- (+0.47)"]]


def test_table3_shows_memory(tmp_path: Path) -> None:
    cell = "gcn.ogbn-arxiv"
    memory = {"full-2": 2**30, "gas-4": 2**29}
    report = report_of(tmp_path, "table3", {(cell, variant): [{"peak_memory": n}] for variant, n in memory.items()})
    assert report.columns == ["GB", "ogbn-arxiv"]
    assert len(report.rows) == 12
    assert report.rows[0] == ["2 layers, full batch", "1.00 (1.44)"]
    assert report.rows[-1] == ["4 layers, GAS", "0.50 (0.46)"]
    assert report.rows[1] == ["2 layers, neighbour sampling", "- (0.40)"]


def test_table4_shows_time_memory_and_sizes(tmp_path: Path) -> None:
    whole = {"step_seconds": 0.05, "build_seconds": 0.01, "peak_memory": 2**24, "nodes": 2000.4, "edges": 9000.0}
    gas = {"step_seconds": 0.005, "build_seconds": 0.0, "peak_memory": None, "nodes": 200.0, "edges": 500.0}
    report = report_of(tmp_path, "table4", {("cora", "gttf"): [whole], ("cora", "gas"): [gas]})
    assert report.columns == [
        "",
        "all hops: seconds",
        "building them",
        "all hops: MB",
        "all hops: nodes / edges",
        "GAS: seconds",
        "GAS: MB",
        "GAS: nodes / edges",
    ]
    assert report.rows == [
        [
            "cora",
            "0.0500 (0.077)",
            "0.0100",
            "16.00 (18.01)",
            "2,000 / 9,000",
            "0.0050 (0.006)",
            "- (2.13)",
            "200 / 500",
        ]
    ]


def test_table5_shows_scores(tmp_path: Path) -> None:
    report = report_of(
        tmp_path, "table5", {("pna-jk.reddit", "gas"): scored(97.0), ("gcn.ppi", "refreshed"): scored(98.0)}
    )
    assert report.rows == [["gcn ppi", "98.92", "-", "98.00"], ["pna-jk reddit", "97.17", "97.00", "-"]]


def test_table6_shows_connectivity(tmp_path: Path) -> None:
    results: Results = {
        ("cora", "random"): [{"connectivity": 1.3, "num_parts": 3}, {"connectivity": 1.4, "num_parts": 3}],
        ("cora", "metis"): [{"connectivity": 0.2, "num_parts": 3}],
        ("pubmed", "metis"): [{"connectivity": 0.9, "num_parts": 20}],
    }
    assert report_of(tmp_path, "table6", results).rows == [
        ["cora", "3", "1.33", "1.35", "0.14", "0.20", "yes"],
        ["pubmed", "20", "3.17", "-", "0.52", "0.90", "no"],
    ]


CURVE = {"epoch": [1, 2, 4], "loss": [3.0, 2.0, 1.0], "train": [1, 2, 3], "val": [1, 2, 3], "test": [1, 2, 3]}


def test_table7_shows_all_splits_and_draws_curves(tmp_path: Path) -> None:
    report = report_of(tmp_path, "table7", {("gin.cluster", "metis"): [{**scored(57.0)[0], "curve": CURVE}]})
    assert "metis" in write_files(report, tmp_path, "table7")[2].read_text()
    assert report.rows[0] == ["full batch", "- (60.49)", "- (58.17)", "- (58.49)"]
    assert report.rows[2] == ["metis", "90.00 (58.97)", "80.00 (57.79)", "57.00 (57.82)"]


def test_table7_shows_compensated_runs_on_request(tmp_path: Path) -> None:
    results = {("gin.cluster", name): [{**scored(57.0)[0], "curve": CURVE}] for name in ("metis", "gradient")}
    report = report_of(tmp_path, "table7", results, only=["gin.cluster", "gin.cluster/gradient"])
    assert len(report.rows) == 5
    assert report.rows[4] == ["metis, compensate gradient", "90.00", "80.00", "57.00"]


def test_figure3_draws_curves(tmp_path: Path) -> None:
    results = [{**scored(82.0)[0], "curve": CURVE}]
    report = report_of(tmp_path, "figure3", {("gcn.cora", "full"): results, ("gcnii.cora", "gas"): results})
    assert report.rows == [["gcn.cora", "82.00", "-", "-"], ["gcnii.cora", "-", "-", "82.00"]]
    files = write_files(report, tmp_path, "figure3")
    assert [file.name for file in files] == ["figure3.md", "figure3.json", "figure3.svg"]
    assert "gcnii.cora" in files[2].read_text()


def test_figure4_compares_ratios_and_draws_the_benchmark(tmp_path: Path) -> None:
    def result(ratio: float, device: float, host: float) -> dict[str, Any]:
        milliseconds = {column: device if column == "device fp32" else host for column in bench.COLUMNS}
        overhead = {column: host / device - 1 for column in bench.COLUMNS if column != "device fp32"}
        row = {"ratio": ratio, "milliseconds": milliseconds, "I/O": overhead}
        setup = {**vars(bench.BenchGraph()), "layers": 4}
        return {"row": row, "setup": setup, "machine": "a fine GPU"}

    found = {("halo-2", "gin"): [result(2.0, 3.0, 3.3)], ("halo-0", "gin"): [result(0.0, 2.0, 2.0)]}
    report = report_of(tmp_path, "figure4", found)
    assert report.rows == [
        ["0", "2.000", "2.000", "2.000", "2.000", "2.000", "+0 %", "+0.0 %", "+0.0 %", "+0.0 %"],
        ["2", "3.000", "3.300", "3.300", "3.300", "3.300", "+50 %", "+10.0 %", "+10.0 %", "+10.0 %"],
    ]
    assert report.columns[6:] == ["computation", "I/O host fp32", "I/O host bf16", "I/O host fp32, serial"]
    assert "up to 350 %" in report.notes[0]
    plot = write_files(report, tmp_path, "figure4")[-1].read_text()
    assert "a fine GPU" in plot
    assert "I/O overhead (%)" in plot


def test_wordnet_shows_accuracy_time_and_memory(tmp_path: Path) -> None:
    def result(test: float, seconds: float, steps: int, memory: int | None) -> list[dict[str, Any]]:
        return [{**scored(test)[0], "seconds": {"train": seconds}, "steps": steps, "peak_memory": memory}]

    cell = "gcn.wordnet3"
    found = {(cell, "full"): result(70.0, 6.0, 600, 2**30), (cell, "sage"): result(69.0, 1.0, 40, None)}
    report = report_of(tmp_path, "wordnet", found)
    assert report.rows == [
        ["gcn", "full batch", "70.00", "10.0", "1,024"],
        ["gcn", "GraphSAGE sampling", "69.00", "25.0", "-"],
    ]
    assert report.columns == ["", "", "test accuracy (%)", "ms per step", "MB"]


def test_results_show_when_each_way_reaches_full_batch(tmp_path: Path) -> None:
    def result(test: float, val: list[float], seconds: list[float], cutting: float) -> list[dict[str, Any]]:
        curve = {"epoch": [1, 2], "val": val, "seconds": seconds}
        measured = {"seconds": {"partition": cutting}, "peak_memory": 2**30, "steps": 1200}
        return [{**scored(test)[0], "curve": curve, **measured}]

    cell = "gin.wordnet"
    found = {
        (cell, "full"): result(90.0, [80.0, 91.0], [10.0, 20.0], 0.0),
        (cell, "cluster"): result(80.0, [70.0, 81.0], [1.0, 2.0], 0.5),
        (cell, "gas"): result(89.5, [85.0, 90.0], [3.0, 4.0], 1.5),
    }
    report = report_of(tmp_path, "results", found, only=["wordnet"])
    assert report.rows == [
        ["wordnet, gin", "full batch", "90.00", "90.0", "20.0", "1.00", "1,200"],
        ["wordnet, gin", "Cluster-GCN", "80.00", "90.0", "not reached", "1.00", "1,200"],
        ["wordnet, gin", "GAS", "89.50", "90.0", "5.5", "1.00", "1,200"],
    ]
    assert "| wordnet, gin | GAS | 89.50 |" in report.markdown()
    del found[(cell, "full")]  # it failed: the goal is unknown
    report = report_of(tmp_path / "without", "results", found, only=["wordnet"])
    assert report.rows[-1] == ["wordnet, gin", "GAS", "89.50", "-", "-", "1.00", "1,200"]


def test_results_run_in_all_four_ways(tmp_path: Path) -> None:
    whole = load_experiment("results")
    cells: dict[str, Any] = {}
    for cell in ("gin.cluster", "graphsage.products"):
        options = {**whole.cells[cell], "train_of": {}}
        options["data"] = {"graphs": 4} if "cluster" in cell else {"source": "districts", "nodes": 300}
        options["model"] = {**options["model"], "hidden": 4}
        small = {"num_parts": 4, "batch_size": 2, "epochs": 2, "storage": "host", "partition": "metis"}
        options["train"] = {**options["train"], **small}
        cells[cell] = options
    experiment = replace(whole, cells=cells)
    jobs, store = experiment.jobs(), Store(tmp_path / "runs.jsonl")
    assert run_all(jobs, store, root=str(tmp_path), device="cpu", show=lambda _: None) == []
    report = make_report(experiment, jobs, store)
    assert [row[1] for row in report.rows] == ["full batch", "neighbour sampling", "Cluster-GCN", "GAS"] * 2
    seconds = [values["seconds"][0] for values in report.values["results"]["graphsage.products"].values()]
    assert seconds[0] < math.inf, "full batch reaches its own goal"


def test_compensation_shows_differences_to_full_batch_and_times(tmp_path: Path) -> None:
    def results(seconds: float, steps: int, *tests: float) -> list[dict[str, Any]]:
        return [{**score, "seconds": {"train": seconds}, "steps": steps} for score in scored(*tests)]

    found = {
        ("gcn.cora", "full"): results(4.0, 400, 86.0, 88.0),
        ("gcn.cora", "gas"): results(2.0, 400, 85.0, 86.0),
        ("gcn.cora", "gradient"): results(3.0, 400, 86.5, 87.5),
        ("gin.cora", "full"): results(4.0, 400, 80.0, 80.0),
        ("gin.cora", "gas"): results(2.0, 400, 81.0, 81.0),
        ("pna.cora", "sage"): results(2.0, 0, 70.0),
    }
    report = report_of(tmp_path, "compensation", found)
    assert report.rows == [
        ["cora", "gcn", "full batch", "87.00 ± 1.41", "", "10.0"],
        ["cora", "gcn", "GAS", "85.50 ± 0.71", "-1.50", "5.0"],
        ["cora", "gcn", "GAS, gradient", "87.00 ± 0.71", "+0.00", "7.5"],
        ["cora", "gin", "full batch", "80.00 ± 0.00", "", "10.0"],
        ["cora", "gin", "GAS", "81.00 ± 0.00", "+1.00", "5.0"],
        ["cora", "pna", "GraphSAGE sampling", "70.00", "-", "2,000.0"],
    ]
    assert report.columns[3:] == ["test accuracy (%)", "difference to full batch", "ms per step"]
    assert report.notes[:2] == [
        "GAS: mean difference to full batch -0.25 points, from -1.50 to +1.00, over 2 models and graphs.",
        "GAS, gradient: mean difference to full batch +0.00 points, from +0.00 to +0.00, over 1 model and graph.",
    ]
    assert report.values["compensation"]["gcn.cora"]["gas"] == {"test": [85.0, 86.0], "milliseconds": [5.0, 5.0]}


def test_links_show_all_metrics_beside_published_ones(tmp_path: Path) -> None:
    def results(seconds: float, memory: int | None, *tests: float) -> list[dict[str, Any]]:
        common = {"seconds": {"train": seconds + 9.0, "step": seconds / 200}, "steps": 200, "peak_memory": memory}
        return [{**common, "metrics": {"ROC-AUC": each, "average-precision": each + 1}} for each in tests]

    found = {
        ("gcn.cora", "full"): results(4.0, 2**30, 90.0, 91.0),
        ("gcn.cora", "gas"): results(2.0, 2**28, 90.5, 91.0),
        ("gcn.cora", "sage"): results(2.0, None, 88.0),
    }
    report = report_of(tmp_path, "links", found)
    assert report.rows[0] == ["cora", "gcn", "full batch", "2", "ROC-AUC", "90.50 ± 0.71", "91.0", "-", "20.0", "1,024"]
    assert report.rows[3][4:] == ["average-precision", "91.75 ± 0.35", "92.0", "+0.25", "10.0", "256"]
    assert report.rows[4][2:] == ["neighbour sampling", "1", "ROC-AUC", "88.00", "91.0", "-2.00", "10.0", "-"]
    assert report.values["links"]["gcn.cora"]["sage"] == {"ROC-AUC": [88.0], "average-precision": [89.0]}


def test_graphs_show_the_best_epoch_over_folds_and_the_last_one(tmp_path: Path) -> None:
    def result(*scores: float) -> dict[str, Any]:
        curve = {"epoch": [1, 2, 3], "val": list(scores), "test": list(scores)}
        return {"curve": curve, "peak_memory": 2**30, "scores": {"test": max(scores)}}

    found = {
        ("gin.nci1", "gas"): [result(70.0, 82.0, 81.0), result(70.0, 83.0, 84.0), result(90.0, 81.0, 80.0)],
        ("graphsage.echoes", "full"): [result(50.0, 100.0, 75.0)],
    }
    report = report_of(tmp_path, "graphs", found)
    assert report.rows == [
        ["nci1", "gin", "GAS", "82.7 ± 1.7", "82.00 ± 1.00", "1,024"],
        ["echoes", "graphsage", "full batch", "", "75.00", "1,024"],
    ]
    assert report.notes[0].startswith("nci1, GAS: after epoch 2, at which the mean over 3 folds is best")


@pytest.mark.parametrize("mode", ["full", "gas", "cluster"])
def test_graphs_are_trained(tmp_path: Path, mode: str) -> None:
    first = np.arange(0, 121, 3)
    edges = np.stack([first[:-1], first[:-1] + 1])
    np.savez(tmp_path / "some.npz", ptr=first, node_tag=np.arange(120) % 4, edge_index=edges, y=np.arange(40) % 2)
    work = {
        "kind": "train",
        "dataset": "some",
        "data": {"file": "some.npz", "folds": True},
        "task": {"readout": "mean", "width": 8},
        "model": "gin",
        "options": {"hidden": 4, "layers": 2},
        "train": {"mode": mode, "num_parts": 36, "batch_size": 6, "epochs": 2},
        "seed": 3,
    }
    result = perform(work, root=str(tmp_path), device="cpu")
    assert result["curve"]["val"] == result["curve"]["test"]  # the fold that is held back
    assert len(result["curve"]["val"]) == 2


@pytest.mark.parametrize("mode", ["full", "gas", "sage"])
def test_links_are_trained_and_scored_by_all_metrics(tmp_path: Path, mode: str) -> None:
    fan_out = {"fan_out": [3, 3]} if mode == "sage" else {}
    work = {
        "kind": "train",
        "dataset": "communities",
        "data": {"nodes": 60, "degree": 6.0, "features": 5, "classes": 3, "binary": True},
        "task": {"decoder": "dot", "width": 8},
        "model": "gcn",
        "options": {"hidden": 4},
        "train": {"mode": mode, "num_parts": 4, "batch_size": 2, "epochs": 2, **fan_out},
        "seed": 1,
    }
    result = perform(work, root=str(tmp_path), device="cpu")
    assert result["metrics"].keys() == {"ROC-AUC", "average-precision"}
    assert result["metrics"]["ROC-AUC"] == pytest.approx(result["scores"]["test"], abs=1e-3)


def test_links_of_a_knowledge_graph(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    triples = np.unique(random.integers((30, 3, 30), size=(200, 3)), axis=0)
    random.shuffle(triples)
    triples[0, 1] = 2
    np.savez(tmp_path / "kg.npz", train=triples[:150], valid=triples[150:170], test=triples[170:], num_nodes=30)
    work = {
        "kind": "train",
        "dataset": "kg",
        "data": {"file": "kg.npz"},
        "task": {"decoder": "distmult", "reconstruct": True, "width": 8, "metric": "MRR"},
        "model": "rgcn",
        "options": {"layers": 2, "blocks": 2, "dropout": 0.1},
        "train": {"mode": "gas", "num_parts": 4, "batch_size": 2, "epochs": 2},
        "seed": 0,
    }
    result = perform(work, root=str(tmp_path), device="cpu")
    assert result["metrics"].keys() == {"MRR", "Hits@10"}
    assert 0 < result["metrics"]["MRR"] < result["metrics"]["Hits@10"] <= 100


def test_seeds_name_random_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", lambda name, root: Dataset.of(Data(num_nodes=50), name))
    first, again, other = (work._dataset("made", "", seed, random_split=True).train.train_mask for seed in (0, 0, 1))
    assert int(first.sum()) == 30
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_report_needs_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a report needs results"):
        make_report(load_experiment("table1"), load_experiment("table1").jobs(seeds=1), Store(tmp_path / "runs.jsonl"))


def test_numbers_that_are_not_there_become_null(tmp_path: Path) -> None:
    files = write_files(Report("A", ["b", "c"], [["d", "e"]], ["A note."], {"x": math.nan}), tmp_path, "made")
    assert [file.name for file in files] == ["made.md", "made.json"]
    assert json.loads(files[1].read_text()) == {"x": None}
    assert files[0].read_text() == "### A\n\n| b | c |\n|---|---:|\n| d | e |\n\nA note.\n"


# The command #########################################################################################################


def test_the_command_runs_reports_and_does_nothing_twice(tmp_path: Path, configured: Callable[..., None]) -> None:
    configured(table1=TINY)
    output = tmp_path / "out"
    arguments = ["table1", "--only", "gcn.*", "--root", str(tmp_path), "--output", str(output)]
    first = done(*arguments)
    head, row = cells_of(first.stdout)
    assert head[:3] == ["test accuracy (%)", "full batch, paper", "full batch"]
    assert [row[0], row[1], row[5]] == ["gcn communities", "-", "-"]
    assert 0 <= float(row[2]) <= 100
    assert "[2/2] gcn.communities" in first.stderr
    assert sorted(path.name for path in output.iterdir()) == ["runs", "runs.jsonl", "table1.json", "table1.md"]
    records = [read_run(path) for path in (output / "runs").iterdir()]
    assert {record.run["options"]["mode"] for record in records} == {"full", "gas"}
    assert all(record.epochs and not record.staleness and record.result for record in records)
    kept = (output / "runs.jsonl").read_bytes()
    second = done(*arguments)
    assert "2 of 2 runs have results already" in second.stderr
    assert "[1/" not in second.stderr
    assert second.stdout == first.stdout
    assert (output / "runs.jsonl").read_bytes() == kept
    values = json.loads(done(*arguments, "--json").stdout)
    assert f"{values['test']['gcn.communities']['full'][0]:.2f}" == row[2]
    assert values["machines"] == [describe_machine("cpu")]


def test_what_fails_does_not_keep_the_rest_from_being_shown(tmp_path: Path, configured: Callable[..., None]) -> None:
    broken = TINY.replace("gat.communities", "gat.nowhere")
    configured(figure3=TINY.replace("communities", "nowhere"), table1=broken)
    result = call("all", "--root", tmp_path, "--output", tmp_path / "out")
    assert isinstance(result.exception, InputError)
    assert "but got 6 that failed: gcn.nowhere" in str(result.exception)
    assert "failed:\na data set is one of" in result.stderr
    assert [row[0] for row in cells_of(result.stdout)[1:]] == ["gcn communities"]


def test_steps_are_measured_drawn_and_kept_by_device(tmp_path: Path, configured: Callable[..., None]) -> None:
    configured(figure4=STEPS)
    result = done("figure4", "--output", tmp_path / "out")
    assert [row[0] for row in cells_of(result.stdout)] == ["halo / batch", "0", "2"]
    assert (tmp_path / "out" / "figure4.svg").exists()
    lines = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert {line["work"]["device"] for line in lines} == {describe_machine("cpu")}


def test_neighbourhoods_are_measured_by_work(tmp_path: Path) -> None:
    train = {**load_experiment("table4").train, "batch_nodes": 20, "steps": 1, "epochs": 1}
    work = {
        "kind": "neighbourhood",
        "cell": "communities",
        "data": {"nodes": 60, "classes": 3, "degree": 4.0},
        **train,
        "seed": 0,
    }
    found = perform({**work, "method": "gas", "device": "cpu"}, root=str(tmp_path), device="cpu")
    assert set(found) == {"step_seconds", "build_seconds", "peak_memory", "nodes", "edges"}


def test_connectivity_is_measured_by_work() -> None:
    work = {"kind": "connectivity", "cell": "cluster", "data": {"graphs": 3}, "num_parts": 1, "method": "metis"}
    assert perform({**work, "seed": 0}, root="data", device="cpu") == {"connectivity": 0.0, "num_parts": 1}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["table9"], "an experiment is one of"),
        (["table1", "--jobs", "0"], "--jobs must be at least 1"),
        (["table1", "--seeds", "0"], "--seeds must be at least 1"),
        (["compensation", "--steps", "0"], "--steps must be at least 1"),
        (["table1", "--steps", "4"], "--steps belongs to experiments whose runs all take the same number of steps"),
        (["table1", "--only", "nothing"], "--only names cells of table1"),
        (["table1", "--device", "nowhere"], "device must be one that PyTorch can use here"),
    ],
)
def test_odd_input_is_refused(tmp_path: Path, arguments: list[str], rule: str) -> None:
    result = call(*arguments, "--output", tmp_path)
    assert isinstance(result.exception, InputError)
    assert rule in str(result.exception)
    assert result.stdout == ""
