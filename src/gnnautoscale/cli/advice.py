"""The commands that advise: ``gas tune`` before training, ``gas explain`` after it."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnautoscale.cli.display import Json, print_json, print_table, say, tell
from gnnautoscale.cli.links import load_task
from gnnautoscale.cli.schema import DATA, MODEL, TASK, chosen
from gnnautoscale.errors import InputError
from gnnautoscale.models import check_model_options
from gnnautoscale.runs import explain as find
from gnnautoscale.runs import read_run
from gnnautoscale.training import OPTIONS
from gnnautoscale.tuning import PASSED, Advice, Candidate, amount
from gnnautoscale.tuning import tune as propose

#: Options of ``gas tune``: those of ``gas train`` that it does not propose.
TUNE = [*DATA, *TASK, *MODEL, *(OPTIONS[name] for name in PASSED)]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)}


def tune(
    options: dict[str, Any],
    *,
    memory: Annotated[
        str | None, typer.Option(help="Memory to train in, like 8GB; by default all that is free.")
    ] = None,
    json: Json = False,
) -> None:
    """Propose from short trials how to train on a graph on this machine, and print the command for it."""
    built = chosen(MODEL, options)
    name = built.pop("model")
    check_model_options(name, [])
    budget = None if memory is None else parse_memory(memory)
    training = {name: options[name] for name in PASSED}
    dataset, task = load_task(options, options["split"])
    advice = propose(name, dataset, task=task, memory=budget, model_options=built, **training)
    command = train_command(options, advice.options)
    if json:
        print_json({**advice.to_dict(), "command": command})
        return
    _show(advice, f"{options['data']} · {options['model']}")
    print(command)


def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as `gas train` wrote it.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Say what limits a training run, and what to change."""
    record = read_run(run)
    findings = find(record)
    if json:
        print_json({"run": str(run), "findings": [finding.to_dict() for finding in findings]})
        return
    for number, finding in enumerate(findings, start=1):
        tell(f"{number}. {finding.sentence} {finding.consequence} {finding.change}")
    if not findings:
        tell("Nothing stands out.")
    if not record.staleness:
        say("note: this run did not measure staleness")


def train_command(given: dict[str, Any], proposed: dict[str, Any]) -> str:
    """The command line that trains with given values of the options in ``TUNE``, and with the proposed options."""
    changed = {option.name: given[option.name] for option in TUNE if given[option.name] != option.default}
    return shlex.join(["gas", "train", *(word for item in {**changed, **proposed}.items() for word in _flag(*item))])


def _flag(name: str, value: Any) -> list[str]:
    """An option as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def parse_memory(text: str) -> int:
    """The number of bytes in a text, such as ``8GB``, ``1.5 GiB`` or ``1000``."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    if found is not None:
        with suppress(ValueError, KeyError):
            return int(float(found[1]) * _UNITS[found[2].upper()])
    raise InputError("--memory must be a number of bytes, KB, MB, GB or TB", got=repr(text), fix="Write it like 8GB.")


def _show(advice: Advice, title: str) -> None:
    columns = {
        "parts": ["full batch" if each.num_parts == 1 else str(each.num_parts) for each in advice.candidates],
        "halo per node": [f"{each.connectivity:.2f}" for each in advice.candidates],
        "largest batch": [f"{each.rows:,}" for each in advice.candidates],
        "histories": [_histories(each) for each in advice.candidates],
        "batches kept": ["yes" if each.keep else "no" for each in advice.candidates],
        "memory": [amount(each.memory) for each in advice.candidates],
        "ms per step": [_told(f"{1000 * each.step_seconds:.1f}", each) for each in advice.candidates],
        "ms per epoch": [_told(f"{1000 * each.epoch_seconds:.0f}", each) for each in advice.candidates],
        "verdict": [_verdict(each, advice.chosen) for each in advice.candidates],
    }
    if all(each.keep for each in advice.candidates):
        del columns["batches kept"]
    print_table(f"{title} in {amount(advice.budget)}", list(columns), list(zip(*columns.values(), strict=True)))
    if not all(each.measured for each in advice.candidates):
        say("~: estimated from what was measured")
    for name, value in advice.options.items():
        tell(f"{' '.join(_flag(name, value))}: {advice.reasons[name]}.")


def _histories(candidate: Candidate) -> str:
    if candidate.num_parts == 1:
        return "-"
    same = candidate.history_dtype == "same"
    return candidate.storage if same else f"{candidate.storage}, {candidate.history_dtype}"


def _told(text: str, candidate: Candidate) -> str:
    return text if candidate.measured else f"~{text}"


def _verdict(candidate: Candidate, best: Candidate) -> str:
    if candidate.num_parts == best.num_parts:
        return "proposed"
    if not candidate.fits:
        return "does not fit"
    return f"slower than {candidate.slower_than}" if candidate.slower_than else ""
