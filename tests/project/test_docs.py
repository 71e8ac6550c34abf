"""The README and the pages of docs/: their Python runs and learns from training labels only, their commands and links
exist, and the site needs no network.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data  # type: ignore[import-untyped]
from typer.main import get_command

import gnnautoscale as gas
from gnnautoscale.cli import app
from gnnautoscale.data import generate
from gnnautoscale.data.generate import communities

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NUM_CLASSES = {"README.md": 7, "docs/tune.md": 7}  # others have 4
# What a page takes as given besides `gas`, `torch`, `F` and the reader's graph `data`.
GIVEN = {
    "README.md": "nodes = torch.tensor([0, 7])",
    "docs/hetero.md": """
from torch_geometric.data import HeteroData
hetero = HeteroData()
hetero["author"].x, hetero["paper"].x = torch.randn(60, 8), data.x[:100]
hetero["paper"].y, hetero["paper"].train_mask = data.y[:100], data.train_mask[:100]
hetero["paper"].val_mask = hetero["paper"].test_mask = ~data.train_mask[:100]
writes = torch.unique(torch.stack([torch.randint(60, (200,)), torch.randint(100, (200,))]), dim=1)
hetero["author", "writes", "paper"].edge_index, hetero["paper", "by", "author"].edge_index = writes, writes.flip(0)
hetero["paper", "cites", "paper"].edge_index = torch.randint(100, (2, 300))
""",
    "docs/report.md": """
from gnnautoscale.models import GCN
for mode in ("gas", "full"):
    gas.fit(GCN(data.num_features, 4, hidden=8), data, mode=mode, num_parts=4, epochs=2, run_dir=f"runs/{mode}")
""",
    "docs/storage.md": """
from torch_geometric.nn import GCN
loader = gas.HaloLoader(data, num_parts=4)
model = gas.autoscale(GCN(data.num_features, 16, num_layers=2, out_channels=4), data)
gas.refresh(model, loader)
grown_data = data.clone()
grown_data.edge_index = torch.cat([data.edge_index, torch.tensor([[0, 1], [1, 0]])], dim=1)
""",
    "docs/tune.md": "from gnnautoscale.models import GCN as MyGNN",
}

_FENCE = re.compile(r"^( *)```+ *(\S*)([^\n]*)\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
# A file of the project, named in a page.
_PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.-]+)`")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(page[: match.start()].count("\n") + 1, match[2], match[3].strip(), match[4])
        for match in _FENCE.finditer(page)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(block: Block, page: Path, names: dict[str, Any]) -> None:
    """Run a block, as a script or as a session with `>>>`, and fail with its place in the page."""
    if block.text.lstrip().startswith(">>>"):
        session = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line)
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        wrong: list[str] = []
        runner.run(session, out=wrong.append, clear_globs=False)
        names.update(session.globs)
        assert not wrong, "".join(wrong)
        return
    try:
        # Empty lines first, so that a traceback shows the line of the page; and what runs for 3 epochs runs for more.
        text = "\n" * block.line + re.sub(r"\bepochs=\d\d+", "epochs=3", block.text)
        exec(compile(text, str(page), "exec"), names)  # noqa: S102
    except Exception:
        pytest.fail(f"a block of {name_of(page)} fails:\n{traceback.format_exc()}")


def few_labels(*sizes: Any, num_classes: int = 4, **options: Any) -> Data:
    """A graph as ``communities`` makes it, with the lower classes on a few training nodes and the upper on all others.

    A loss over a higher class than half of ``num_classes`` has seen a label that is not for training, and some batches
    have no training node.
    """
    data = communities(*sizes, num_classes=num_classes, **options)
    few = torch.zeros(data.num_nodes, dtype=torch.bool)
    few[data.train_mask.nonzero()[:4]] = True
    half = num_classes // 2
    data.train_mask, data.y = few, torch.where(few, data.y % half, half + data.y % (num_classes - half))
    return data


@pytest.fixture
def only_training_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a training loop that learns from other labels, or from a batch without any."""
    cross_entropy = F.cross_entropy

    def checked(out: Tensor, y: Tensor, **options: Any) -> Tensor:
        assert y.numel(), "the loss of a batch without training nodes"
        assert int(y.max()) < out.size(1) // 2, "the loss includes nodes outside the train mask"
        return cross_entropy(out, y, **options)

    monkeypatch.setattr(F, "cross_entropy", checked)
    monkeypatch.setattr(generate, "communities", few_labels)


