"""The scripts in examples/: each is short, runs on its own, and prints what its docstring claims."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 100

Printed = dict[str, str]


def number(text: str) -> float:
    """The first number of a printed line."""
    found = re.match(r"-?[\d.]+(e-?\d+)?", text)
    assert found, text
    return float(found[0])


def custom_layer(printed: Printed) -> None:
    assert number(printed["largest relative error"]) < 1e-5
    assert "SimilarityConv ('second')" in printed["refused"]


def diagnostics(printed: Printed) -> None:
    stale = [number(printed[f"relative staleness after epoch {epoch}"]) for epoch in (5, 10, 15, 20)]
    assert stale == sorted(stale, reverse=True)
    assert stale[-1] < stale[0] / 10
    assert number(printed["relative staleness after a refresh"]) < 1e-4
    assert all(0.5 < number(printed[f"cosine of gradients after epoch {epoch}"]) < 1 for epoch in (5, 10, 15, 20))


def exactness(printed: Printed) -> None:
    assert number(printed["error from stale histories"]) > 1e-3
    assert number(printed["error after a refresh"]) < 1e-5
    assert number(printed["error of exact inference"]) < 1e-5


def fit_any_model(printed: Printed) -> None:
    assert number(printed["halo nodes per batch node"]) > 0
    assert number(printed["steps with histories"]) == 120
    with_histories = number(printed["test accuracy with histories"])
    assert with_histories > 90
    assert abs(with_histories - number(printed["test accuracy in full batch"])) < 5


def graph_level(printed: Printed) -> None:
    for what in ("whole graphs", "parts of graphs"):
        assert number(printed[f"test graphs right, batches of {what}"]) > 90
        assert number(printed[f"largest difference from plain PyG, {what}"]) < 1e-5


def growing_graph(printed: Printed) -> None:
    assert number(printed["new nodes"]) == 4
    unchanged = number(printed["old nodes whose output stays as it was"])
    assert number(printed["old nodes"]) / 2 < unchanged < number(printed["old nodes"])
    assert number(printed["largest error for all nodes"]) < 1e-5


def histories_on_disk(printed: Printed) -> None:
    assert printed["losses on disk are the same"] == "True"
    size = number(printed["size on disk"])
    assert size == number(printed["size in memory"]) == 600 * 2 * 256 * 4
    assert number(printed["size on disk as int8"]) == 600 * 2 * 272
    assert number(printed["test accuracy in int8"]) > number(printed["test accuracy in float32"]) - 3 > 90


def link_prediction(printed: Printed) -> None:
    assert number(printed["AUC trained"]) > number(printed["AUC untrained"]) + 0.1


def local_lipschitz(printed: Printed) -> None:
    assert number(printed["penalty with it"]) < number(printed["penalty without regularization"])
    assert number(printed["mean error of outputs with it"]) < number(printed["mean error of outputs without"])


def neighbour_sampling(printed: Printed) -> None:
    assert printed["of these used by GAS"] == printed["edges into the batch"]
    assert number(printed["of these used by sampling"]) < number(printed["edges into the batch"]) / 2
    assert number(printed["nodes in memory with GAS"]) < number(printed["nodes in memory with sampling"])
    assert number(printed["test accuracy with GAS"]) > 90


def own_loop(printed: Printed) -> None:
    assert number(printed["last loss"]) < number(printed["first loss"]) / 2
    assert number(printed["test accuracy"]) > 90


def resume(printed: Printed) -> None:
    assert printed["stopped"] == printed["same losses"] == printed["same scores"] == "True"
    assert number(printed["epochs in the end"]) == 12


def with_lightning(printed: Printed) -> None:
    assert number(printed["last loss"]) < number(printed["first loss"]) / 4
    assert number(printed["test accuracy"]) > 90


CLAIMS: dict[str, Callable[[Printed], None]] = {
    claim.__name__: claim
    for claim in (
        custom_layer,
        diagnostics,
        exactness,
        fit_any_model,
        graph_level,
        growing_graph,
        histories_on_disk,
        link_prediction,
        local_lipschitz,
        neighbour_sampling,
        own_loop,
        resume,
        with_lightning,
    )
}


def test_every_example_has_a_claim() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == CLAIMS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_example_is_short_and_says_what_it_shows(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(source))


def batch_attributes(loop: ast.For) -> set[str]:
    """The attributes of ``batch`` that a loop over batches reads."""
    reads = (node for node in ast.walk(loop) if isinstance(node, ast.Attribute))
    return {node.attr for node in reads if isinstance(node.value, ast.Name) and node.value.id == "batch"}


@pytest.mark.parametrize("name", CLAIMS)
def test_example_does_not_learn_from_test_labels(name: str) -> None:
    loops = [node for node in ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text())) if isinstance(node, ast.For)]
    assert all("train_mask" in attributes for attributes in map(batch_attributes, loops) if "y" in attributes)


def test_labels_without_a_mask_are_noticed() -> None:
    loop = ast.parse("for batch in loader:\n    F.cross_entropy(model(batch), batch.y[: batch.batch_size])").body[0]
    assert isinstance(loop, ast.For)
    assert batch_attributes(loop) == {"y", "batch_size"}


def check(name: str, printed: str, errors: str) -> None:
    progress = r".*: (epoch \d+/\d+ loss |\w+$)"  # also says what takes long on a busy machine
    assert [line for line in errors.splitlines() if not re.match(progress, line)] == []
    CLAIMS[name](dict(line.split(": ", 1) for line in printed.splitlines()))


@pytest.mark.parametrize("name", [name for name in CLAIMS if name != "own_loop"])
def test_example_prints_what_it_claims(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check(name, *capsys.readouterr())


def test_an_example_needs_nothing_else_and_no_modules_of_linux(tmp_path: Path) -> None:
    # Warnings are errors, except one from importing PyG.
    warnings = ["-W", "error", "-W", "ignore:`torch.jit.script` is deprecated:DeprecationWarning"]
    script = """
import runpy, sys
import torch_geometric, typer  # look at the system themselves
sys.modules.update(resource=None, fcntl=None)
runpy.run_path(sys.argv[1], run_name="__main__")
import gnnautoscale.cli
"""
    done = subprocess.run(
        [sys.executable, *warnings, "-c", script, EXAMPLES / "own_loop.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    check("own_loop", done.stdout, done.stderr)
