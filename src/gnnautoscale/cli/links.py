"""The task that options name, and link prediction on the command line: its splits, and scores of pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnautoscale._util import options_of, ordinary, reason_of
from gnnautoscale.cli.schema import Files, Graphs, Links, chosen, file_of, load_dataset, made_from
from gnnautoscale.data import Dataset, TypedLinks, is_typed_file, read_typed_graph
from gnnautoscale.errors import InputError
from gnnautoscale.tasks import GraphPrediction, LinkPrediction, Task, task_for


def load_task(options: dict[str, Any], split: int) -> tuple[Dataset, Task]:
    """The data set and the task that the options name; edges are split to be predicted if that is the task."""
    dataset, task = _loaded(options, split)
    return replace(dataset, made_from=made_from(options, split)), task


def _loaded(options: dict[str, Any], split: int) -> tuple[Dataset, Task]:
    given, of_graphs = chosen(Links, options), chosen(Graphs, options)
    file = file_of(options)
    if options["task"] == "link" and not of_graphs and file is not None and is_typed_file(file):
        return _typed_links(file, options, split, 0.0 if given.get("reconstruct") else 0.3), LinkPrediction(**given)
    dataset = load_dataset({**options, "split": split})
    if options["task"] == "graph" or (options["task"] is None and "graph_y" in dataset.train):
        return dataset, _graph_task({**given, **of_graphs})
    if of_graphs:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in of_graphs)
        raise InputError(f"{names} belong to --task graph", got=f"--task {options['task']}", fix="Leave them out.")
    if options["task"] == "link":
        disjoint, typed = 0.0 if given.get("reconstruct") else 0.3, given.get("decoder") == "distmult"
        return dataset.split_links(split, disjoint=disjoint, typed=typed), LinkPrediction(**given)
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise InputError(f"{names} belong to --task link", got=f"--task {options['task']}", fix="Leave them out.")
    return dataset, task_for(dataset, options["task"])


def _typed_links(file: Path, options: dict[str, Any], split: int, disjoint: float) -> TypedLinks:
    """Links of the type that ``--target`` names, like ``author,writes,paper`` or ``writes``."""
    of_file = chosen(Files, options)
    target: str | None = of_file.pop("target", None)
    words = target.split(",") if target is not None else []
    if len(words) not in (0, 1, 3):
        rule = "--target of links names a type of edges: source, relation and target, or the relation alone"
        raise InputError(rule, got=repr(target), fix="Write it like author,writes,paper.")
    if others := of_file.keys() - {"undirected", "max_features"}:
        fix = "Leave them out; see the documentation of gnnautoscale.data.read_typed_graph."
        raise InputError("a heterogeneous graph comes in one file or folder", got=", ".join(sorted(others)), fix=fix)
    relation: Any = tuple(word.strip() for word in words) if len(words) == 3 else target
    return TypedLinks.split(read_typed_graph(file, **of_file), relation, split, disjoint=disjoint, name=file.stem)


def _graph_task(given: dict[str, Any]) -> Task:
    others = [name for name in given if name not in ("width", *options_of(Graphs))]
    if others:
        names = ", ".join(f"--{name}" for name in others)
        raise InputError(f"{names} belong to --task link", got="--task graph", fix="Leave them out.")
    return GraphPrediction(**given)


def asked_pairs(
    dataset: Dataset,
    task: Task,
    out: Tensor,
    pairs: Path | None,
    partners_of: str | None,
    top: int,
    relation: int | None,
) -> dict[str, Tensor]:
    """Scores of the pairs in a file, and the best partners of nodes, by the names of arrays for a file."""
    if pairs is None and partners_of is None:
        return {}
    if not isinstance(task, LinkPrediction):
        got, fix = "another task", "Add --task link."
        raise InputError("--pairs and --partners-of belong to --task link", got=got, fix=fix)
    found = {}
    # Nodes of a heterogeneous graph are numbered within their types, for a task type after type.
    source, target = _ranges(dataset, out)
    if pairs is not None:
        ends, relations = _read_pairs(pairs)
        found["pairs"] = ends.t()
        ends = torch.stack([_joined(ends[0], source, "source"), _joined(ends[1], target, "target")])
        found["pair_scores"] = task.scores(out, ends, relations)
    if partners_of is not None:
        try:
            nodes = [int(word) for word in partners_of.split(",")]
        except ValueError:
            fix = "Write them like 3,14."
            raise InputError("--partners-of takes numbers of nodes", got=repr(partners_of), fix=fix) from None
        rows = _joined(torch.tensor(nodes), source, "--partners-of").tolist()
        each = [task.partners(out, node, top, relation=relation) for node in rows]
        most = max(partners.numel() for partners, _ in each)
        found["nodes"] = torch.tensor(nodes)
        found["partners"] = torch.full((len(nodes), most), -1)
        found["partner_scores"] = torch.full((len(nodes), most), -torch.inf)
        for row, (partners, scores) in enumerate(each):
            found["partners"][row, : partners.numel()] = partners - target[0]
            found["partner_scores"][row, : scores.numel()] = scores
    return found


def _ranges(dataset: Dataset, out: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and the last row, exclusive, of nodes that can be sources, and targets."""
    if not isinstance(dataset, TypedLinks):
        return (0, out.size(0)), (0, out.size(0))
    source, target = dataset.train.between
    return source, target


def _joined(nodes: Tensor, among: tuple[int, int], what: str) -> Tensor:
    """The rows of nodes that are numbered within their type."""
    first, last = among
    if nodes.numel() and not (int(nodes.min()) >= 0 and int(nodes.max()) < last - first):
        got, fix = f"{int(nodes.min())} to {int(nodes.max())}", "Check the numbering; each type of nodes starts at 0."
        raise InputError(f"{what} must be nodes from 0 to {last - first - 1}", got=got, fix=fix)
    return nodes + first


def _read_pairs(path: Path) -> tuple[Tensor, Tensor | None]:
    """Pairs ``[2, pairs]`` and, if there are any, their relations, from a table or an array ``[pairs, 2 or 3]``."""
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(ordinary(path), allow_pickle=False)
        else:
            with ordinary(path).open(encoding="utf-8-sig") as file:
                names = file.readline().strip().split(",")
                wanted = ("source", "relation", "target") if "relation" in names else ("source", "target")
                columns = [names.index(name) for name in wanted]
                array = np.loadtxt(file, dtype=np.int64, delimiter=",", usecols=columns, ndmin=2)
        if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iu":
            raise ValueError(f"{array.dtype} {list(array.shape)}")
    except (OSError, ValueError) as error:
        raise InputError(
            "--pairs needs a .csv file with source and target, and relation if edges are typed, or a .npy file of "
            "integers, [pairs, 2] or [pairs, 3] (source, relation, target)",
            got=f"{path} ({reason_of(error)})",
            fix="Write one of these; nodes are numbered from 0.",
        ) from None
    triples = torch.from_numpy(array.astype(np.int64))
    return triples[:, [0, -1]].t().contiguous(), triples[:, 1].contiguous() if triples.size(1) == 3 else None
