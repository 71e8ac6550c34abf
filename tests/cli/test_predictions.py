"""Files of predictions: endings, ids, names of classes, probabilities; graphs without a split."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnautoscale.cli.predictions import check_ending, write_predictions
from gnnautoscale.cli.schema import INFER, with_saved
from gnnautoscale.data import Names
from gnnautoscale.errors import InputError
from support.command import invoke

LOGITS = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
PREDICTED = {"classes": LOGITS.argmax(1), "probabilities": LOGITS.softmax(1), "logits": LOGITS}
NAMES = Names(np.array(["ann", "bob", "cyd"]), ("cat", "dog"))
NO_NAMES = Names()


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    parquet = pytest.importorskip("pyarrow.parquet")
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_has_ids_classes_by_name_and_probabilities(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"out{ending}"
    said = write_predictions(file, PREDICTED, {}, NAMES)
    assert said == f"{file}: 3 rows of id, class, probability, probability_cat, probability_dog"
    found = rows(file)
    assert [(row["id"], row["class"]) for row in found] == [("ann", "dog"), ("bob", "cat"), ("cyd", "dog")]
    expected = LOGITS.softmax(1)
    got = [[float(row["probability_cat"]), float(row["probability_dog"])] for row in found]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose([float(row["probability"]) for row in found], expected.max(1).values, rtol=1e-6)


def test_an_archive_says_which_are_logits(tmp_path: Path) -> None:
    said = write_predictions(tmp_path / "out.npz", PREDICTED, {}, NAMES)
    found = np.load(tmp_path / "out.npz")
    assert set(found) == {"id", "classes", "class_names", "probabilities", "logits"}
    assert found["classes"].tolist() == ["dog", "cat", "dog"]
    assert "logits [3, 2]" in said


@pytest.mark.parametrize(
    ("predicted", "heads"),
    [
        ({"values": torch.ones(2, 1)}, ["id", "value_0"]),
        ({"classes": torch.ones(2).bool(), "probabilities": torch.ones(2)}, ["id", "class", "probability"]),
        (
            {"classes": torch.ones(2, 2).bool(), "probabilities": torch.ones(2, 2)},
            ["id", "label_0", "label_1", "probability_0", "probability_1"],
        ),
        ({"embeddings": torch.ones(2, 2)}, ["id", "embedding_0", "embedding_1"]),
    ],
)
def test_other_tasks_have_tables_of_their_own(
    tmp_path: Path, predicted: dict[str, torch.Tensor], heads: list[str]
) -> None:
    write_predictions(tmp_path / "out.csv", predicted, {}, NO_NAMES)
    found = rows(tmp_path / "out.csv")
    assert list(found[0]) == heads
    assert [row["id"] for row in found] == ["0", "1"]


def test_answers_about_links_are_tables(tmp_path: Path) -> None:
    asked = {"pairs": torch.tensor([[3, 4]]), "pair_scores": torch.tensor([0.5])}
    write_predictions(tmp_path / "out.csv", {"embeddings": torch.ones(2, 2)}, asked, NO_NAMES)
    assert rows(tmp_path / "out.csv") == [{"source": "3", "target": "4", "score": "0.5"}]
    partners = {"nodes": torch.tensor([7, 8]), "partners": torch.tensor([[1, 2], [3, -1]])}
    partners["partner_scores"] = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    write_predictions(tmp_path / "out.csv", {"embeddings": torch.ones(2, 2)}, partners, NO_NAMES)
    found = [tuple(row.values()) for row in rows(tmp_path / "out.csv")]
    assert found == [("7", "1", "1", "0.5"), ("7", "2", "2", "0.25"), ("8", "1", "3", "1.0")]
    with pytest.raises(InputError, match="a table answers --pairs or --partners-of"):
        write_predictions(tmp_path / "out.csv", {}, {**asked, **partners}, NO_NAMES)


def test_other_endings_are_refused() -> None:
    for name in ("out", "out.txt", "out.npz.zip"):
        with pytest.raises(InputError, match=r"--output ends in \.csv, \.parquet, \.npz"):
            check_ending(Path(name))


def test_tables_with_words_go_in_and_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    people = [f"p{number}" for number in range(30)]
    body = "".join(f"{name},{number % 7},{'dog' if number % 2 else 'cat'}\n" for number, name in enumerate(people))
    Path("nodes.csv").write_text("id,a,label\n" + body)
    Path("edges.csv").write_text("src,dst\n" + "".join(f"p{i},p{(i + 2) % 30}\n" for i in range(30)))
    data = ["--data", "nodes.csv", "--edges", "edges.csv", "--undirected"]
    flags = ["--epochs", "1", "--num-parts", "2", "--hidden", "4", "--run-dir", "none", "--save", "model.pt"]
    result = invoke(["train", *data, "--split-ratio", "0.8,0.1,0.1", *flags], catch_exceptions=False)
    assert result.exit_code == 0
    drawn = "nodes.csv has no split: 24 nodes were drawn for training, 3 for validation and 3 for tests"
    assert drawn in result.stderr.replace("\n", " ")
    inferred = ["infer", "model.pt", *data, "--split-ratio", "0.8,.1,.1", "--output", "out.csv"]
    result = invoke(inferred, catch_exceptions=False)
    assert result.exit_code == 0
    found = rows(tmp_path / "out.csv")
    assert [row["id"] for row in found] == people
    assert {row["class"] for row in found} <= {"cat", "dog"}


@pytest.mark.parametrize(
    ("saved", "given", "split", "flags"),
    [
        ({"split": 1, "split_ratio": (50.0, 25.0, 25.0)}, None, 1, ["--split 1", "--split-ratio 50,25,25"]),
        ({"split": 1}, 1, 1, []),
        ({"split": 0}, None, 0, []),
        ({}, None, 0, []),
    ],
)
def test_predictions_are_scored_on_the_split_of_training(
    saved: dict[str, Any], given: int | None, split: int, flags: list[str]
) -> None:
    options = {**{each.name: each.default for each in INFER}, "data": "graph.npz", "split": given}
    found, added = with_saved(options, saved, Path("model.pt"))
    assert (found["split"], added) == (split, flags)
    if given is not None:
        with pytest.raises(InputError, match="trained with --split 1, but got --split 2"):
            with_saved({**options, "split": 2}, saved, Path("model.pt"))
