"""The command `gas`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console

import gnnautoscale as gas
import gnnautoscale.cli as cli
from gnnautoscale._util import Option
from gnnautoscale.cli import display
from gnnautoscale.cli.schema import MODEL, TRAIN, resolve
from gnnautoscale.data import datasets, generate
from gnnautoscale.errors import InputError
from gnnautoscale.models import MODELS, model_options
from gnnautoscale.runs import progress
from gnnautoscale.runs.folder import read_run
from gnnautoscale.training import journal, loggers
from gnnautoscale.training.loop import fit
from gnnautoscale.training.options import OPTIONS
from support.command import invoke

TINY = ["--data", "communities", "--nodes", "60", "--degree", "4", "--features", "5", "--classes", "3"]
MEASURED = ["--epochs", "2", "--num-parts", "4"]
FAST = [*MEASURED, "--diagnose-every", "never"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training writes a folder below the current one."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))


def call(*arguments: str | Path) -> Any:
    """Run the command; what it raises is in the result."""
    return invoke([str(argument) for argument in arguments])


def done(*arguments: str | Path) -> Any:
    result = call(*arguments)
    if result.exception is not None:
        raise result.exception
    return result


def answer(*arguments: str | Path) -> Any:
    """What the command says with --json."""
    return json.loads(done(*arguments, "--json").stdout)


def refused(*arguments: str | Path) -> str:
    """The sentence that the command is refused with."""
    result = call(*arguments)
    assert isinstance(result.exception, InputError), (result.exception, result.output)
    assert result.stdout == ""
    return str(result.exception)


def lines(*arguments: str) -> list[list[str]]:
    """The cells of the table that the command prints when piped."""
    return [line.split("\t") for line in done(*arguments).stdout.splitlines()]


Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs the command as the shell does; gives its exit code and both streams."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gas", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        code = exit_.value.code
        return (0 if code is None else int(code)), out, err

    return run


def archive(path: Path, **changes: Any) -> Path:
    """A graph of 40 nodes and 4 features as .npz."""
    graph = generate.communities(40, degree=4.0, num_features=4, num_classes=3)
    split = graph.val_mask.long() + 2 * graph.test_mask.long()
    arrays = {"edge_index": graph.edge_index, "x": graph.x, "y": graph.y, "split": split, **changes}
    plain: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez(path, **plain)
    return path


def tables(folder: Path) -> tuple[Path, Path]:
    """The same graph as two tables."""
    graph = generate.communities(40, degree=4.0, num_features=4, num_classes=3)
    nodes, edges = folder / "nodes.csv", folder / "edges.csv"
    names = ["train" if a else "val" if b else "test" for a, b in zip(graph.train_mask, graph.val_mask, strict=True)]
    rows = [
        ",".join([f"n{i}", *map(repr, graph.x[i].tolist()), str(int(graph.y[i])), names[i]])
        for i in range(graph.num_nodes)
    ]
    nodes.write_text("\n".join(["id,a,b,c,d,y,split", *rows]) + "\n")
    pairs = [f"n{source},n{target}" for source, target in graph.edge_index.t().tolist()]
    edges.write_text("\n".join(["source,target", *pairs]) + "\n")
    return nodes, edges


def timeless(value: Any) -> Any:
    """The same without times and amounts of memory, and without the folder, which is named by the time."""
    if isinstance(value, dict):
        left_out = ("seconds", "peak_memory", "run_dir")
        return {key: timeless(item) for key, item in value.items() if key not in left_out}
    return [timeless(item) for item in value] if isinstance(value, list) else value


# The folder of a run #################################################################################################


def folders() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir()) if Path("runs").exists() else []


def test_training_leaves_a_folder_and_says_where() -> None:
    result = done("train", *TINY, *MEASURED, "--model", "gin", "--layers", "3", "--json")
    (name,) = folders()
    assert re.fullmatch(r"communities-gin-gas-seed0-\d{8}-\d{6}", name)
    assert "epoch 2/2 loss" in result.stderr
    assert "exact" not in result.stderr  # which nobody has asked for
    assert result.stderr.splitlines()[-1] == f"run: runs/{name}"
    read = read_run(Path("runs") / name)
    assert read.run["title"] == "communities gin gas seed 0"
    assert read.run["options"]["layers"] == 3
    assert [epoch["epoch"] for epoch in read.epochs] == [1, 2]
    assert [probe["epoch"] for probe in read.staleness] == [1, 2]
    assert read.result is not None
    assert read.result["scores"] == json.loads(result.stdout)["runs"][0]["scores"]


def test_quiet_shows_no_progress_and_does_not_say_where() -> None:
    assert done("train", *TINY, *FAST, "--quiet").stderr == ""
    assert len(folders()) == 1


def test_a_folder_may_be_named_or_left_out(tmp_path: Path) -> None:
    result = done("train", *TINY, *FAST, "--run-dir", "none")
    assert "run:" not in result.stderr
    done("train", *TINY, *FAST, "--run-dir", str(tmp_path / "mine"))
    assert read_run(tmp_path / "mine").staleness == []
    assert folders() == []
    assert "new or empty" in refused("train", *TINY, *FAST, "--run-dir", str(tmp_path / "mine"))


def test_several_runs_have_a_folder_each(tmp_path: Path) -> None:
    result = done("train", *TINY, *FAST, "--runs", "2", "--seed", "5", "--run-dir", str(tmp_path / "mine"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-seed5", "mine-seed6"]
    assert [read_run(path).run["options"]["seed"] for path in sorted(tmp_path.iterdir())] == [5, 6]
    assert result.stderr.splitlines()[-1] == f"run: {tmp_path}/mine-seed5, {tmp_path}/mine-seed6"


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    kept = ["--checkpoint-dir", str(tmp_path)]
    done("train", *TINY, "--num-parts", "4", "--epochs", "2", *kept)
    done("train", *TINY, "--num-parts", "4", "--epochs", "4", *kept, "--resume", str(tmp_path))
    (name,) = folders()
    assert [epoch["epoch"] for epoch in read_run(Path("runs") / name).epochs] == [1, 2, 3, 4]
    # Without the folder, what the checkpoint knows is written into a new one.
    shutil.rmtree("runs")
    done("train", *TINY, "--num-parts", "4", "--epochs", "5", *kept, "--resume", str(tmp_path))
    (name,) = folders()
    assert [epoch["epoch"] for epoch in read_run(Path("runs") / name).epochs] == [1, 2, 3, 4, 5]


def test_what_to_measure_may_be_named(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('diagnose = ["gradients"]\ndiagnose_every = 2\n')
    done("train", *TINY, "--epochs", "3", "--num-parts", "4", "--config", str(file), "--run-dir", "a")
    assert [probe["epoch"] for probe in read_run("a").gradients] == [2, 3]
    done("train", *TINY, *MEASURED, "--diagnose", "staleness", "--diagnose", "lipschitz", "--run-dir", "b")
    read = read_run("b")
    assert len(read.staleness) == len(read.lipschitz) == 2
    assert "diagnose must be some of" in refused("train", *TINY, *FAST, "--diagnose", "everything")


def test_a_trained_model_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    said = done("train", *TINY, *FAST, "--verify", "--run-dir", "a").stderr
    assert "the trained model is exact: 60 nodes recomputed on the whole graph" in said
    assert "warning" not in said
    quiet = done("train", *TINY, *FAST, "--verify", "--quiet", "--json")
    assert quiet.stderr == ""
    assert json.loads(quiet.stdout)["runs"][0]["verification"]["exact"] is True
    wrong = replace(fit_verification(), exact=False, inference=0.5)
    monkeypatch.setattr(journal, "verify", lambda *_: wrong)
    for flags in ([], ["--quiet"]):
        result = done("train", *TINY, *FAST, "--verify", *flags)
        assert result.exit_code == 0
        assert "warning: the trained model is NOT exact: 60 nodes" in result.stderr


def fit_verification() -> gas.Verification:
    data = generate.communities(60, degree=4.0, num_features=5, num_classes=3)
    model = gas.autoscale(MODELS["gcn"](5, 3), data)
    return gas.verify(model, gas.HaloLoader(data, 4))


def test_tensorboard_gets_the_same_numbers() -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done("train", *TINY, *MEASURED, "--tensorboard", "--run-dir", "run")
    events = accumulator.EventAccumulator("run").Reload()
    read = read_run("run")
    for tag, expected in (
        ("loss", [epoch["loss"] for epoch in read.epochs]),
        ("scores/val", [epoch["scores"]["val"] for epoch in read.epochs]),
        ("age/mean", [epoch["age"]["mean"] for epoch in read.epochs]),
        ("staleness/convs.0/staleness/mean", [probe["layers"][0]["staleness"]["mean"] for probe in read.staleness]),
    ):
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [1, 2]
        assert [scalar.value for scalar in scalars] == pytest.approx(expected)


def test_tensorboard_needs_its_package_and_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tensorboard needs a run_dir" in refused("train", *TINY, *FAST, "--tensorboard", "--run-dir", "none")
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    assert "pip install tensorboard" in refused("train", *TINY, *FAST, "--tensorboard")
    assert folders() == []


# As the shell sees it ################################################################################################


def test_json_stands_alone_on_the_output_and_progress_on_the_error_stream(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gas", "train", *TINY, *FAST, "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gnnautoscale", run_name="__main__")
    assert not ended.value.code
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    assert list(json.loads(out)) == ["options", "runs"]
    *progress, folder = err.splitlines()
    assert [line.split(" loss ")[0] for line in progress if " epoch " in line] == [
        "communities gcn gas seed 0: epoch 1/2",
        "communities gcn gas seed 0: epoch 2/2",
    ]
    assert re.fullmatch(r"run: runs/communities-gcn-gas-seed0-\d{8}-\d{6}", folder)
    assert "\x1b" not in out + err


def test_a_refusal_is_one_line_on_the_error_stream(main: Main) -> None:
    code, out, err = main("train", *TINY, "--model", "gcn", "--heads", "2")
    assert (code, out) == (2, "")
    assert err == (
        "error: the model 'gcn' takes the options batch_norm, drop_input, dropout, hidden, layers, linear, residual, "
        "but got heads. Leave these out, or choose another model.\n"
    )


def test_main_exits_with_zero(main: Main) -> None:
    assert main("data") == (0, "\n".join(datasets.names()) + "\n", "")


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["train", "--epochs", "many"], ["trian"], ["infer"]])
def test_flags_that_are_not_there_are_refused(main: Main, arguments: list[str]) -> None:
    code, out, _ = main(*arguments)
    assert code == 2
    assert out == ""


def test_the_demonstration_compares_four_methods(tmp_path: Path) -> None:
    table = lines("demo", "--nodes", "1000", "--output", str(tmp_path / "demo"))
    assert [row[0] for row in table] == ["", "full batch", "neighbour sampling", "Cluster-GCN", "GAS"]
    heads = table[0]
    assert heads[2].startswith("seconds to ")
    assert all(0 <= float(row[heads.index("test accuracy")]) <= 100 for row in table[1:])
    assert [row[heads.index("steps")] for row in table[1:]] == ["50", "40", "160", "120"]
    assert "4 training runs" in (tmp_path / "demo" / "report.html").read_text()


def test_a_demonstration_that_cannot_be_is_refused(main: Main) -> None:
    code, out, err = main("demo", "--nodes", "0", "--json")
    assert code == 2
    assert out == ""
    assert "error:" in err


# Training ############################################################################################################


def test_train_prints_lines_when_piped_and_json_says_the_same() -> None:
    arguments = ["train", *TINY, *FAST]
    header, row = lines(*arguments)
    assert header[:4] == ["run", "train accuracy", "val accuracy", "test accuracy"]
    assert header[4:] == ["best epoch", "steps", "seconds", "memory"]
    assert row[0] == "0"
    assert row[4] in ("1", "2")
    assert row[5] == "8"
    (run,) = answer(*arguments)["runs"]
    assert row[1:4] == [f"{run['scores'][split]:.2f}" for split in ("train", "val", "test")]
    assert row[4:6] == [str(run["best_epoch"]), str(run["steps"])]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "terminal", Console(file=stream, force_terminal=True, width=200))
    result = done("train", *TINY, *FAST, "--json")
    assert list(json.loads(result.stdout)) == ["options", "runs"]
    assert "2/2" in stream.getvalue()
    assert "communities gcn gas seed 0" in stream.getvalue()


def test_the_version_is_that_of_the_package() -> None:
    assert done("--version").stdout == f"gas {gas.__version__}\n"


@pytest.mark.parametrize("width", [40, 60, 80, 110, 200])
def test_a_table_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    heads = ["parts", *(f"number per {word}" for word in ("node", "edge", "batch", "step", "epoch"))]
    display.print_table("a table", heads, [["full batch", *["1,234,567"] * 5]])
    text = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("1,234,567") == 5, "no number is cut off"
    assert "full batch" in text


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display.print_table("communities", ["", "value"], [["nodes", "60"]])
    text = capsys.readouterr().out
    assert "communities" in text
    assert "│" in text
    assert "\t" not in text


def test_the_same_command_gives_the_same_result() -> None:
    arguments = ["train", *TINY, *FAST]
    first, second = answer(*arguments), answer(*arguments)
    assert timeless(first) == timeless(second)
    assert first["runs"][0]["seconds"]
    other = answer(*arguments, "--seed", "7")
    assert timeless(first)["runs"][0]["epochs"] != timeless(other)["runs"][0]["epochs"]


def test_baselines_train() -> None:
    arguments = ["train", *TINY, *FAST, "--batch-size", "2", "--mode"]
    (cluster,) = answer(*arguments, "cluster")["runs"]
    got = answer(*arguments, "sage", "--fan-out", "3,-1")
    (sage,) = got["runs"]
    assert cluster["steps"] == sage["steps"] == 4
    assert (cluster["history_bytes"], sage["connectivity"]) == (0, 0.0)
    assert "joined parts" in cluster["how"]
    assert "sampled" in sage["how"]
    assert got["options"]["fan_out"] == sage["options"]["fan_out"] == [3, -1]
    assert timeless(got) == timeless(answer(*arguments, "sage", "--fan-out=3,-1"))


@pytest.mark.parametrize("flags", [["cluster"], ["sage", "--fan-out", "-1,2"]], ids=["cluster", "sage"])
def test_a_saved_baseline_scores_as_it_did(tmp_path: Path, flags: list[str]) -> None:
    file = str(tmp_path / "model.pt")
    trained = answer("train", *TINY, *FAST, "--save", file, "--mode", *flags)
    assert answer("infer", file, *TINY)["accuracy test"] == pytest.approx(trained["runs"][0]["scores"]["test"])


# Others are trained and saved below.
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("gcn", "gat", "pna", "pna-jk", "rgcn")])
def test_every_model_trains(model: str) -> None:
    (run,) = answer("train", *TINY, *MEASURED, "--model", model, "--layers", "2", "--hidden", "4")["runs"]
    assert len(run["epochs"]) == 2


def test_options_reach_the_model_and_the_training() -> None:
    flags = ["--model", "pna", "--layers", "2", "--hidden", "3", "--no-batch-norm", "--residual", "--dropout", "0.1"]
    flags += ["--aggregators", "mean", "--aggregators", "max", "--scalers", "identity", "--lr", "0.5", "--storage"]
    got = answer("train", *TINY, *FAST, *flags, "host", "--refresh-every", "3", "--patience", "9")
    options = got["options"]
    assert (options["aggregators"], options["scalers"]) == (["mean", "max"], ["identity"])
    assert (options["batch_norm"], options["residual"], options["dropout"]) == (False, True, 0.1)
    assert got["runs"][0]["options"]["refresh_every"] == 3
    assert got["runs"][0]["options"]["storage"] == "host"
    assert got["runs"][0]["epochs"][0]["learning_rate"] == 0.5
    # One history of 60 rows and 3 columns.
    assert got["runs"][0]["history_bytes"] == 60 * 3 * 4


def test_a_file_and_tables_of_the_same_graph_train_alike(tmp_path: Path) -> None:
    nodes, edges = tables(tmp_path)
    file = archive(tmp_path / "graph.npz")
    from_file = answer("train", "--data", str(file), *FAST)
    from_tables = answer("train", "--data", str(nodes), "--edges", str(edges), *FAST)
    assert timeless(from_file["runs"]) == timeless(from_tables["runs"])


def test_several_labels_are_scored_by_f1(tmp_path: Path) -> None:
    y = np.random.default_rng(0).random((40, 5)) < 0.4
    file = archive(tmp_path / "labels.npz", y=y)
    header, _ = lines("train", "--data", str(file), *FAST)
    assert header[1:4] == ["train micro-F1", "val micro-F1", "test micro-F1"]


def test_scores_that_do_not_exist_are_null(tmp_path: Path) -> None:
    file = archive(tmp_path / "graph.npz", split=np.arange(40) % 2)
    text = done("train", "--data", str(file), *FAST, "--json").stdout
    assert "NaN" not in text
    assert json.loads(text)["runs"][0]["scores"]["test"] is None
    assert lines("train", "--data", str(file), *FAST)[1][3] == "-"


def test_several_runs_end_with_mean_and_deviation() -> None:
    arguments = ["train", *TINY, *FAST, "--runs", "2", "--seed", "5"]
    table = lines(*arguments)
    runs = answer(*arguments)["runs"]
    assert [row[0] for row in table] == ["run", "5", "6", "mean"]
    for column, split in enumerate(("train", "val", "test"), start=1):
        values = [run["scores"][split] for run in runs]
        assert table[3][column] == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert [run["options"]["seed"] for run in runs] == [5, 6]
    assert runs[0]["epochs"] != runs[1]["epochs"]


def test_each_run_takes_the_next_split(tmp_path: Path) -> None:
    graph = generate.communities(40, degree=4.0, num_features=4, num_classes=3)
    np.savez(tmp_path / "graph.npz", edge_index=graph.edge_index, x=graph.x, y=graph.y)
    file = ["--data", str(tmp_path / "graph.npz"), "--quiet"]
    together = answer("train", *file, *FAST, "--runs", "2")["runs"]
    alone = answer("train", *file, *FAST, "--split", "1", "--seed", "1")["runs"]
    assert timeless(together[1])["epochs"] == timeless(alone[0])["epochs"]


# Configuration files #################################################################################################


def config(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


COMMUNITIES = 'data = "communities"\nnodes = 60\ndegree = 4\nfeatures = 5\nclasses = 3\n'


def test_a_file_says_what_flags_say_and_flags_win(tmp_path: Path) -> None:
    text = COMMUNITIES + 'epochs = 3\nnum_parts = 4\nmodel = "gat"\nheads = 2\nhidden = 4\nlr = 1\nevaluate-every = 2\n'
    text += 'diagnose_every = "never"\n'
    file = config(tmp_path, text + "refresh_every = 2\n")
    got = answer("train", "--config", file, "--hidden", "3", "--epochs", "2")
    flags = ["--model", "gat", "--heads", "2", "--hidden", "3", "--lr", "1.0", "--evaluate-every", "2"]
    expected = answer("train", *TINY, *FAST, *flags, "--refresh-every", "2")
    assert timeless(got) == timeless(expected)
    assert got["options"]["hidden"] == 3
    assert len(got["runs"][0]["epochs"]) == 2


def test_a_file_may_hold_a_fan_out(tmp_path: Path) -> None:
    text = COMMUNITIES + 'mode = "sage"\nepochs = 2\nnum_parts = 4\nfan-out = [3, 2]\ndiagnose_every = "never"\n'
    got = answer("train", "--config", config(tmp_path, text))
    assert timeless(got) == timeless(answer("train", *TINY, *FAST, "--mode", "sage", "--fan-out", "3,2"))
    assert answer("train", "--config", config(tmp_path, text), "--fan-out", "1")["options"]["fan_out"] == [1]


def test_a_file_may_hold_lists_and_switches(tmp_path: Path) -> None:
    text = 'model = "pna"\naggregators = ["mean", "max"]\nbatch_norm = false\nepochs = 1\nnum_parts = 2\n'
    text += 'diagnose_every = "never"\n'
    got = answer("train", "--config", config(tmp_path, COMMUNITIES + text))
    assert got["options"]["aggregators"] == ["mean", "max"]
    assert got["options"]["batch_norm"] is False
    got = answer("train", "--config", config(tmp_path, COMMUNITIES + text), "--aggregators", "sum", "--batch-norm")
    assert got["options"]["aggregators"] == ["sum"]
    assert got["options"]["batch_norm"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "must be options of this command, but got 'epoch'. Did you mean 'epochs'"),
        ("batch-sise = 3", "Did you mean 'batch_size'"),
        ("zzzzzzz = 3", "See --help"),
        ("[train]\nepochs = 3", "got 'train'"),
        ('epochs = "3"', "epochs must be an integer of at least 1, but got '3'. Change it in run.toml"),
        ("epochs = 3.0", "epochs must be an integer of at least 1"),
        ("epochs = true", "epochs must be an integer of at least 1"),
        ("lr = true", "lr must be a number above 0"),
        ('lr = "0.1"', "lr must be a number above 0"),
        ("residual = 1", "residual must be true or false"),
        ("mode = 1", "mode must be one of gas"),
        ("refresh_every = 1.5", "refresh_every must be one of never, epoch, or an integer of at least 1"),
        ("refresh_every = true", "refresh_every must be one of never, epoch, or an integer of at least 1"),
        ('aggregators = "mean"', "aggregators must be a list of words"),
        ('model = "pna"\naggregators = [1]', "aggregators must be"),
        ('mode = "sage"\nfan_out = "3,2"', "fan_out must be a list of integers"),
        ('mode = "sage"\nfan_out = [true]', "fan_out must be a list of integers"),
        ('mode = "sage"\nfan_out = 3', "fan_out must be a list of integers"),
        ("epochs =", "readable TOML"),
    ],
)
def test_files_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused("train", *TINY, "--config", config(tmp_path, text + "\n"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "readable TOML" in refused("train", *TINY, "--config", str(tmp_path / "none.toml"))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'data = "\xff\xfe"\n')
    assert "readable TOML" in refused("train", "--config", str(tmp_path / "run.toml"))


def test_each_command_reads_its_own_keys(tmp_path: Path) -> None:
    file = config(tmp_path, COMMUNITIES + "num_parts = 5\n")
    assert answer("partition", "--config", file)["parts"] == 5
    assert "got 'num_parts'" in refused("data", "--config", file)
    assert "got 'lr'" in refused("partition", "--config", config(tmp_path, COMMUNITIES + "lr = 0.1\n"))


def test_values_come_from_flags_then_the_file_then_defaults(tmp_path: Path) -> None:
    options = [Option(name, int, 1) for name in ("a", "b", "c")]
    file = tmp_path / "some.toml"
    file.write_text("a = 2\nb = 2\n")
    assert resolve(options, {"a": 3, "b": None, "c": None}, file) == {"a": 3, "b": 2, "c": 1}
    assert resolve(options, {"a": 0, "b": None, "c": None}, file) == {"a": 0, "b": 2, "c": 1}


# Refusals ############################################################################################################


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gcn", "--heads", "2"], "the model 'gcn' takes the options"),
        (["--model", "appnp", "--no-residual"], "residual"),
        (["--model", "gnc"], "a model is one of"),
        (["--undirected"], "--undirected"),
        (["--max-features", "3"], "--max-features"),
        (["--edges", "edges.csv"], "--edges"),
        (["--num-parts", "2", "--batch-size", "3"], "batch_size"),
        (["--mode", "fast"], "mode must be one of"),
        (["--mode", "sage"], "fan_out must be a list of integers"),
        (["--mode", "sage", "--fan-out", "0,3"], "fan_out must be a list of integers"),
        (
            ["--mode", "sage", "--fan-out", "3,,3"],
            "fan_out must be a list of integers, but got '3,,3'. Write them like 10,10.",
        ),
        (["--mode", "sage", "--fan-out", ""], "fan_out must be a list of integers, but got ''"),
        (["--mode", "gas", "--fan-out", "3"], "fan_out belongs to mode 'sage'"),
        (["--mode", "cluster", "--lipschitz", "0.1"], "lipschitz must be 0.0 with mode 'cluster'"),
        (["--mode", "cluster", "--refresh-every", "epoch"], "refresh_every"),
        (["--epochs", "0"], "epochs"),
        (["--lr", "-1"], "lr"),
        (["--refresh-every", "sometimes"], "refresh_every"),
        (["--device", "nowhere"], "device"),
        (["--runs", "0"], "runs"),
        (["--save", "/nowhere/model.pt"], "--save names a file in an existing folder"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the graph was loaded")

    monkeypatch.setattr(datasets, "load", work)
    monkeypatch.setattr(datasets, "from_file", work)
    assert message in refused("train", *TINY, *flags)


def test_flags_of_generated_data_are_refused_with_files(tmp_path: Path) -> None:
    file = str(archive(tmp_path / "graph.npz"))
    assert "--graphs belong to generated data sets" in refused("train", "--data", file, "--graphs", "3")
    assert "--nodes, --classes" in refused("data", "--data", file, "--nodes", "3", "--classes", "2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "communities", "--graphs", "3"], "graphs"),
        (["--data", "cluster", "--nodes", "30"], "nodes"),
        (["--data", "cora", "--nodes", "30"], "nodes"),
        (["--data", "crra"], "Did you mean 'cora'"),
        (["--data", "nowhere.npz"], "nowhere.npz"),
        (["--data", "communities", "--nodes", "0"], "nodes"),
        (["--data", "communities", "--split", "-1"], "split"),
        ([], "--data"),
    ],
)
@pytest.mark.parametrize("command", ["train", "partition"])
def test_data_that_are_not_there_are_refused(command: str, flags: list[str], message: str) -> None:
    assert message in refused(command, *flags)


def test_no_features_at_all_are_refused(tmp_path: Path) -> None:
    file = str(archive(tmp_path / "graph.npz"))
    assert answer("data", "--data", file, "--max-features", "2")["features"] == 2
    assert "max_features" in refused("data", "--data", file, "--max-features", "0")


def test_a_folder_of_the_same_name_hides_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "communities").mkdir()
    assert answer("data", *TINY)["nodes"] == 60


def test_edge_weights_are_refused_by_models_without_them(tmp_path: Path, main: Main) -> None:
    edges = generate.communities(40, degree=4.0, num_features=4, num_classes=3).num_edges
    file = archive(tmp_path / "graph.npz", edge_weight=np.ones(edges))
    code, out, err = main("train", "--data", file, "--model", "gin", *FAST)
    assert (code, out) == (2, "")
    assert "edge weights" in err


def test_a_loss_that_is_no_number_ends_with_a_sentence(main: Main) -> None:
    code, out, err = main("train", *TINY, *FAST, "--lr", "1e30", "--epochs", "6", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("error: the loss is")


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "pna", "--aggregators", "middle"],
        ["--model", "pna", "--scalers", "squared"],
        ["--model", "gcnii", "--theta", "-2"],
        ["--device", "nowhere"],
        ["--save", "."],
        ["--cache-dir", str(Path(__file__) / "cache")],
        ["--num-parts", "61"],
    ],
)
def test_bad_values_end_with_a_sentence(main: Main, flags: list[str]) -> None:
    code, out, err = main("train", *TINY, "--epochs", "1", "--quiet", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


# Saving and inference ################################################################################################


@pytest.mark.parametrize(
    ("data", "model"),
    [(TINY, "gcn"), (TINY, "pna-jk"), (["--data", "cluster", "--graphs", "2"], "pna"), (TINY, "gat")],
    ids=["gcn", "pna-jk", "inductive pna", "gat"],
)
def test_a_saved_model_scores_as_it_did(tmp_path: Path, data: list[str], model: str) -> None:
    file = tmp_path / "model.pt"
    trained = answer("train", *data, *FAST, "--model", model, "--hidden", "4", "--save", str(file))
    assert set(trained["runs"][0]["scores"]) == {"train", "val", "test"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    for parts in ("1", "3") if model == "gcn" else ("3",):
        inferred = answer("infer", str(file), *data, "--num-parts", parts)
        assert inferred["accuracy test"] == pytest.approx(trained["runs"][0]["scores"]["test"])
        if data is TINY:
            assert inferred["accuracy val"] == pytest.approx(trained["runs"][0]["scores"]["val"])
            assert inferred["nodes"] == 60


def test_a_saved_model_of_several_labels_scores_as_it_did(tmp_path: Path) -> None:
    data = ["--data", str(archive(tmp_path / "g.npz", y=np.random.default_rng(0).random((40, 5)) < 0.4))]
    trained = answer("train", *data, *FAST, "--save", str(tmp_path / "model.pt"))
    inferred = answer("infer", str(tmp_path / "model.pt"), *data)
    assert inferred["micro-F1 test"] == pytest.approx(trained["runs"][0]["scores"]["test"])


def test_a_folder_is_no_file_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "folder" in refused("train", *TINY, *FAST, "--save", str(tmp_path / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    written = ["--run-dir", str(folder / "run"), "--save", str(folder / "model.pt")]
    done("train", *TINY, *FAST, "--hidden", "4", "--device", "cpu", *written, "--quiet")
    return folder / "model.pt"


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A trained model in a file that a test may spoil."""
    return Path(shutil.copy(saved_once, tmp_path))