@pytest.mark.usefixtures("only_training_labels")
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=name_of)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = few_labels(200, degree=6, num_features=16, num_classes=NUM_CLASSES.get(name_of(page), 4))
    names: dict[str, Any] = {"__name__": "__main__", "gas": gas, "torch": torch, "F": F, "data": data}
    exec(GIVEN.get(name_of(page), ""), names)  # noqa: S102
    for block in blocks(page.read_text()):
        if block.language == "python":
            run(block, page, names)


@pytest.mark.usefixtures("only_training_labels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("out[mask], batch.y[: batch.batch_size][mask]", "out, batch.y[: batch.batch_size]"),
            "outside the train mask",
        ),
        (("if not mask.any():", "if False:"), "without training nodes"),
    ],
)
def test_a_loop_that_learns_from_other_labels_is_noticed(change: tuple[str, str], message: str) -> None:
    page = ROOT / "README.md"
    loop = next(block for block in blocks(page.read_text()) if "for batch in loader" in block.text)
    names = {"data": few_labels(200, degree=6, num_features=16, num_classes=7), "nodes": torch.tensor([0])}
    assert change[0] in loop.text
    with pytest.raises(pytest.fail.Exception, match=message):
        run(loop._replace(text=loop.text.replace(*change)), page, names)


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    with pytest.raises(pytest.fail.Exception, match="line 9"):
        run(Block(7, "python", "", "a = 1\nb = missing\n"), page, {})
    with pytest.raises(AssertionError, match="Expected"):
        run(Block(7, "python", "", ">>> 1 + 1\n3\n"), page, {})
    names: dict[str, Any] = {}
    run(Block(1, "python", "", ">>> a = 1 + 1\n>>> a\n2\n"), page, names)
    assert names["a"] == 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_that_does_not_run_says_so(page: Path) -> None:
    """```py has a title that says what it needs; ```{.py} shows an example, which is run elsewhere."""
    for block in blocks(page.read_text()):
        place = f"line {block.line}"
        assert block.language in ("python", "py", "{.py}", "sh", "text", "json", "toml", ""), place
        if block.language == "py":
            assert "needs" in block.title, place
        elif block.language == "{.py}":
            assert re.fullmatch(r'\s*--8<-- "examples/\w+\.py"\s*', block.text), place
        elif block.language != "python":
            assert not re.search(r"^\s*(import|from) \w+", block.text, re.MULTILINE), place


def test_all_examples_are_shown() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for script in (ROOT / "examples").glob("*.py"):
        assert f'--8<-- "examples/{script.name}"' in page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language not in ("sh", ""):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = line.split(" #")[0].split()
            if words[:1] == ["gas"]:
                check_command(words[1:])


