"""However the command ends, it says one sentence, and its code tells."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import gas_command
from gnnautoscale import cli
from gnnautoscale.cli.endings import run_to_the_end


@pytest.fixture(autouse=True)
def _warnings_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)


def ending(command: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        run_to_the_end(command)
    return ended.value.code, capfd.readouterr().err


def app(*, flush: bool) -> typer.Typer:
    made = typer.Typer()
    made.command()(lambda: print("something", flush=flush))
    return made


@pytest.mark.parametrize("flush", [False, True])
def test_a_closed_pipe_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flush: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["gas"])
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        expected = 1, "error: the output was closed before all of it was written\n"
        assert ending(app(flush=flush), capfd) == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_output_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gas"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ending(app(flush=False), capfd) == (
            2,
            "error: the output must be writable, but got no space left there. Send it elsewhere.\n",
        )


def test_an_interruption_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["gas"])
    made = typer.Typer()
    made.command()(interrupted)
    assert ending(made, capfd) == (130, "stopped\n")


def test_an_interruption_before_the_command_starts_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        gas_command.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "stopped\n")


def test_no_output_at_all_is_fine(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run_to_the_end(lambda: print(sys.stdout.isatty()))
    assert capfd.readouterr() == ("", "")


def test_an_output_of_few_letters_gets_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    run_to_the_end(lambda: print("an é"))
    assert written.getvalue() == b"an \\xe9\n"


def test_a_file_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ending(lambda: Path("none/x").read_text(), capfd) == (2, "error: none/x: No such file or directory\n")
