"""The task that options name, and link prediction on the command line: its splits, and scores of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnautoscale._util import options_of
from gnnautoscale.cli.schema import Graphs, Links, chosen, load_dataset
from gnnautoscale.data import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.tasks import GraphPrediction, LinkPrediction, Task, task_for


def load_task(options: dict[str, Any], split: int) -> tuple[Dataset, Task]:
    """The data set and the task that the options name; edges are split to be predicted if that is the task."""
    dataset, given = load_dataset({**options, "split": split}), chosen(Links, options)
    of_graphs = chosen(Graphs, options)
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


def _graph_task(given: dict[str, Any]) -> Task:
    others = [name for name in given if name not in ("width", *options_of(Graphs))]
    if others:
        names = ", ".join(f"--{name}" for name in others)
        raise InputError(f"{names} belong to --task link", got="--task graph", fix="Leave them out.")
    return GraphPrediction(**given)


def asked_pairs(
    task: Task, out: Tensor, pairs: Path | None, partners_of: str | None, top: int, relation: int | None
) -> dict[str, Tensor]:
    """Scores of the pairs in a file, and the best partners of nodes, by the names of arrays for a file."""
    if pairs is None and partners_of is None:
        return {}
    if not isinstance(task, LinkPrediction):
        got, fix = "another task", "Add --task link."
        raise InputError("--pairs and --partners-of belong to --task link", got=got, fix=fix)
    found = {}
    if pairs is not None:
        found["pair_scores"] = task.scores(out, *_read_pairs(pairs))
    if partners_of is not None:
        try:
            nodes = [int(word) for word in partners_of.split(",")]
        except ValueError:
            fix = "Write them like 3,14."
            raise InputError("--partners-of takes numbers of nodes", got=repr(partners_of), fix=fix) from None
        each = [task.partners(out, node, top, relation=relation) for node in nodes]
        most = max(partners.numel() for partners, _ in each)
        found["partners"] = torch.full((len(nodes), most), -1)
        found["partner_scores"] = torch.full((len(nodes), most), -torch.inf)
        for row, (partners, scores) in enumerate(each):
            found["partners"][row, : partners.numel()] = partners
            found["partner_scores"][row, : scores.numel()] = scores
    return found


def _read_pairs(path: Path) -> tuple[Tensor, Tensor | None]:
    """Pairs ``[2, pairs]`` and, if there are any, their relations, from a table or an array ``[pairs, 2 or 3]``."""
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            with path.open(encoding="utf-8-sig") as file:
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
            got=f"{path} ({error})",
            fix="Write one of these; nodes are numbered from 0.",
        ) from None
    triples = torch.from_numpy(array.astype(np.int64))
    return triples[:, [0, -1]].t().contiguous(), triples[:, 1].contiguous() if triples.size(1) == 3 else None
