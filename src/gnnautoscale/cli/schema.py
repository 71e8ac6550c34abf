"""One schema for flags and configuration files, read off the functions that take the options.

The options of ``gas train`` are the arguments of :func:`gnnautoscale.fit`, of the models' classes and of
:func:`gnnautoscale.load`: names, types, defaults and help come from there.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from gnnautoscale.errors import InputError
from gnnautoscale.models import MODELS, model_options
from gnnautoscale.training import fit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Option:
    """An option by its name in configuration files; its flag has dashes instead of underscores.

    Attributes:
        name: Its name.
        kind: Its type: ``bool``, ``int``, ``float``, ``str``, ``list`` (of words; its flag may be given several times)
            or ``tuple`` (of integers; its flag takes them with commas between).
        help: What it is for.
        panel: The group it is shown in.
        default: What it is if nobody says anything; ``None`` leaves it to the function that takes it.
    """

    name: str
    kind: type
    help: str
    panel: str
    default: Any = None


DATA = [
    Option("data", str, "A data set's name, or a file: .npz, .pt, or a table of nodes (.csv, .parquet).", "Data"),
    Option("edges", str, "The table of edges that belongs to a table of nodes.", "Data"),
    Option("features_file", str, "A .npy file of features, which may be larger than the memory.", "Data"),
    Option("root", str, "Where the published data sets are kept.", "Data", "data"),
    Option("split", int, "Number of the split where a data set has several; each run takes the next.", "Data", 0),
    Option("undirected", bool, "Add the reverse of every edge of a file.", "Data"),
    Option("max_features", int, "Keep only so many features of a file.", "Data"),
    Option("graphs", int, "Number of training graphs of cluster and pattern.", "Data"),
    Option("nodes", int, "Number of nodes of communities.", "Data"),
    Option("degree", float, "Mean degree of communities.", "Data"),
    Option("features", int, "Number of features of communities.", "Data"),
    Option("classes", int, "Number of classes of communities.", "Data"),
    Option("homophily", float, "Share of edges inside a community.", "Data"),
]
FILE_OPTIONS = ("edges", "features_file", "undirected", "max_features")
GENERATOR_OPTIONS = ("graphs", "nodes", "degree", "features", "classes", "homophily")


# How flags take what is no plain value.
_FLAG_TYPES: dict[type, Any] = {list: list[str], tuple: str}
_TYPE_NAMES: dict[type, str] = {tuple: "list of integers"}


def fit_options() -> list[Option]:
    """The keyword arguments of ``fit``."""
    described = _described_arguments(fit.__doc__ or "")
    hints = get_type_hints(fit)
    options = []
    for name, parameter in inspect.signature(fit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("task", "callback"):
            options.append(Option(name, _kind(hints[name]), described[name], "Training", parameter.default))
    return options


def every_model_option() -> list[Option]:
    """The options of all models together."""
    found: dict[str, Option] = {}
    for model, cls in MODELS.items():
        described = _described_arguments(cls.__doc__ or "")
        hints = get_type_hints(cls.__init__)
        for name in model_options(model):
            if name not in found:
                found[name] = Option(name, _kind(hints[name]), described[name], "Model")
    return list(found.values())


def with_options(options: list[Option], command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of the options; it is called with their values and its own arguments.

    The command takes the resolved options as its first argument. ``--config`` names a TOML file with the same keys;
    flags win over the file, the file over defaults.
    """
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(command, include_extras=True)

    def run(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        file = values.pop("config")
        command(resolve(options, given, file), **values)

    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                help=option.help + _default_in_words(option.default),
                metavar="N,N,..." if option.kind is tuple else None,
                rich_help_panel=option.panel,
                show_default=False,
            ),
            annotation=_FLAG_TYPES.get(option.kind, option.kind) | None,
        )
        for option in options
    ]
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, help="A TOML file with the same keys as the flags, which win over it."),
        annotation=Path | None,
    )
    own = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    signature = [*(p for p in own if p.kind is not p.KEYWORD_ONLY), *parameters, config]
    signature += [p for p in own if p.kind is p.KEYWORD_ONLY]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def resolve(options: list[Option], given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The values of options: what was given, else what the file says, else the default.

    Args:
        options: All options there are.
        given: Values by name; ``None`` and empty lists count as not given.
        file: A TOML file with further values.

    Example:
        >>> resolve([Option("lr", float, "", "", 0.01), Option("num_parts", int, "", "", 8)], {"lr": 0.1}, None)
        {'lr': 0.1, 'num_parts': 8}
    """
    configured = _read_config(options, file) if file is not None else {}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    for option in options:
        if option.kind is tuple and option.name in given:
            given[option.name] = _integers(option.name, given[option.name])
    return {option.name: given.get(option.name, configured.get(option.name, option.default)) for option in options}


def _integers(name: str, text: str) -> list[int]:
    """The integers that a flag's text names.

    Example:
        >>> _integers("fan_out", "10,-1")
        [10, -1]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(
            f"{name} must be integers with commas between", got=repr(text), fix="Write them like 10,10."
        ) from None


def _read_config(options: list[Option], file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            read = tomllib.load(stream)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            "--config needs a readable TOML file", got=f"{file} ({error})", fix="Check the file."
        ) from None
    values = {name.replace("-", "_"): value for name, value in read.items()}
    if len(values) < len(read):
        raise InputError("a key may stand in a file once", got="one with dashes and underscores", fix="Remove one.")
    known = {option.name: option for option in options}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise InputError(
                f"{file.name} may hold this command's options for data, model and training",
                got=f"the key '{name}'",
                fix=f"Did you mean '{close[0]}'?" if close else "See --help for the keys.",
            )
        kind = known[name].kind
        # In TOML, 1 is a fine way to write 1.0; words may stand for numbers nowhere else.
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind in (list, tuple):
            items = str if kind is list else int
            fits = isinstance(value, list) and all(type(item) is items for item in value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            values[name] = float(value)
        elif name.endswith("_every") and kind is str and isinstance(value, int) and not isinstance(value, bool):
            values[name] = str(value)
        elif not fits:
            raise InputError(
                f"{name} must be of type {_TYPE_NAMES.get(kind, kind.__name__)}",
                got=repr(value),
                fix=f"Change it in {file.name}.",
            )
    return values


def _default_in_words(default: Any) -> str:
    if default is None:
        return ""
    return f" (default: {', '.join(map(str, default)) if isinstance(default, tuple) else default})"


def _kind(hint: Any) -> type:
    """The plain type behind an annotation."""
    text = str(hint)
    if hint in (bool, int, float, str):
        return hint  # type: ignore[no-any-return]
    if "Sequence" in text:
        return tuple if "int" in text else list
    if "Literal" in text:
        return str
    if "float" in text:
        return float
    return int if "int" in text and "str" not in text else str


def _described_arguments(docstring: str) -> dict[str, str]:
    """What a docstring says about each argument."""
    section = re.search(r"Args:\n(.*?)(\n\s*\n|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    entries = re.findall(
        r"^    (\w+): (.*?)(?=^    \w+:|\Z)", section[1] + "\n" if section else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(text.split()).replace("``", "") for name, text in entries}


MODEL = [
    Option("model", str, f"One of {', '.join(MODELS)}.", "Model", "gcn"),
    *every_model_option(),
]
TRAIN = [
    *DATA,
    *MODEL,
    *fit_options(),
    Option("runs", int, "Number of runs, each with the next seed.", "Training", 1),
]
PARTITION = [
    *DATA,
    *(option for option in fit_options() if option.name in ("num_parts", "partition", "seed", "cache_dir")),
]