def check_command(words: list[str]) -> None:
    """Refuse a subcommand or an option that the command line does not have."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word for word in words if word.startswith("--")} - known
    assert not unknown, f"no options {unknown}"


def test_wrong_commands_are_noticed() -> None:
    check_command(["train", "--data", "cora"])
    check_command(["bench", "step", "--plot", "step.svg"])
    with pytest.raises(AssertionError, match="no command tarin"):
        check_command(["tarin"])
    with pytest.raises(AssertionError, match=r"no options .*--epoch"):
        check_command(["train", "--epoch", "3"])


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links to files that are not there, and to headings that these do not have."""
    broken = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # Anchors of the reference and the switch between light and dark figures are the site's own.
        own = anchor.startswith(("gnnautoscale.", "only-"))
        if not target.is_file() or (anchor and not own and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_and_named_files_exist(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []
    for path in _PATH.findall(page.read_text().replace("/NAME.toml", "")):  # stands for any of them
        assert (ROOT / path).exists(), path


def test_broken_links_are_noticed() -> None:
    text = "[a](docs/gpu.md) [b](docs/gone.md) [c](docs/gpu.md#shortcuts) [d](docs/gpu.md#gone) [e](#x)\n# X\n"
    assert broken_links(ROOT / "README.md", text) == ["docs/gone.md", "docs/gpu.md#gone", "#x"]


def test_reference_has_all_public_names() -> None:
    page = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert sorted(re.findall(r"^::: gnnautoscale\.(\w+)$", page, re.MULTILINE)) == sorted(gas.__all__)


# The site ############################################################################################################

# What a browser fetches by itself when it shows a page.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|object|embed)\b[^>]*\b(?:src|data)=[\"']?(?:https?:)?//[^>]*>"
)
_LINKED = re.compile(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>")
_STYLED = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]*")


def fetched_from_elsewhere(text: str) -> list[str]:
    """Scripts, styles, fonts and pictures that would be loaded from another server."""
    return [match[0] for pattern in (_FETCHED, _LINKED, _STYLED) for match in pattern.finditer(text)]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    options = ["--strict", "--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", *options], cwd=ROOT, capture_output=True, text=True)


def test_strict_builds_notice_broken_links(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[a](gone.md) [b](#gone) [c](../outside.md)\n")
    config = tmp_path / "mkdocs.yml"
    # The project's settings, for a site of one page.
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: docs\nnav: [index.md]\nplugins: [search]\n")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert all(link in done.stderr for link in ("gone.md", "#gone", "outside.md"))


def test_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    assert "doc-symbol-module" not in reference, "a module is shown in place of a function of the same name"
    files = [path for path in (tmp_path / "site").rglob("*") if path.suffix in (".html", ".css")]
    assert {"index.html", "how.html", "theory.html"} <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        assert fetched_from_elsewhere(text) == [], path
        assert 'class="mermaid"' not in text, "diagrams like this load a script"
        # Markup of docstrings that the site did not understand.
        assert not re.search(r":(math|class|func|meth|mod):<|\.\. math::", text), path


def test_what_is_fetched_is_noticed() -> None:
    assert fetched_from_elsewhere('<a href="https://a.b">x</a><link rel="canonical" href="https://a.b">') == []
    for text in (
        '<script src="https://a.b/c.js">',
        '<link rel="stylesheet" href="//a.b/c.css">',
        "@import 'https://a.b/c.css'",
        "src: url(https://a.b/c.woff2)",
    ):
        assert len(fetched_from_elsewhere(text)) == 1


# Figures #############################################################################################################


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_figures_show_what_the_text_says() -> None:
    figures = load_script("figures")
    drawn = {f"{name}-{theme}.svg" for name in figures.FIGURES for theme in figures.THEMES}
    assert {path.name for path in (ROOT / "docs" / "figures").glob("*-*.svg")} == drawn
    for layers, errors in figures.sweep_errors(most_layers=3, sweeps=4).items():
        assert [error < 1e-6 for error in errors] == [sweep >= layers for sweep in range(1, 5)]
    sizes = figures.halo_sizes([4, 16])
    for (_, metis), (_, drawn_at_random) in zip(sizes["METIS"], sizes["random"], strict=True):
        assert metis < drawn_at_random


def test_formulas_and_roles_of_docstrings() -> None:
    script = load_script("docstrings")
    assert doctest.testmod(script).failed == 0
    to_markdown = script.to_markdown
    assert to_markdown("See :class:`~gnnautoscale.HaloLoader`.") == "See `gnnautoscale.HaloLoader`."
    assert to_markdown("Example:\n    >>> 1") == "Examples:\n    >>> 1"
    block = to_markdown("A cut\n\n.. math::\n    a + \\\\\n    b,\n\nwhere :math:`a` is small.")
    assert block.startswith("A cut\n\n<p><math")
    assert block.count("<math") == 2
    assert ".. math::" not in block
