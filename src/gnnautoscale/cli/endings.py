"""How the command ends if something goes wrong: one sentence on the error stream, and a code that is not zero."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from gnnautoscale._util import lacks_memory
from gnnautoscale.cli.display import say
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import LostRankError, is_first_to_say

#: If this variable is set, errors that nobody expected show where they happened.
TRACEBACK = "GNNAUTOSCALE_TRACEBACK"


_CLOSED = "the output was closed before all of it was written"


def run_to_the_end(command: Callable[[], object]) -> None:
    """Run a command; whatever ends it early is said in one sentence."""
    _prepare_output()
    warnings.showwarning = _note
    if not os.environ.get(TRACEBACK):
        sys.unraisablehook = _ignored
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except SystemExit as end:
        # Ctrl-C: typer has put this in its place, unless the command has said what to do now.
        if end.__context__ is not None and isinstance(end.__context__.__cause__, KeyboardInterrupt):
            with contextlib.suppress(OSError):
                if is_first_to_say("stopped"):
                    say("stopped")
        # typer has met a closed output, and has put this in its place.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            _end(_CLOSED, 1)
        raise
    except LostRankError as error:
        say(f"error: {error}", style="bold red")
        os._exit(3)  # without the work at the end of a process, which waits for ranks that are gone
    except BrokenPipeError:
        _end(_CLOSED, 1)
    except InputError as error:
        _end(str(error), 2)
    except FloatingPointError as error:
        _end(str(error), 2)
    except OSError as error:
        _end(_in_words(error), 2)
    except Exception as error:
        if lacks_memory(error):
            reason = (str(error) or type(error).__name__).splitlines()[0]
            said = isinstance(error, MemoryError) and "memory" in reason
            _end(reason if said else f"there is not enough memory ({reason})", 2)
        if os.environ.get(TRACEBACK):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        _end(f"something unexpected went wrong ({reason}). With {TRACEBACK}=1 the command shows where.", 1)


def _prepare_output() -> None:
    """Let results be printed whatever the output is: closed before, or unable to write some letters."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _in_words(error: OSError) -> str:
    if error.errno == errno.ENOSPC and not error.filename:
        return "the output must be writable, but got no space left there. Send it elsewhere."
    reason = error.strerror or str(error)
    text = " ".join((f"{error.filename}: {reason}" if error.filename else reason).split())
    return text if len(text) < 400 else f"{text[:200]} and so on"


def _end(sentence: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the error stream may be closed, too
        if is_first_to_say(sentence):
            say(f"error: {sentence}", style="bold red")
    # What is left in the buffer cannot be written either, and the interpreter would try it again.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    """Show a warning as a line for the user, without the place in the code that it comes from."""
    with contextlib.suppress(OSError):
        if is_first_to_say(f"note: {message}"):
            say(f"note: {message}")


def _ignored(unraisable: Any) -> None:
    """Show an error that nobody can catch, such as that of a process that ends while it is put away."""
    with contextlib.suppress(OSError):
        say(f"note: {' '.join(str(unraisable.exc_value).split())[:300]}")
