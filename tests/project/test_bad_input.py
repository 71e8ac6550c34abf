"""Bad values at every option, argument and file: a named error or the right result, never anything else."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import pydoc
import random
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import click
import numpy as np
import pytest
import torch
import typer
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]
from torch_geometric.nn import GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale import cli
from gnnautoscale._util import Option
from gnnautoscale.cli.saved import read_model
from gnnautoscale.cli.schema import TRAIN, resolve
from gnnautoscale.data import open_file
from gnnautoscale.graph import partition
from gnnautoscale.report import write_report
from gnnautoscale.runs import explain, read_run
from support.command import invoke

NODES = 24
#: What the library and the command say.
NAMED = (gas.InputError, FloatingPointError, MemoryError)
VALUES: list[Any] = [
    None, "", "no", 1.5, -1, 0, 2**70, math.nan, math.inf, True, [], [1], {}, object(), b"x", np.int64(2),
    np.float32(0.5), np.array([1, 2]), torch.tensor(2), torch.ones(2), lambda: 0, 3j, "\0", "x" * 5000,
]  # fmt: skip
WORDS = ["", "x", "-1", "1.5", "nan", "inf", str(2**70), "x" * 5000, "/nonexistent/x", ".", "1,x", "meta", "None"]


def graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    edges, number = torch.randint(0, NODES, (2, 60), generator=draw), torch.arange(NODES)
    masks = {f"{split}_mask": number % 3 == place for place, split in enumerate(("train", "val", "test"))}
    x = torch.randn(NODES, 5, generator=draw)
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=number % 3, **masks)


def model() -> GCN:
    return GCN(5, 4, num_layers=2, out_channels=3)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def named_or_done(run: Callable[[], Any]) -> list[Any]:
    """What something returns, in a list, which is empty after a named error; any other error is passed on."""
    try:
        return [run()]
    except NAMED:
        return []


# Options and arguments ###############################################################################################


def test_values_of_options() -> None:
    """Every option takes values of its type only; what it takes has that type."""
    for option in TRAIN:
        for value in [*VALUES, *WORDS]:
            taken = named_or_done(partial(option.check, value))
            if taken:
                plain = isinstance(taken[0], (bool, int, float, str, tuple, type(None)))
                assert plain, (option.name, value)
                assert taken[0] is not None or None in (value, option.default), (option.name, value)
                finite = not isinstance(taken[0], float) or math.isfinite(taken[0])
                assert finite, (option.name, value)


def arguments_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("optimizers", "options")]


def documented() -> Iterator[tuple[str, Any]]:
    """Functions and classes of the reference, by the names that pages give."""
    for page in sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md")):
        for found in re.finditer(r"^::: (\S+)((?:\n    .*)*)", page.read_text(), re.MULTILINE):
            members = re.search(r"^      members: \[(.*)\]", found[2], re.MULTILINE)
            owner = pydoc.locate(found[1])
            if inspect.ismodule(owner) and members is None:
                yield from ((name, each) for name, each in vars(owner).items() if _is_public(owner, name, each))
            elif inspect.ismodule(owner) and members is not None:
                yield from ((name, getattr(owner, name)) for name in members[1].split(", "))
            else:
                yield found[1], owner


def _is_public(owner: Any, name: str, each: Any) -> bool:
    return not name.startswith("_") and callable(each) and getattr(each, "__module__", "") == owner.__name__


#: What people only receive, subclass or catch.
RECEIVED = {
    "Advice", "Candidate", "Comparison", "Decoder", "Dot", "Finding", "FitResult", "GradientAgreement", "History",
    "LayerBounds", "LayerErrors", "RunRecord", "ScalableGNN", "Task", "TypedDataset", "TypedLinks", "Verification",
    "memory_by_type", "names",
}  # fmt: skip


def test_every_documented_function_checks_its_arguments() -> None:
    unchecked, count = [], 0
    for name, each in documented():
        if name.rpartition(".")[2] in RECEIVED or (
            isinstance(each, type) and issubclass(each, BaseException | Warning)
        ):
            continue
        hints = get_type_hints(vars(each)["__init__"] if isinstance(each, type) else each)
        parameters = [
            p for p in inspect.signature(each).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        typed = [p for p in parameters if hints.get(p.name, Any) is not Any]
        given = {p.name: object() for p in parameters if p in typed or p.default is p.empty}
        first = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if not typed:
            continue
        count += 1
        try:
            each(*first, **given)
        except gas.InputError:
            continue
        except Exception as error:
            unchecked.append((name, repr(error)[:80]))
        else:
            unchecked.append((name, "accepted"))
    assert not unchecked, unchecked
    assert count > 80


def on_model(function: Callable[..., object], parts: gas.HaloLoader, /, **given: Any) -> None:
    scaled = gas.autoscale(model(), parts.data)
    gas.refresh(scaled, parts)
    usual = {"model": scaled, "loader": parts, "data": parts.data, "nodes": torch.tensor([0]), "step": print}
    function(**{name: usual[name] for name in arguments_of(function) if name in usual} | given)


def test_arguments_of_public_functions() -> None:
    data, draw = graph(), random.Random(1)
    loader = gas.HaloLoader(data, 2)
    graphs = [Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), y=torch.tensor([i % 2])) for i in range(4)]
    functions: dict[str, tuple[Callable[..., object], list[str]]] = {
        "fit": (
            lambda **given: gas.fit(**{"model": model(), "data": data, "epochs": 1, "num_parts": 2, **given}),
            [name for name in arguments_of(gas.fit) if name != "num_workers"],
        ),
        "HaloLoader": (
            lambda **given: list(gas.HaloLoader(**{"data": data, "num_parts": 2, **given})),
            [name for name in arguments_of(gas.HaloLoader) if name != "num_workers"],
        ),
        "GraphLoader": (
            lambda **given: list(gas.GraphLoader(**{"graphs": graphs, "num_parts": 2, **given})),
            arguments_of(gas.GraphLoader),
        ),
        "LinkLoader": (lambda **given: gas.LinkLoader(**{"data": data, **given}), arguments_of(gas.LinkLoader)),
        "autoscale": (
            lambda **given: gas.infer(gas.autoscale(**{"model": model(), "data": data, **given}), loader),
            arguments_of(gas.autoscale),
        ),
        "load": (
            lambda **given: gas.load(**{"name": "communities", "nodes": 30, **given}),
            ["name", "root", "split", "seed", "nodes", "degree", "features", "classes", "homophily"],
        ),
        "Dataset.of_graphs": (lambda **given: gas.Dataset.of_graphs(**{"graphs": graphs * 5, **given}),
                              ["graphs", "split", "seed", "name"]),
        "partition": (
            lambda **given: partition(**{"edge_index": data.edge_index, "num_nodes": NODES, "num_parts": 2, **given}),
            arguments_of(partition),
        ),
    }  # fmt: skip
    for function in (gas.infer, gas.refresh, gas.predict, gas.verify, gas.grow, gas.diagnose, gas.exact_forward):
        functions[function.__name__] = partial(on_model, function, loader), arguments_of(function)
    functions["capture"] = partial(on_model, gas.capture, loader), arguments_of(gas.capture)
    for name, (function, arguments) in functions.items():
        for argument in arguments:
            for value in draw.sample(VALUES, 4):
                try:
                    named_or_done(partial(function, **{argument: value}))
                except Exception as error:
                    pytest.fail(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")


def test_calls_that_do_not_run_the_model_are_refused() -> None:
    scaled, loader = gas.autoscale(model(), graph()), gas.HaloLoader(graph(), 2)
    for function in (gas.infer, gas.refresh, gas.verify, gas.diagnose, gas.exact_forward):
        for call in (lambda *_: None, dict):
            other: Any = call
            with pytest.raises(gas.InputError):
                function(scaled, loader, call=other)


def test_an_autoscaled_model_is_saved_by_its_weights() -> None:
    scaled = gas.autoscale(model(), graph())
    with pytest.raises(gas.InputError, match=re.escape("Save model.state_dict()")):
        torch.save(scaled, "model.pt")
    torch.save(gas.detach(scaled), "model.pt")


def test_parts_and_states_that_a_loader_does_not_have_are_refused() -> None:
    loader = gas.HaloLoader(graph(), 2)
    wrong: list[Any] = [[2], [-1], ["a"], "0", 1.5, None]
    for parts in wrong:
        with pytest.raises(gas.InputError):
            loader.batch_of(parts)
    state = loader.state_dict()
    for name in state:
        for value in (None, "x", [1], torch.ones(2), 2**70):
            with pytest.raises(gas.InputError, match="the state of a loader"):
                loader.load_state_dict({**state, name: value})


def test_calls_with_other_arguments_name_those_that_there_are() -> None:
    wrong: Any = gas.HaloLoader
    with pytest.raises(gas.InputError, match="missing a required argument: 'data'"):
        wrong(num_parts=2)
    with pytest.raises(gas.InputError, match=re.escape("Did you mean 'num_parts'?")):
        wrong(graph(), num_part=2)


# Graphs ##############################################################################################################

BAD_GRAPHS: dict[str, Callable[[Data], Any]] = {
    "edge_weight too short": lambda data: data.update({"edge_weight": torch.ones(5)}),
    "edge_weight of two columns": lambda data: data.update({"edge_weight": torch.ones(data.num_edges, 2)}),
    "edge_weight of text": lambda data: data.update({"edge_weight": "x"}),
    "edge_weight of bool": lambda data: data.update({"edge_weight": torch.ones(data.num_edges, dtype=torch.bool)}),
    "training nodes tested": lambda data: data.update({"test_mask": data.train_mask | data.test_mask}),
    "mask of floats": lambda data: data.update({"train_mask": torch.rand(NODES)}),
    "mask of another length": lambda data: data.update({"val_mask": torch.ones(3, dtype=torch.bool)}),
    "y as a column of classes": lambda data: data.update({"y": data.y.view(-1, 1)}),
    "y as a column of labels": lambda data: data.update({"y": (data.y > 0).float().view(-1, 1)}),
    "y of complex numbers": lambda data: data.update({"y": torch.ones(NODES, dtype=torch.cfloat)}),
    "y too short": lambda data: data.update({"y": torch.zeros(3, dtype=torch.long)}),
    "x as one number": lambda data: data.update({"x": torch.tensor(1.0)}),
    "x as a vector": lambda data: data.update({"x": torch.ones(NODES)}),
    "x of other features": lambda data: data.update({"x": torch.ones(NODES, 6)}),
    "x of rows of different lengths": lambda data: data.update({"x": torch.nested.nested_tensor([torch.ones(5)] * 3)}),
    "x of doubles": lambda data: data.update({"x": data.x.double()}),
    "x of NumPy": lambda data: data.update({"x": data.x.numpy()}),
    "x without values": lambda data: data.update({"x": torch.ones(NODES, 5, device="meta")}),
    "x with NaN": lambda data: data.update({"x": torch.full((NODES, 5), math.nan)}),
    "edges of floats": lambda data: data.update({"edge_index": data.edge_index.float()}),
    "edges to nowhere": lambda data: data.update({"edge_index": data.edge_index + NODES}),
    "edges as a list": lambda data: data.update({"edge_index": [[0], [1]]}),
    "several numbers of nodes": lambda data: data.update({"num_nodes": torch.ones(3)}),
    "a sparse number of graphs": lambda data: data.update({"batch": torch.eye(NODES).to_sparse()}),
    "half a node": lambda data: data.update({"num_nodes": NODES + 0.5}),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_bad_graphs_are_refused(name: str) -> None:
    data = graph()
    BAD_GRAPHS[name](data)
    for mode in ("gas", "cluster"):
        with pytest.raises(gas.InputError):
            gas.fit(model(), data, epochs=1, num_parts=2, mode=mode)


class Returning(torch.nn.Module):
    """A model that makes something else of its rows."""

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.made = GCN(5, 4, num_layers=1, out_channels=3), made

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return self.made(self.conv(x, edge_index))


@pytest.mark.parametrize(
    "made",
    [
        lambda out: None,
        lambda out: [out],
        lambda out: out.sum(),
        lambda out: out + 0j,
        lambda out: out.detach(),
        lambda out: out.to_sparse(),
    ],
)
def test_outputs_of_another_kind_are_refused(made: Callable[[torch.Tensor], Any]) -> None:
    for mode in ("gas", "cluster", "exact"):
        with pytest.raises(gas.InputError):
            gas.fit(Returning(made), graph(), epochs=1, num_parts=2, mode=mode, progress=False)


def test_weights_that_cannot_be_trained_are_refused() -> None:
    with torch.inference_mode():
        made = model()
    for each in (made, model().to("meta")):
        for mode in ("gas", "cluster"):
            with pytest.raises(gas.InputError, match="weights of a model must have values"):
                gas.fit(each, graph(), epochs=1, num_parts=2, mode=mode)
        with pytest.raises(gas.InputError, match="weights of a model must have values"):
            gas.autoscale(each, graph())


def test_graphs_of_another_kind_are_refused() -> None:
    typed = HeteroData()
    typed["a"].x, typed["a"].y = torch.ones(4, 5), torch.tensor([0, 1, 0, 1])
    typed["a", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    for split, nodes in (("train", [0, 1]), ("val", [2]), ("test", [3])):
        typed["a"][f"{split}_mask"] = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(nodes), True)
    changes: list[tuple[Any, str, Any]] = [
        ("a", "x", torch.ones(4, 5).to_sparse()),
        ("a", "x", torch.ones(4, 5, device="meta")),
        ("a", "x", torch.nested.nested_tensor([torch.ones(5)] * 4)),
        (("a", "to", "a"), "edge_weight", torch.ones(3)),
    ]
    others = []
    for kind, name, value in changes:
        others.append(typed.clone())
        others[-1][kind][name] = value
    for data in (typed, *others, HeteroData(), Data()):
        with pytest.raises(gas.InputError):
            gas.fit(model(), data, epochs=1, num_parts=1)


# Files ###############################################################################################################


def damaged(content: bytes, draw: random.Random, flips: int = 5) -> Iterator[tuple[str, bytes]]:
    yield from {"nothing": b"", "zeros": b"\0" * len(content), "text": b"hello", "a half": content[::2]}.items()
    for _ in range(2):
        yield "cut off", content[: draw.randrange(len(content))]
    for _ in range(flips):
        place = draw.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        yield f"one bit at {place}", bytes(changed)


def test_damaged_files() -> None:
    """Tensors that are read from a damaged file are those that were written, or it is refused by name."""
    data, draw = graph(), random.Random(2)
    common: dict[str, Any] = {"epochs": 1, "num_parts": 2, "progress": False}
    arrays = {name: data[name].numpy() for name in ("edge_index", "x", "y", "train_mask", "val_mask", "test_mask")}
    np.savez("graph.npz", **arrays)
    torch.save(data, "graph.pt")
    Path("nodes.csv").write_text("id,a,y\n" + "".join(f"{i},{i / 8},{i % 2}\n" for i in range(8)))
    Path("edges.csv").write_text("source,target\n" + "".join(f"{i},{(i + 1) % 8}\n" for i in range(8)))
    Path("options.toml").write_text('data = "graph.npz"\nepochs = 1\nlr = 0.1\n')
    flags = ["--data", "graph.npz", "--epochs", "1", "--num-parts", "2", "--quiet"]
    run = invoke(["train", *flags, "--save", "model.pt", "--run-dir", "run"])
    assert run.exit_code == 0, run.output
    gas.fit(model(), data, checkpoint_dir="checkpoints", **common)
    (checkpoint,) = Path("checkpoints").iterdir()
    names = ("run/run.json", "run/metrics.jsonl", "run/result.json")
    readers: dict[str, Callable[[], Any]] = {
        "graph.npz": lambda: open_file("graph.npz").train.x,
        "graph.pt": lambda: open_file("graph.pt").train.x,
        "nodes.csv": lambda: open_file("nodes.csv", edges="edges.csv"),
        "edges.csv": lambda: open_file("nodes.csv", edges="edges.csv"),
        "options.toml": lambda: resolve(TRAIN, {}, Path("options.toml")),
        "model.pt": lambda: torch.cat([value.flatten() for value in read_model(Path("model.pt")).weights.values()]),
        str(checkpoint): lambda: gas.fit(model(), data, resume=str(checkpoint), **common),
        **dict.fromkeys(names, lambda: (explain(read_run("run")), write_report(["run"], "report.html"))),
    }
    for name, read in readers.items():
        good, expected = Path(name).read_bytes(), read()
        for what, content in damaged(good, draw):
            Path(name).write_bytes(content)
            try:
                found = named_or_done(read)
            except Exception as error:
                pytest.fail(f"{name}, {what}: {type(error).__name__}: {error}")
            if found and isinstance(expected, torch.Tensor):
                assert torch.equal(found[0], expected), (name, what)
        Path(name).write_bytes(good)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
def test_pipes_and_devices_are_not_read() -> None:
    """They may never end."""
    for name in ("a.npz", "a.pt", "a.csv", "a.npy"):
        os.mkfifo(name)
    np.savez("plain.npz", edge_index=[[0], [1]], y=[0, 1])
    reads: list[Callable[[], Any]] = [
        lambda: open_file("a.npz"),
        lambda: open_file("a.pt"),
        lambda: open_file("a.csv", edges="a.csv"),
        lambda: open_file("plain.npz", features_file="a.npy"),
        lambda: read_model(Path("/dev/zero")),
        lambda: gas.fit(model(), graph(), resume="a.pt"),
        lambda: resolve(TRAIN, {}, Path("/dev/zero")),
    ]
    for read in reads:
        with pytest.raises(gas.InputError, match="no ordinary file"):
            read()


def test_results_do_not_replace_what_they_are_made_of() -> None:
    data = graph()
    torch.save(data, "graph.pt")
    good = Path("graph.pt").read_bytes()
    assert invoke(["train", "--data", "graph.pt", "--epochs", "1", "--save", "m.pt"]).exit_code == 0
    Path("same.npz").symlink_to("graph.pt")
    for words in (["train", "--save"], ["partition", "--output"], ["infer", "m.pt", "--output"]):
        for name in ("graph.pt", "same.npz"):
            result = invoke([*words, name, "--data", "graph.pt"])
            assert "which is read for it" in str(result.exception), words
    assert Path("graph.pt").read_bytes() == good


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in nested ones."""
    keys = list(value) if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def with_other(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(content)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


def test_values_of_other_types_in_files() -> None:
    data, draw = graph(), random.Random(3)
    common: dict[str, Any] = {
        "num_parts": 2,
        "progress": False,
        "diagnose_every": 1,
        "diagnose": ["staleness", "gradients"],
    }
    gas.fit(model(), data, epochs=1, run_dir="run", checkpoint_dir="checkpoints", verify=True, **common)
    others: list[Any] = [None, -1.5, "x", True, [], {}, [1, None], {"a": 1}]
    for name in ("run.json", "result.json", "verification.json", "metrics.jsonl"):
        file = Path("run") / name
        good = file.read_text()
        first, *rest = good.splitlines() if name.endswith("l") else [good]
        content = json.loads(first)
        del content["checksum"]  # which would tell
        for place in places(content):
            changed = json.dumps(with_other(content, place, draw.choice(others)))
            file.write_text("\n".join([changed, *rest, ""]) if rest else changed)
            for use in (lambda: explain(read_run("run")), lambda: write_report(["run"], "report.html")):
                try:
                    named_or_done(use)
                except Exception as error:
                    pytest.fail(f"{name}, {place}: {type(error).__name__}: {error}")
        file.write_text(good)
    (checkpoint,) = Path("checkpoints").iterdir()
    content = torch.load(checkpoint, weights_only=True)
    for place in draw.sample(list(places(content)), 25):
        torch.save(with_other(content, place, draw.choice([*others, torch.ones(2)])), checkpoint)
        try:
            named_or_done(lambda: gas.fit(model(), data, epochs=2, resume=str(checkpoint), **common))
        except Exception as error:
            pytest.fail(f"checkpoint, {place}: {type(error).__name__}: {error}")


# The command line ####################################################################################################


def test_flags_of_all_commands() -> None:
    """Every flag of every command; runs that are allowed take milliseconds, others end before they begin."""
    data, draw = graph(), random.Random(4)
    np.savez("graph.npz", edge_index=data.edge_index, x=data.x, y=data.y, split=np.arange(NODES) % 3)
    train = ["--epochs", "1", "--num-parts", "2", "--diagnose-every", "never"]
    usual = {"train": train, "partition": ["--num-parts", "2"]}
    commands: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name in ("train", "partition", "infer", "data", "explain", "report"):
        command: click.Command = commands[name]
        first = ["--data", "graph.npz"] if "data" in {each.name for each in command.params} else []
        for parameter in command.params:
            flag = parameter.opts[0]
            if flag in ("--help", "--num-workers"):
                continue
            for word in draw.sample(WORDS, 1):
                given = [f"{flag}={word}"] if flag.startswith("--") else [word]
                result = invoke([name, *first, *usual.get(name, []), *given])
                ended = isinstance(result.exception, (*NAMED, OSError, SystemExit, type(None)))
                assert ended, (name, flag, word[:20], result.exception)


def test_numbers_of_flags_are_in_their_bounds() -> None:
    for option in TRAIN:
        assert isinstance(option, Option)
        for word in ("nan", "inf", "-1", str(2**70)):
            if option.kinds[0] in (int, float) and (word != str(2**70) or option.kinds[0] is int):
                number = option.kinds[0](float(word)) if word in ("-1", str(2**70)) else float(word)
                least = min((bound for bound in (option.least, option.above) if bound is not None), default=-math.inf)
                if word != "-1" or least >= 0:
                    with pytest.raises(gas.InputError):
                        option.check(number)
