"""Flags and configuration files, generated from the declared options of data, model and training; loads the data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from gnnautoscale._util import Option, OptionGroup, check_names, option, options_of, ordinary, reason_of
from gnnautoscale.data import Dataset, datasets, open_file
from gnnautoscale.errors import InputError
from gnnautoscale.models import MODELS, TYPED_MODELS, model_options
from gnnautoscale.tasks import DecoderName, HeadName, ReadoutName, TaskName
from gnnautoscale.training import OPTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class Data(OptionGroup):
    """The graph to work on."""

    data: str | None = option(
        None,
        "Name of a data set; a file: .npz, .pt, or a table of nodes (.csv, .parquet); or a folder of tables by type.",
        path=True,
    )
    root: str = option("data", "Folder of the published data sets.", path=True)
    split: int = option(0, "Number of the split, where a data set has several; each run takes the next.", least=0)


@dataclass(frozen=True, kw_only=True)
class Files(OptionGroup):
    """Options of graphs in files."""

    edges: str | None = option(None, "Table of edges that belongs to a table of nodes.", path=True)
    features_file: str | None = option(None, "A .npy file of features, which may exceed the memory.", path=True)
    undirected: bool | None = option(
        None, "Add the reverse of every edge of a file; of a heterogeneous graph, as types of their own."
    )
    max_features: int | None = option(None, "Keep only this many features of a file.", least=1)
    split_ratio: tuple[float, ...] | None = option(
        None,
        "Shares of training, validation and test nodes, like 60,20,20 (the default) or 0.8,0.1,0.1, if a file has no "
        "split.",
    )
    target: str | None = option(
        None,
        "Type of nodes with targets, if several types of a heterogeneous graph have y; for --task link, type of edges, "
        "like author,writes,paper.",
    )


@dataclass(frozen=True, kw_only=True)
class Generators(OptionGroup):
    """Options of generated graphs."""

    graphs: int | None = option(None, "Number of training graphs of cluster, pattern and echoes.", least=1)
    nodes: int | None = option(
        None, "Number of nodes of communities and districts, or of each graph of echoes.", least=1
    )
    degree: float | None = option(None, "Mean degree of communities and districts.", least=0)
    features: int | None = option(None, "Number of features of communities and districts.", least=1)
    classes: int | None = option(None, "Number of classes of communities and districts.", least=1)
    homophily: float | None = option(None, "Share of edges inside a community.", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Links(OptionGroup):
    """Options of link prediction."""

    decoder: DecoderName | None = option(None, "Decoder of links: dot, bilinear or distmult; dot by default.")
    width: int | None = option(
        None, "Number of outputs per node that links and graphs are predicted from; 64 by default.", least=1
    )
    negatives: int | None = option(None, "Number of pairs without an edge drawn for each edge; 1 by default.", least=1)
    candidates: int | None = option(
        None, "Number of nodes drawn to rank a partner among; by default all nodes.", least=1
    )
    reconstruct: bool | None = option(None, "Train on the edges that pass messages, as graph autoencoders do.")


@dataclass(frozen=True, kw_only=True)
class Graphs(OptionGroup):
    """Options of graph-level prediction."""

    readout: ReadoutName | None = option(None, "How to pool the nodes of a graph; sum by default.")
    head: HeadName | None = option(None, "What predicts from pooled rows: linear, which is the default, or mlp.")
    stale_dropout: float | None = option(
        None, "Share of the last known parts of graphs that a step leaves out; 0 by default.", least=0, below=1
    )


# So many names of models stand beside an option that only they take.
_FEW = 4


def _of_models() -> dict[str, Option]:
    """The options of all models together, with the names of the models that take them if these are few.

    What is not given is left to the model.
    """
    help_text = f"One of {', '.join(MODELS)}; of heterogeneous graphs {', '.join(TYPED_MODELS)}."
    found = {"model": Option("model", str, "gcn", help_text, "Model")}
    takers: dict[str, list[str]] = {}
    for model in dict.fromkeys((*MODELS, *TYPED_MODELS)):
        for name, each in model_options(model).items():
            found.setdefault(name, replace(each, default=None, group="Model"))
            takers.setdefault(name, []).append(model)
    for name, models in takers.items():
        if len(models) <= _FEW:
            found[name] = replace(found[name], help=f"{found[name].help} ({', '.join(models)})")
    return found


DATA = [each for group in (Data, Files, Generators) for each in options_of(group).values()]
MODEL = list(_of_models().values())
TASK = [
    Option(
        "task", TaskName | None, None, f"What to predict: {', '.join(get_args(TaskName))}; else what fits y.", "Data"
    ),
    *options_of(Links).values(),
    *options_of(Graphs).values(),
]
TRAIN = [
    *(*DATA, *TASK, *MODEL, *OPTIONS.values()),
    Option("runs", int, 1, "Number of runs, each with the next seed.", "Runs", least=1),
]
# What another graph than that of training may have of its own, and what only training or scores depend on.
_OF_THE_GRAPH_ALONE = (*options_of(Generators), "negatives", "candidates")
_SPLIT = options_of(Data)["split"]
INFER = [
    *(replace(each, type=int | None, default=None) if each == _SPLIT else each for each in DATA),
    *TASK,
    OPTIONS["metric"],
]
PARTITION = [*DATA, *(OPTIONS[name] for name in ("num_parts", "partition", "balance", "seed", "cache_dir"))]


def chosen(group: type[OptionGroup] | list[Option], options: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of a group's options."""
    names = [each.name for each in group] if isinstance(group, list) else options_of(group)
    return {name: options[name] for name in names if options[name] is not None}


