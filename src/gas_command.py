"""Where the command ``gas`` starts. It lies outside the package, since importing that takes seconds.

Ctrl-C in these seconds ends with a word instead of a traceback, as it does later.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Import the command line and run it."""
    try:
        from gnnautoscale.cli import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
