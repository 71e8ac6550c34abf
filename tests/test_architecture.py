"""Which module may import which: only from those before it in the list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "gnnautoscale"
ROOT = Path(__file__).parent.parent / "src" / PACKAGE
ORDER = [
    "errors",
    "atomic",
    "result",
    "runs",
    "explain",
    "checkpoint",
    "random_state",
    "kernels",
    "partition",
    "graph",
    "history",
    "batch",
    "meter",
    "cut",
    "loader",
    "baselines",
    "transfer",
    "threaded",
    "fused",
    "record",
    "slots",
    "norms",
    "session",
    "sweep",
    "tiny",
    "rehearsal",
    "plan",
    "autoscale",
    "scalable",
    "regularize",
    "feed",
    "engine",
    "inference",
    "growth",
    "lipschitz",
    "bounds",
    "expressiveness",
    "peak_memory",
    "models",
    "generate",
    "files",
    "datasets",
    "options",
    "modes",
    "recipe",
    "diagnostics",
    "journal",
    "faults",
    "resume",
    "train",
    "trials",
    "tune",
    "bench",
    "reproduce",
    "report",
    "cli",
]
SOURCES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """The name that the list uses: a package counts as one module."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported_modules(source: str) -> set[str]:
    """The library's own modules that a source imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError("imports are absolute, so that they can be read")
            module = node.module or ""
            # "from gnnautoscale import x" names a module, or something that the package re-exports.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == PACKAGE else [module]
        found |= {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
        found |= {"__init__" for name in names if name == PACKAGE}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_from_modules_before_it(path: Path) -> None:
    module = module_of(path)
    if path == ROOT / "__init__.py":
        assert imported_modules(path.read_text()) <= set(ORDER)
        return
    assert module in ORDER or module == "__main__", f"{module} is not in the list of modules"
    allowed = {module, *ORDER[: ORDER.index(module)]} if module in ORDER else set(ORDER)
    assert imported_modules(path.read_text()) <= allowed


def test_sources_are_found() -> None:
    assert {"errors", "loader", "history", "session", "autoscale", "inference"} <= {module_of(path) for path in SOURCES}


def test_reads_every_kind_of_import() -> None:
    source = """
import gnnautoscale.loader
from gnnautoscale.history.base import History
def f():
    from gnnautoscale import plan
import torch
"""
    assert imported_modules(source) == {"loader", "history", "plan"}
    with pytest.raises(AssertionError, match="absolute"):
        imported_modules("from . import graph")


def test_importing_does_not_import_what_is_optional() -> None:
    """Extras stay optional: no module imports them at its top level."""
    optional = {"ogb", "matplotlib", "tensorboard", "pyarrow", "pandas", "torch_sparse", "torch_scatter", "pyg_lib"}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not optional & {name.split(".")[0] for name in names}, path
