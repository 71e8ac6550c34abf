"""The command ``gas reproduce``: the paper's experiments, with our numbers beside the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnautoscale.cli.display import errors, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.reproduce import Store, describe_machine, load, make_report, names, run_all, write_files
from gnnautoscale.training import OPTIONS, pick_device


def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(names())}, or all.")],
    *,
    only: Annotated[
        list[str] | None, typer.Option(help="Cells such as 'gcn.cora', '*.cora' or 'gcn.cora/full'; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, in place of the configured one.")] = None,
    device: Annotated[str, typer.Option(help=OPTIONS["device"].help)] = "auto",
    jobs: Annotated[int, typer.Option(help="Number of runs at a time, each in its own process.")] = 1,
    root: Annotated[str, typer.Option(help="Folder of the published data sets.")] = "data",
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("reproduction"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run an experiment of the paper and show the results beside the published ones.

    Results are stored run by run: after an interruption, the same command does the rest. Each training run has a folder
    below `runs` with its measurements.
    """
    if jobs < 1 or (seeds is not None and seeds < 1):
        raise InputError("--jobs and --seeds must be at least 1", got=f"{jobs} and {seeds}", fix="Change them.")
    device = pick_device(device)
    store = Store(output / "runs.jsonl")
    failed = []
    for name in names() if experiment == "all" else [experiment]:
        described = load(name)
        listed = described.jobs(only=only or (), seeds=seeds, device=describe_machine(device))
        folder = output / "runs"
        failed += run_all(listed, store, root=root, device=device, processes=jobs, runs_dir=folder, show=_say)
        if not any(store.get(job) for job in listed):
            continue
        report = make_report(described, listed, store)
        files = write_files(report, output, name)
        if json:
            print_json(report.values)
        else:
            print_table(report.title, report.columns, report.rows)
            for note in report.notes:
                print(note)
        _say("written: " + ", ".join(str(file) for file in files))
    if failed:
        raise InputError(
            "all runs should succeed",
            got=f"{len(failed)} that failed: {', '.join(map(str, failed[:3]))}{' ...' if len(failed) > 3 else ''}",
            fix="See above for the reasons; the same command tries these again.",
        )


def _say(line: str) -> None:
    errors.print(line, soft_wrap=True, markup=False, highlight=False)
