"""Does the jobs of an experiment that have no result yet, one after another or in several processes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from gnnautoscale._util import lacks_memory, reason_of
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.reproduce.config import Job
from gnnautoscale.experiments.reproduce.store import Result, Store
from gnnautoscale.experiments.reproduce.work import perform
from gnnautoscale.runs import free_folder
from gnnautoscale.training import describe_machine

Outcome = tuple[Result | str, float]  # a result or what went wrong, and seconds


def run_all(
    jobs: Sequence[Job],
    store: Store,
    *,
    root: str,
    device: str,
    processes: int = 1,
    runs_dir: Path | None = None,
    show: Callable[[str], None],
) -> list[Job]:
    """Do the jobs without a result, store each result at once, and ``show`` a line about each job.

    Jobs that measure times run one after another, whatever ``processes`` says. Training jobs write their run folders
    below ``runs_dir``. Returns the jobs that failed; the others are done nevertheless.
    """
    missing = list({job.key: job for job in jobs if store.get(job) is None}.values())
    if len(missing) < len(jobs):
        show(f"{len(jobs) - len(missing)} of {len(jobs)} runs have results already")
    # The longest first, so that at the end not all processes wait for one.
    missing.sort(key=_length, reverse=True)
    attempt = partial(_attempt, root=root, device=device, runs_dir=runs_dir)
    threads = None
    if processes == 1 or any(job.is_timed for job in missing):
        outcomes: Iterator[tuple[Job, Outcome]] = ((job, attempt(job)) for job in missing)
    else:
        threads = max(1, (os.cpu_count() or 1) // processes)
        outcomes = _side_by_side(missing, attempt, processes, threads)
    machine, failed = describe_machine(device, threads), []
    for number, (job, (outcome, seconds)) in enumerate(outcomes, start=1):
        if isinstance(outcome, str):
            failed.append(job)
            show(f"[{number}/{len(missing)}] {job} failed:\n{outcome}")
        else:
            store.add(job, outcome, seconds=seconds, machine=machine)
            show(f"[{number}/{len(missing)}] {job}: {_summary(outcome)}, {seconds:.1f} s")
    return failed


def _side_by_side(
    jobs: Sequence[Job], attempt: Callable[[Job], Outcome], processes: int, threads: int
) -> Iterator[tuple[Job, Outcome]]:
    # Not forked: a GPU's state does not survive that.
    spawn = get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting: dict[Future[Outcome], Job] = {pool.submit(attempt, job): job for job in jobs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _attempt(job: Job, *, root: str, device: str, runs_dir: Path | None) -> Outcome:
    start = time.perf_counter()
    try:
        given = {}
        if runs_dir is not None and job.work["kind"] == "train":
            given["run_dir"] = free_folder(runs_dir, str(job))
        result: Result | str = perform(job.work, root=root, device=device, **given)
    except InputError as error:  # such as missing data: the sentence says it all
        result = str(error)
    except Exception as error:  # whatever it is, the other jobs are still done
        result = f"not enough memory: {reason_of(error)}" if lacks_memory(error) else traceback.format_exc()
    return result, time.perf_counter() - start


def _length(job: Job) -> int:
    """A rough duration, to compare with other jobs."""
    if job.work["kind"] != "train":
        return 0
    train, options = job.work["train"], job.work["options"]
    steps = -(-train.get("num_parts", 1) // train.get("batch_size", 1))
    return int(train.get("epochs", 1) * options.get("layers", 1) * (2 + steps))


def _summary(result: Result) -> str:
    if "scores" in result:
        return f"{result['scores']['test']:.2f} on test"
    if "row" in result:
        return ", ".join(f"{name} {value:.3f} ms" for name, value in result["row"]["milliseconds"].items())
    return ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, (int, float)))
