"""The command ``gas reproduce``: run the paper's experiments and show our numbers beside the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnautoscale._util import no_empty_folders
from gnnautoscale.cli.display import Json, print_json, print_table, say, tell
from gnnautoscale.errors import InputError
from gnnautoscale.experiments import reproduce as paper
from gnnautoscale.training import OPTIONS, describe_machine, pick_device


def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(paper.experiment_names())}, or all.")],
    *,
    only: Annotated[
        list[str] | None, typer.Option(help="Cells such as 'gcn.cora', '*.cora' or 'gcn.cora/full'; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, instead of the configuration's.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps, instead of the configuration's; for compensation and links.")
    ] = None,
    device: Annotated[str, typer.Option(help=OPTIONS["device"].help)] = "auto",
    jobs: Annotated[int, typer.Option(help="Number of parallel processes.")] = 1,
    root: Annotated[str, typer.Option(help="Folder of the published data sets.")] = "data",
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("reproduction"),
    json: Json = False,
) -> None:
    """Run an experiment, of the paper or about it, and show its results, beside the published ones where there are any.

    Finished runs are kept in the output folder, so after an interruption the same command continues. Each training run
    has a folder below `runs` with the measurements of its epochs.
    """
    counts = {"--jobs": jobs, "--seeds": seeds, "--steps": steps}
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{flag} must be at least 1", got=str(count), fix="Increase it.")
    device = pick_device(device)
    machine = describe_machine(device)
    names = paper.experiment_names() if experiment == "all" else [experiment]
    experiments = [paper.load_experiment(name) for name in names]
    planned = [each.jobs(only=only or (), seeds=seeds, steps=steps, device=machine) for each in experiments]
    with no_empty_folders(output):
        store = paper.Store(output / "runs.jsonl")
        failed = []
        for name, described, listed in zip(names, experiments, planned, strict=True):
            folder = output / "runs"
            failed += paper.run_all(listed, store, root=root, device=device, processes=jobs, runs_dir=folder, show=say)
            if not any(store.get(job) for job in listed):
                continue
            report = paper.make_report(described, listed, store)
            files = paper.write_files(report, output, name)
            if json:
                print_json(report.values)
            else:
                print_table(report.title, report.columns, report.rows)
                tell("\n".join(report.notes))
            say("written: " + ", ".join(map(str, files)))
    if failed:
        raise InputError(
            "all runs should succeed",
            got=f"{len(failed)} that failed: {', '.join(map(str, failed[:3]))}{' ...' if len(failed) > 3 else ''}",
            fix="See the reasons above; the same command tries these runs again.",
        )
