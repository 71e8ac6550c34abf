"""The tree is the architecture: packages import only from those above them, and only what these offer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "gnnautoscale"
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / PACKAGE
# Lowest first.
ORDER = [
    *("errors", "_util", "kernels", "graph", "history", "transfer", "forward", "planner", "attach", "ranks", "replay"),
    *("exact", "data", "models", "tasks", "runs", "analysis", "training", "tuning", "report", "experiments", "cli"),
]
# They know nothing about graphs, although these lie below them.
BLIND = {"history": {"graph"}, "transfer": {"graph"}, "runs": {"graph", "history", "transfer", "forward"}}
FILES = sorted(SOURCE.rglob("*.py"))


def imports(text: str) -> list[tuple[str, str]]:
    """What a source imports of the library, anywhere in it: modules, and names out of them."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError("imports are absolute, so that they can be read")
            found += [(node.module or "", alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == PACKAGE]


def offences(package: str, text: str) -> list[str]:
    """The imports that a source of a package must not have."""
    found = []
    for module, name in imports(text):
        path = [*module.split(".")[1:], name]
        if path[0] == package:
            continue
        order = ORDER.index(path[0]) if path[0] in ORDER else len(ORDER)
        if order >= ORDER.index(package) or path[0] in BLIND.get(package, ()):
            found.append(f"{module}.{name}: {package} lies below it, or knows nothing of it")
        elif path[0] != "errors" and (len(path) > 2 or (path[0] != "_util" and name.startswith("_"))):
            found.append(f"{module}.{name}: other packages take only what {path[0]} offers in its __init__")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_what_packages_above_it_offer(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package in ("__init__", "__main__"):
        assert all(len(module.split(".")) == 2 for module, _ in imports(path.read_text()))
    else:
        assert offences(package, path.read_text()) == []


def test_offences_are_found() -> None:
    below = "from gnnautoscale.graph import HaloLoader\nfrom gnnautoscale.errors import InputError"
    assert offences("forward", below) == []
    assert offences("forward", "def f():\n    from gnnautoscale.training import fit") != []
    assert offences("forward", "from gnnautoscale.graph.loader import HaloLoader") != []
    assert offences("forward", "from gnnautoscale.graph import _secret") != []
    assert offences("forward", "import gnnautoscale.graph.loader") != []
    assert offences("forward", "from gnnautoscale import fit") != []
    assert offences("history", below) != []
    with pytest.raises(AssertionError, match="absolute"):
        offences("forward", "from . import graph")


def test_every_package_is_in_the_order_and_says_what_it_is() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages | {"errors"} == set(ORDER)
    for package in packages:
        docstring = ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text())) or ""
        assert len(docstring.split()) > 12, f"{package}/__init__.py says what it knows and what it offers"


def test_the_tests_mirror_the_packages() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - {"project"} == set(ORDER) - {"errors"}


def test_design_has_every_package() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    assert [package for package in ORDER if f"`{package}" not in design] == []


def test_importing_does_not_import_what_is_optional() -> None:
    """Extras stay optional: no module imports them at its top level."""
    optional = {"ogb", "matplotlib", "tensorboard", "pyarrow", "pandas", "torch_sparse", "torch_scatter", "pyg_lib"}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not optional & {name.split(".")[0] for name in names}, path