def test_scores_and_classes_are_written(saved: Path, tmp_path: Path) -> None:
    table = lines("infer", str(saved), *TINY, "--output", str(tmp_path / "out.npz"))
    assert table[0] == ["", "value"]
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["logits"].shape == (60, 3)
        assert (arrays["logits"].argmax(1) == arrays["classes"]).all()
        np.testing.assert_allclose(arrays["probabilities"].sum(1), 1, rtol=1e-6)
        graph = datasets.load("communities", nodes=60, degree=4.0, features=5, classes=3).train
        right = (torch.from_numpy(arrays["classes"]) == graph.y)[graph.test_mask]
    values = {row[0]: row[1] for row in table}
    assert float(values["accuracy test"]) == pytest.approx(100 * float(right.double().mean()), abs=0.01)


def test_a_model_of_other_data_is_refused(saved: Path) -> None:
    wide, many = TINY.copy(), TINY.copy()
    wide[wide.index("--features") + 1] = "6"
    many[many.index("--classes") + 1] = "4"
    assert "6 features and 3 classes" in refused("infer", str(saved), *wide)
    assert "5 features and 4 classes" in refused("infer", str(saved), *many)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _other_pickle(path: Path) -> None:
    torch.save({"something": torch.ones(3)}, path)


def _code(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    "spoil",
    [
        _truncate,
        _other_pickle,
        _code,
        lambda path: path.write_text("hello"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"format": "gnnautoscale model 99", "options": {}, "weights": {}}, path),
        lambda path: torch.save({"format": "gnnautoscale model 1", "options": {}, "weights": {}}, path),
    ],
    ids=["truncated", "foreign", "code", "text", "empty", "missing", "list", "future", "hollow"],
)
def test_files_that_are_no_models_are_refused(saved: Path, spoil: Callable[[Path], Any]) -> None:
    spoil(saved)
    message = refused("infer", str(saved), *TINY)
    assert "gas train --save" in message
    assert "model.pt" in message