def file_of(options: dict[str, Any]) -> Path | None:
    """The file or folder that the options name; ``None`` if it is a data set."""
    source = options["data"]
    if source is None:
        raise InputError(
            "--data must name a data set or a file",
            got="nothing",
            fix="Pass a data set's name (`gas data` lists them) or a file.",
        )
    is_file = source.lower() not in datasets.names() and (Path(source).suffix != "" or Path(source).exists())
    misplaced = chosen(Generators if is_file else Files, options)
    if misplaced:
        raise InputError(
            f"{', '.join('--' + name.replace('_', '-') for name in misplaced)} "
            f"{'belong to generated data sets' if is_file else 'belong to files'}",
            got=f"--data {source}",
            fix="Leave them out.",
        )
    return Path(source) if is_file else None


def files_read(options: Mapping[str, Any]) -> list[Path]:
    """The files that a command reads its graph from, which no result may replace."""
    return [Path(options[name]) for name in ("data", "edges", "features_file") if options[name] is not None]


def made_from(options: Mapping[str, Any], split: int) -> dict[str, Any]:
    """The options that a data set and its task are made with, without the places of files."""
    named = {each.name: options[each.name] for each in (*DATA, *TASK) if not each.path and each.name in options}
    return {**{name: value for name, value in named.items() if value is not None}, "split": split}


def with_saved(options: Mapping[str, Any], saved: Mapping[str, Any], file: Path) -> tuple[dict[str, Any], list[str]]:
    """The options of a command with those that a model was trained with, and the flags of what was added.

    A value that contradicts how the model reads its graph is refused.
    """
    known = {each.name: each for each in (*DATA, *TASK)}
    of_files, of_generators = options_of(Files), options_of(Generators)
    is_file = file_of(dict(options)) is not None
    found, added = dict(options), []
    for name, value in saved.items():
        misplaced = name in (of_generators if is_file else of_files)
        if name not in known or misplaced or value is None:
            continue
        value = known[name].check(value, fix=f"{file} holds a wrong value; train the model again.")
        if found[name] is None:
            found[name] = value
            if value != known[name].default:
                added.append(shown_flag(name, value))
        elif found[name] != value and name not in _OF_THE_GRAPH_ALONE:
            raise InputError(
                f"{file.name} was trained with {shown_flag(name, value)}",
                got=shown_flag(name, found[name]),
                fix="Leave it out.",
            )
    found["split"] = _SPLIT.default if found["split"] is None else found["split"]
    return found, added


