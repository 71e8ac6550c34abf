"""Does the runs of an experiment that have no result yet, one after another or in several processes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from gnnautoscale.errors import InputError
from gnnautoscale.experiments.reproduce.config import Run
from gnnautoscale.experiments.reproduce.store import Result, Store
from gnnautoscale.experiments.reproduce.work import perform
from gnnautoscale.runs import free_folder
from gnnautoscale.training import describe_machine

Outcome = tuple[Run, Result | str, float]


def run_all(
    runs: Sequence[Run],
    store: Store,
    *,
    root: str,
    device: str,
    jobs: int = 1,
    runs_dir: Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Run]:
    """Do what has no result yet; results are kept as they come.

    Args:
        runs: The runs of an experiment.
        store: Where results are kept.
        root: Where data sets are kept.
        device: Where to compute.
        jobs: Number of processes at a time. Runs that measure times are done one after the other all the same.
        runs_dir: Where each training run has a folder for what is measured in it; by default nothing is.
        show: Called with a line about each run.

    Returns:
        The runs that failed. They do not keep others from being done.
    """
    missing = list({run.key: run for run in runs if store.get(run) is None}.values())
    if len(missing) < len(runs):
        show(f"{len(runs) - len(missing)} of {len(runs)} runs have results already")
    # The longest first, so that at the end not all processes wait for one.
    missing.sort(key=_length, reverse=True)
    failed: list[Run] = []
    if jobs == 1 or any(run.is_timed for run in missing):
        machine, outcomes = describe_machine(device), _in_turn(missing, root, device, runs_dir)
    else:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        machine = describe_machine(device, threads)
        outcomes = _side_by_side(missing, root, device, runs_dir, jobs, threads)
    for number, (run, outcome, seconds) in enumerate(outcomes, start=1):
        if isinstance(outcome, str):
            failed.append(run)
            show(f"[{number}/{len(missing)}] {run} failed:\n{outcome}")
        else:
            store.add(run, outcome, seconds=seconds, machine=machine)
            show(f"[{number}/{len(missing)}] {run}: {_summary(outcome)}, {seconds:.1f} s")
    return failed


def _in_turn(runs: Sequence[Run], root: str, device: str, runs_dir: Path | None) -> Iterator[Outcome]:
    for run in runs:
        yield run, *_attempt(run, root, device, runs_dir)


def _side_by_side(
    runs: Sequence[Run], root: str, device: str, runs_dir: Path | None, jobs: int, threads: int
) -> Iterator[Outcome]:
    # Not forked: a GPU's state does not survive that.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,))
    with pool:
        waiting: dict[Future[tuple[Result | str, float]], Run] = {
            pool.submit(_attempt, run, root, device, runs_dir): run for run in runs
        }
        try:
            for future in as_completed(waiting):
                yield waiting[future], *future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _attempt(run: Run, root: str, device: str, runs_dir: Path | None) -> tuple[Result | str, float]:
    start = time.perf_counter()
    try:
        given = {}
        if runs_dir is not None and run.work["kind"] == "train":
            given["run_dir"] = free_folder(runs_dir, str(run))
        result: Result | str = perform(run.work, root=root, device=device, **given)
    except InputError as error:  # such as data that is not there: the sentence says it all
        result = str(error)
    except Exception:  # whatever it is, the other runs go on
        result = traceback.format_exc()
    return result, time.perf_counter() - start


def _length(run: Run) -> int:
    """About how long a run takes, compared with others."""
    if run.work["kind"] != "train":
        return 0
    train, options = run.work["train"], run.work["options"]
    steps = -(-train.get("num_parts", 1) // train.get("batch_size", 1))
    return int(train.get("epochs", 1) * options.get("layers", 1) * (2 + steps))


def _summary(result: Result) -> str:
    if "scores" in result:
        return f"{result['scores']['test']:.2f} on test"
    if "row" in result:
        return ", ".join(f"{name} {value:.3f} ms" for name, value in result["row"]["milliseconds"].items())
    return ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, (int, float)))