@pytest.mark.parametrize("flags", [["--num-parts", "0"], ["--device", "nowhere"], ["--output", "/nowhere/out.npz"]])
def test_inference_that_cannot_be_is_refused(saved: Path, main: Main, flags: list[str]) -> None:
    code, out, err = main("infer", saved, *TINY, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


# Partition and data ##################################################################################################


@pytest.mark.parametrize("method", ["metis", "kaminpar", "random"])
def test_partition_writes_the_parts(tmp_path: Path, method: str) -> None:
    if method == "kaminpar":
        pytest.importorskip("kaminpar")
    file = tmp_path / "parts.npy"
    facts = answer("partition", *TINY, "--num-parts", "5", "--partition", method, "--output", str(file))
    labels = torch.from_numpy(np.load(file))
    graph = datasets.load("communities", nodes=60, degree=4.0, features=5, classes=3).train
    source, target = graph.edge_index
    assert labels.shape == (60,)
    assert facts["parts"] == int(labels.max()) + 1 == 5
    assert (facts["smallest part"], facts["largest part"]) == (
        int(labels.bincount().min()),
        int(labels.bincount().max()),
    )
    assert facts["edges inside parts"] == pytest.approx(float((labels[source] == labels[target]).double().mean()))
    ratios = []
    for part in range(5):
        halo = {int(s) for s, t in zip(source, target, strict=True) if labels[t] == part and labels[s] != part}
        ratios.append(len(halo) / int((labels == part).sum()))
    assert facts["halo nodes per batch node"] == pytest.approx(statistics.mean(ratios))
    assert facts["nodes"] == 60
    assert facts["edges"] == graph.num_edges


def test_partition_prints_lines_when_piped() -> None:
    table = lines("partition", *TINY, "--num-parts", "3")
    assert table[0] == ["", "value"]
    assert ["parts", "3"] in table
    assert all(len(row) == 2 for row in table)


def test_partitions_are_kept(tmp_path: Path) -> None:
    arguments = ["partition", *TINY, "--num-parts", "3", "--cache-dir", str(tmp_path / "cache")]
    first = answer(*arguments)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert timeless(answer(*arguments)) == timeless(first)


@pytest.mark.parametrize(
    "flags",
    [["--num-parts", "0"], ["--num-parts", "61"], ["--partition", "louvain"], ["--output", "/nowhere/parts.npy"]],
)
def test_partitions_that_cannot_be_are_refused(main: Main, flags: list[str]) -> None:
    code, out, err = main("partition", *TINY, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_data_lists_all_names() -> None:
    assert done("data").stdout.split() == list(datasets.names())
    assert answer("data") == list(datasets.names())


def test_data_shows_facts() -> None:
    graph = datasets.load("communities", nodes=60, degree=4.0, features=5, classes=3).train
    facts = answer("data", *TINY)
    assert facts == {
        "nodes": 60,
        "directed edges": graph.num_edges,
        "features": 5,
        "classes": 3,
        "multi-label": False,
        "train nodes in split": 30,
        "val nodes in split": 15,
        "test nodes in split": 15,
    }
    assert ["multi-label", "no"] in lines("data", *TINY)


def test_data_shows_facts_of_both_graphs() -> None:
    facts = answer("data", "--data", "cluster", "--graphs", "2")
    dataset = datasets.load("cluster", graphs=2)
    assert facts["train nodes"] == facts["train nodes in split"] == dataset.train.num_nodes
    assert facts["test nodes"] == facts["test nodes in split"] == dataset.test.num_nodes
    assert facts["val nodes in split"] == dataset.val.num_nodes


def test_reverse_edges_are_added(tmp_path: Path) -> None:
    file = str(archive(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]]))
    assert answer("data", "--data", file)["directed edges"] == 2
    assert answer("data", "--data", file, "--undirected")["directed edges"] == 4


