"""The command ``gas reproduce``: the paper's experiments, with our numbers beside the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnautoscale.cli.display import errors, print_json, print_table
from gnnautoscale.errors import InputError
from gnnautoscale.experiments.reproduce import Store, describe_machine, load, make_report, names, run_all, write_report
from gnnautoscale.training import check_device


def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(names())}, or all.")],
    *,
    only: Annotated[
        list[str] | None, typer.Option(help="Cells such as 'gcn.cora', '*.cora' or 'gcn.cora/full'; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds instead of the configuration's.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Number of runs at a time, each in a process of its own.")] = 1,
    root: Annotated[str, typer.Option(help="Where the published data sets are kept.")] = "data",
    output: Annotated[Path, typer.Option(help="The folder for results.")] = Path("reproduction"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run an experiment of the paper, or what is missing of it, and show the results beside the published ones.

    Results are kept in the folder run by run: interrupt it, and the same command goes on where it stopped. Each
    training run has a folder below `runs` with what each of its epochs gave and took.
    """
    if jobs < 1 or (seeds is not None and seeds < 1):
        raise InputError("--jobs and --seeds are at least 1", got=f"{jobs} and {seeds}", fix="Change them.")
    check_device(device)
    store = Store(output / "runs.jsonl")
    failed = []
    for name in names() if experiment == "all" else [experiment]:
        described = load(name)
        runs = described.runs(only=only or (), seeds=seeds, device=describe_machine(device))
        folder = output / "runs"
        failed += run_all(runs, store, root=root, device=device, jobs=jobs, runs_dir=folder, show=_say)
        if not any(store.get(run) for run in runs):
            continue
        report = make_report(described, runs, store)
        files = write_report(report, output, name)
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