def shown_flag(name: str, value: Any) -> str:
    """An option as it stands on a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, list | tuple):
        value = ",".join(str(each).removesuffix(".0") for each in value)
    return f"--{flag} {value}"


def load_dataset(options: dict[str, Any]) -> Dataset:
    """Load the data set that the options name."""
    file = file_of(options)
    if file is not None:
        return open_file(file, split=options["split"], **chosen(Files, options))
    return datasets.load(options["data"], options["root"], split=options["split"], **chosen(Generators, options))


def with_options(options: list[Option], command: Callable[..., None]) -> Callable[..., None]:
    """Add flags for options to a command, which takes their values by name as its first argument.

    ``--config`` names a TOML file with the same keys; flags win over the file, and the file wins over defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in list(inspect.signature(command).parameters.items())[1:]
    ]

    def run(**values: Any) -> None:
        given = {each.name: values.pop(each.name) for each in options}
        command(resolve(options, given, values.pop("config")), **values)

    config = typer.Option(None, help="A TOML file with the same keys as the flags, which win over it.")
    signature = [
        *(parameter for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY),
        *(_parameter(each.name, _flag_type(each), _flag(each)) for each in options),
        _parameter("config", Path, config),
        *(parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY),
    ]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind | None)


def _flag(each: Option) -> Any:
    default = ", ".join(each.default) if isinstance(each.default, tuple) else each.default
    return typer.Option(
        None,
        help=each.help if default is None else f"{each.help} (default: {default})",
        metavar="N,N,..." if _is_numbers(each) else None,
        rich_help_panel=each.group,
        show_default=False,
    )


def _flag_type(each: Option) -> Any:
    """What typer makes of a flag: words with numbers beside them, choices and lists of numbers stay text."""
    (kind, *others) = each.kinds
    if get_origin(kind) in (tuple, Sequence):
        return str if _is_numbers(each) else list[str]
    return str if others or get_origin(kind) is Literal else kind


def _is_numbers(each: Option) -> bool:
    return get_args(each.kinds[0])[:1] in ((int,), (float,))


def resolve(options: Iterable[Option], given: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """The values of options: those given (not ``None`` or empty), else those of a TOML file, else the defaults."""
    known = {each.name: each for each in options}
    values = {name: each.default for name, each in known.items()}
    if file is not None:
        for name, value in _read(file, known).items():
            values[name] = known[name].check(value, fix=f"Change it in {file.name}.")
    for name, value in given.items():
        if _is_numbers(known[name]) and isinstance(value, str):
            values[name] = known[name].check(_numbers(value), fix="Write them like 10,10.")
        elif value not in (None, []):
            values[name] = known[name].check(value)
    return values


def _numbers(text: str) -> list[int] | list[float] | str:
    """The numbers between the commas of a text, or the text itself if these are none."""
    for kind in (int, float):
        with suppress(ValueError):
            return [kind(word) for word in text.split(",")]
    return text


def _read(file: Path, known: Iterable[str]) -> dict[str, Any]:
    try:
        with ordinary(file).open("rb") as stream:
            read = tomllib.load(stream)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            "--config needs a readable TOML file", got=f"{file} ({reason_of(error)})", fix="Check the file."
        ) from None
    values = {name.replace("-", "_"): value for name, value in read.items()}
    if len(values) < len(read):
        raise InputError(
            f"{file.name} must hold each key once", got="one with dashes and with underscores", fix="Remove one."
        )
    check_names(values, known, f"keys of {file.name} must be options of this command", "See --help for the keys.")
    return values