# The schema ##########################################################################################################


def flags_of(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(cli.app)
    return {param.name: param for param in group.commands[command].params}


def test_every_option_of_fit_has_a_flag_with_its_default() -> None:
    flags = flags_of("train")
    parameters = inspect.signature(fit).parameters
    assert {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY} == {
        *OPTIONS,
        "task",
        "callback",
        "on_phase",
        "loggers",
        "progress",
    }
    assert set(OPTIONS.values()) < set(TRAIN)
    for name, each in OPTIONS.items():
        assert parameters[name].default == each.default
        assert flags[name].help.startswith(each.help)
        assert flags[name].rich_help_panel == each.group
        assert "--" + name.replace("_", "-") in flags[name].opts


def test_every_option_of_the_models_has_a_flag_and_the_other_way_round() -> None:
    options = {name for model in MODELS for name in model_options(model)}
    assert {each.name for each in MODEL} - {"model"} == options
    flags = flags_of("train")
    assert all(flags[name].help for name in options)


def test_flags_say_their_default() -> None:
    flags = flags_of("train")
    assert flags["lr"].help == "Learning rate of Adam. (default: 0.01)"
    assert flags["data"].help is not None
    assert "default" not in flags["data"].help


@pytest.mark.parametrize("command", ["train", "partition", "infer", "data", "demo", "expressiveness"])
def test_help_is_there(command: str) -> None:
    result = done(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    for name, flag in flags_of(command).items():
        assert flag.help, name


@pytest.mark.parametrize("command", ["train", "tune", "partition"])
def test_narrow_terminals_cut_nothing_of_the_help(command: str) -> None:
    result = invoke([command, "--help"], env={"COLUMNS": "80"})
    assert "…" not in result.stdout
    assert "--[no-]undirected" in result.stdout


# Checkpoints and storage #############################################################################################


def test_a_resumed_run_prints_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = answer("train", *TINY, "--epochs", "4", "--num-parts", "4")["runs"][0]
    folder = str(tmp_path / "run")
    done("train", *TINY, "--epochs", "2", "--num-parts", "4", "--checkpoint-dir", folder)
    resumed = answer(
        "train", *TINY, "--epochs", "4", "--num-parts", "4", "--checkpoint-dir", folder, "--resume", folder
    )
    assert [epoch["loss"] for epoch in resumed["runs"][0]["epochs"]] == [epoch["loss"] for epoch in whole["epochs"]]
    assert resumed["runs"][0]["scores"] == whole["scores"]


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def interrupted(*_: Any, **options: Any) -> Any:
        def stop(epoch: Any) -> None:
            if epoch.number == 2:
                os.kill(os.getpid(), signal.SIGINT)

        return fit(*_, callback=stop, **options)

    monkeypatch.setattr(cli, "fit", interrupted)
    result = call("train", *TINY, "--epochs", "9", "--num-parts", "4", "--checkpoint-dir", folder)
    assert result.exit_code == 130
    assert f"--resume {folder} continues from checkpoint-000000008.pt" in result.stderr.replace("\n", "")
    result = call("train", *TINY, "--epochs", "9", "--num-parts", "4")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("stopped; the trained weights are lost (--checkpoint-dir")


def test_checkpoints_are_of_one_run(tmp_path: Path) -> None:
    assert "checkpoints belong to one run" in refused(
        "train", *TINY, *FAST, "--runs", "2", "--checkpoint-dir", tmp_path
    )


def test_the_chosen_storage_is_said(tmp_path: Path) -> None:
    result = done("train", *TINY, *FAST, "--storage", "auto", "--history-dir", tmp_path)
    assert "histories: device: histories take " in result.stderr
    run = answer("train", *TINY, *FAST, "--storage", "disk", "--history-dir", tmp_path)["runs"][0]
    assert run["storage"] == "disk: set by storage"


def test_features_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.npz")
    arrays = dict(np.load(whole))
    np.save(tmp_path / "x.npy", arrays.pop("x").astype(np.float32))
    np.savez(tmp_path / "graph.npz", **arrays)
    apart: list[str | Path] = [
        "--data",
        tmp_path / "graph.npz",
        "--features-file",
        tmp_path / "x.npy",
        "--no-keep-batches",
    ]
    expected = answer("train", "--data", whole, *FAST)["runs"][0]
    assert answer("train", *apart, *FAST)["runs"][0]["scores"] == expected["scores"]


# Tasks and metrics ###################################################################################################


def test_a_regression_from_a_file(tmp_path: Path) -> None:
    graph = generate.communities(40, degree=4.0, num_features=4, num_classes=3)
    file = archive(tmp_path / "graph.npz", y=graph.x.sum(1))
    model = tmp_path / "model.pt"
    flags: list[str | Path] = ["--data", file, *FAST, "--metric", "mae", "--run-dir", tmp_path / "run", "--save", model]
    (run,) = answer("train", *flags)["runs"]
    assert (run["metric"], run["higher_is_better"], run["percent"]) == ("MAE", False, False)
    facts = answer("infer", model, "--data", file, "--metric", "MAE", "--output", tmp_path / "out.npz")
    assert facts["MAE test"] == pytest.approx(run["scores"]["test"], rel=1e-4)
    assert np.load(tmp_path / "out.npz")["values"].shape == (40, 1)
    assert answer("data", "--data", file)["targets"] == 1
    done("report", tmp_path / "run", "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Scores (MAE) belong to the epoch" in page
    assert "MAE, %" not in page


def test_a_metric_and_weights_by_name() -> None:
    (run,) = answer("train", *TINY, *FAST, "--metric", "macro-f1", "--class-weight", "balanced")["runs"]
    assert run["metric"] == "macro-F1"
    message = refused("train", *TINY, *FAST, "--metric", "rmse")
    assert message.startswith("a metric of classes is one of accuracy, balanced-accuracy")
    assert "task must be one of classification, regression" in refused("train", *TINY, *FAST, "--task", "nothing")


def test_classes_as_numbers(tmp_path: Path) -> None:
    (run,) = answer("train", "--data", archive(tmp_path / "graph.npz"), *FAST, "--task", "regression")["runs"]
    assert run["metric"] == "RMSE"


# Links ###############################################################################################################


@pytest.mark.parametrize("decoder", ["dot", "bilinear"])
def test_links_are_trained_scored_and_asked_for(tmp_path: Path, decoder: str) -> None:
    model, out = tmp_path / "model.pt", tmp_path / "out.npz"
    data = [*TINY, "--task", "link", "--decoder", decoder, "--width", "8", "--metric", "mrr"]
    (run,) = answer("train", *data, *FAST, "--batch-size", "2", "--save", model, "--run-dir", tmp_path / "run")["runs"]
    assert run["metric"] == "MRR"
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("source,target\n0,1\n5,2\n")
    asked: list[str | Path] = ["--pairs", pairs, "--partners-of", "3,14", "--top", "4", "--output", out]
    facts = answer("infer", model, *data, *asked)
    assert facts["MRR test"] == pytest.approx(run["scores"]["test"], abs=1e-4)
    found = np.load(out)
    assert found["embeddings"].shape == (60, 8)
    assert found["pair_scores"].shape == (2,)
    assert found["partners"].shape == found["partner_scores"].shape == (2, 4)
    if decoder == "dot":
        rows = found["embeddings"]
        np.testing.assert_allclose(found["pair_scores"], (rows[[0, 5]] * rows[[1, 2]]).sum(1), rtol=1e-4, atol=1e-5)
    done("report", tmp_path / "run", "--output", tmp_path / "page.html")
    np.save(tmp_path / "pairs.npy", np.array([[0, 1], [5, 2]]))
    answer("infer", model, *data, "--pairs", tmp_path / "pairs.npy", "--output", out)
    np.testing.assert_array_equal(np.load(out)["pair_scores"], found["pair_scores"])


def test_links_of_a_file_with_splits(tmp_path: Path) -> None:
    graph = generate.communities(40, degree=4.0, num_features=4, num_classes=3)
    ends = graph.edge_index.sort(dim=0).values
    split = torch.tensor([-1, 0, 0, 1, 2])[(7 * ends[0] + 3 * ends[1]) % 5]
    file = archive(tmp_path / "graph.npz", edge_split=split)
    (run,) = answer("train", "--data", file, "--task", "link", *FAST, "--batch-size", "2", "--metric", "hits@5")["runs"]
    assert run["metric"] == "Hits@5"
    assert answer("train", "--data", file, *FAST)["runs"][0]["metric"] == "accuracy"


def test_a_knowledge_graph_is_shown_and_trained_on(tmp_path: Path) -> None:
    file, node = tmp_path / "kg.npz", np.arange(30)
    step = [np.stack([node, node % 3, (node + far) % 30], axis=1) for far in (1, 2, 3)]
    np.savez(file, train=step[0], valid=step[1], test=step[2], num_nodes=30)
    assert answer("data", "--data", file) == {"nodes": 30, "directed edges": 90, "features": 1}
    data: list[str | Path] = ["--data", file, "--task", "link", "--decoder", "distmult", "--width", "8"]
    model: list[str | Path] = ["--model", "rgcn", "--blocks", "2", "--save", tmp_path / "model.pt"]
    (run,) = answer("train", *data, *model, *FAST, "--batch-size", "2", "--metric", "mrr")["runs"]
    assert run["metric"] == "MRR"
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("source,target,relation\n0,1,0\n5,2,1\n")
    infer: list[str | Path] = [
        "infer",
        tmp_path / "model.pt",
        *data,
        "--output",
        tmp_path / "out.npz",
        "--pairs",
        pairs,
    ]
    answer(*infer, "--partners-of", "3", "--relation", "1", "--top", "4")
    found = np.load(tmp_path / "out.npz")
    weight = torch.load(tmp_path / "model.pt")["decoder"]["weight"].numpy()
    rows = found["embeddings"]
    scores = (rows[[0, 5]] * weight[[0, 1]] * rows[[1, 2]]).sum(1)
    np.testing.assert_allclose(found["pair_scores"], scores, rtol=1e-4, atol=1e-5)
    assert found["partners"].shape == (1, 4)
    assert not np.isin(found["partners"], [(3 + far) % 30 for far in (1, 2, 3)]).any()  # edges of the data set
    np.save(tmp_path / "pairs.npy", np.array([[0, 0, 1], [5, 1, 2]]))
    answer(*infer[:-1], tmp_path / "pairs.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["pair_scores"], found["pair_scores"])
    np.save(tmp_path / "pairs.npy", np.array([[0, 3, 1]]))
    assert "relations must be from 0 to 2, but got 3 to 3" in refused(*infer[:-1], tmp_path / "pairs.npy")
    np.save(tmp_path / "pairs.npy", np.array([[0, 1]]))
    assert "pairs of typed edges need a relation" in refused(*infer[:-1], tmp_path / "pairs.npy")
    assert "pairs of typed edges need a relation" in refused(*infer[:-2], "--partners-of", "3")


def test_links_of_tables_with_types_and_splits(tmp_path: Path) -> None:
    nodes, edges = tmp_path / "nodes.csv", tmp_path / "edges.csv"
    nodes.write_text("id,a,b\n" + "".join(f"n{number},{number % 3},1\n" for number in range(30)))
    rows = [
        f"n{number},n{(number + far) % 30},{('eats', 'likes')[number % 2]},{split}\n"
        for far, split in ((1, "train"), (2, "val"), (3, "test"), (5, "none"))
        for number in range(30)
    ]
    edges.write_text("source,target,type,split\n" + "".join(rows))
    data: list[str | Path] = ["--data", nodes, "--edges", edges, "--task", "link"]
    typed = ["--decoder", "distmult", "--model", "rgcn", "--metric", "hits@3", "--width", "8"]
    (run,) = answer("train", *data, *typed, *FAST, "--batch-size", "2")["runs"]
    assert run["metric"] == "Hits@3"
    assert "the model 'rgcn' needs edges with types" in refused("train", *data, "--model", "rgcn", *FAST)


@pytest.mark.parametrize("mode", [["--mode", "cluster"], ["--mode", "sage", "--fan-out", "3,3"]])
def test_links_by_baselines(mode: list[str]) -> None:
    (run,) = answer("train", *TINY, "--task", "link", *FAST, "--batch-size", "2", *mode)["runs"]
    assert run["metric"] == "ROC-AUC"


def test_links_refused(tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    link = [*TINY, "--task", "link"]
    done("train", *link, *FAST, "--batch-size", "2", "--save", model, "--reconstruct")
    assert "--decoder belong to --task link" in refused("train", *TINY, *FAST, "--decoder", "dot")
    assert "go to a file" in refused("infer", model, *link, "--partners-of", "3")
    output: list[str | Path] = ["--output", tmp_path / "out.npz"]
    assert "numbers of nodes" in refused("infer", model, *link, "--partners-of", "a", *output)
    assert "nodes from 0 to 59" in refused("infer", model, *link, "--partners-of", "60", *output)
    (tmp_path / "pairs.csv").write_text("from,to\n0,1\n")
    assert "source and target" in refused("infer", model, *link, "--pairs", tmp_path / "pairs.csv", *output)
    assert "a graph with the features" in refused("infer", model, *link, "--decoder", "bilinear")
    message = refused("train", "--data", "cluster", "--graphs", "2", *FAST, "--task", "link")
    assert message.startswith("links are split in one graph, but got several graphs")
