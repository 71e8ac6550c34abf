"""Installs a wheel or a source distribution into a fresh environment and runs a small demo there.

The environment sees the packages of this one but not its sources, so that nothing large is installed twice: what is
tried is the distribution itself, its files and its command.

    python tests/project/try_package.py dist/gnnautoscale-0.1.0-py3-none-any.whl
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


def main() -> None:
    """Install the file that is named and run its command."""
    file = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        python = str(place / "env" / "bin" / "python")
        # After its own packages; entries for editable installs are left out, since .pth files are not read here.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PYTHONPATH"] = sysconfig.get_path("purelib")

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=place, env=variables, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(file))
        where = run(python, "-c", "import gnnautoscale; print(gnnautoscale.__file__)").strip()
        if not where.startswith(str(place)):
            raise SystemExit(f"the installed package is not the one that was imported: {where}")
        version = run(str(place / "env" / "bin" / "gas"), "--version").strip()
        table = run(str(place / "env" / "bin" / "gas"), "demo", "--nodes", "1000", "--output", "out")
        if not (place / "out" / "report.html").is_file() or table.count("\n") != 5:
            raise SystemExit(f"the demo of {file.name} did not end with a table and a report:\n{table}")
        print(f"{file.name}: {version} works")


if __name__ == "__main__":
    main()
