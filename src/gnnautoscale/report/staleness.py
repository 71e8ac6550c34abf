"""The sections about errors of histories: staleness, errors and their bounds, gradients, Lipschitz constants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gnnautoscale.report.markup import (
    Key,
    Section,
    figure,
    figures,
    folded,
    paragraph,
    plot_section,
    series_table,
    table,
)
from gnnautoscale.report.readable import Point, finite, short, spaced
from gnnautoscale.report.reported_run import ReportedRun
from gnnautoscale.report.svg import Series, line_chart
from gnnautoscale.report.training import curves

_MOST_LAYERS = 6
_Layers = dict[str, list[tuple[ReportedRun, list[Point]]]]


def staleness_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Distance of histories from what the current weights give, by epoch and by age."""
    by_epoch = _by_layer(runs, "staleness", "staleness", "relative")
    found = _layer_figures(by_epoch, "Staleness", "staleness, relative")
    found += _layer_figures(_by_age(runs), "Staleness by age", "staleness", x_title="age in steps")
    how = (
        "Staleness is the distance between a row of a history and what a batch would compute for it now, over the rows "
        "that batches pull; relative means divided by the norm of the exact rows. It depends on how fast the weights "
        "change. If it is high or grows with depth, and learning curves suffer: clip gradients, lower the learning "
        "rate, or refresh. By age: the mean over rows written that many steps ago, at the last measurement."
    )
    return plot_section("staleness", "Staleness of histories", how, found, _left_out(by_epoch))


def error_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Errors of layers, and their bounds by Theorem 1."""
    errors = _by_layer(runs, "staleness", "closeness", "max")
    bounds = _by_layer(runs, "staleness", "bound")
    found, exact = [], []
    for layer in _some(errors):
        pairs = [(errors.get(layer, []), False), (bounds.get(layer, []), True)]
        if not any(y > 0 for its, _ in pairs for _, points in its for _, y in points):
            exact.append(layer)
            continue
        series = [
            run.series(points, dashed=dashed, what="bound" if dashed else "largest error")
            for its, dashed in pairs
            for run, points in its
        ]
        title = f"Error of {_called(layer)}"
        label = f"Largest error of {layer} by epoch{', and its bound' if bounds.get(layer) else ''}; logarithmic"
        plot = line_chart(series, label=label, x_title="epoch", y_title="error (log)", log=True)
        keys = [Key("largest error", None)]
        if bounds.get(layer):
            keys.append(Key("bound of Theorem 1", None, dashed=True))
        found.append(figure(title, plot, data=series_table(title, "epoch", series), keys=keys))
    means = _by_layer(runs, "staleness", "closeness", "relative")
    inexact = {layer: its for layer, its in means.items() if layer not in exact}
    relative = _layer_figures(inexact, "Relative error", "error, relative")
    if not found and not relative:
        return None
    how = (
        "The error is the distance between what a batch computes and the exact embedding, here for the worst node. "
        "Theorem 1 bounds it by the measured staleness and the model's Lipschitz constants, so no solid line lies "
        "above the dashed line of its colour; the gap between them shows how cautious the bound is."
    )
    body = [paragraph(how), figures(found)]
    if exact:
        body.append(paragraph(f"Exact at each measurement: {', '.join(exact)}."))
    if relative:
        body += [paragraph("Mean error, divided by the mean norm of the exact rows:"), figures(relative)]
    return Section("errors", "Errors and their bounds", "".join(body) + _left_out(errors))


def gradient_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Distance of gradients from those of full batch."""
    found = curves(runs, "Cosine with the exact gradient", partial(_gradient, path=("cosine",)), "cosine")
    found += curves(runs, "Relative error of the gradient", partial(_gradient, path=("relative_error",)), "error")
    compensated = partial(_gradient, path=("compensated", "cosine"))
    found += curves(runs, "Cosine with the exact gradient, compensated", compensated, "cosine")
    names = ("cosine", "norm_ratio", "relative_error")
    rows = [
        [str(each["layer"]), run.tag, how, *(short(finite(each.get(name)), 3) for name in names)]
        for run in runs
        for record in run.record.gradients[-1:]
        for how, measured in (("plain", record), ("compensated", record.get("compensated") or {}))
        for each in ({**measured, "layer": "all"}, *(measured.get("layers") or ()))
        if measured
    ]
    heads = ["layer", "run", "steps", "cosine", "norm ratio", "relative error"]
    last = table(heads, rows, caption="Gradients at the last measurement")
    how = (
        "The gradient over all batches, with the histories as they are, compared with that of full batch and the same "
        "weights. Cosine 1 and error 0 mean that they are equal. In plain steps no gradient flows through histories, "
        "so they may differ even if the histories are fresh; compensated steps (--compensate gradient) let it go on."
    )
    return plot_section("gradients", "Gradients", how, found, folded("Layer by layer", last) if rows else "")


def lipschitz_section(runs: Sequence[ReportedRun]) -> Section | None:
    """Lipschitz constants of layers."""
    found = _layer_figures(_by_layer(runs, "lipschitz", "whole"), "Lipschitz constant", "constant")
    if not found:
        for kind in ("message", "update"):
            found += _layer_figures(_by_layer(runs, "lipschitz", kind), f"Constant of {kind}s", "constant")
    rows = _last_layers(runs, "lipschitz", ("whole", "message", "update"))
    last = table(["layer", "run", "whole", "message", "update"], rows, caption="Constants at the last measurement")
    how = (
        "How much a layer can amplify an error of its input. The factors of all layers multiply, so constants above 1 "
        "make deep models sensitive to stale histories; weight decay and the Lipschitz penalty keep them small."
    )
    return plot_section("lipschitz", "Lipschitz constants", how, found, folded("Messages and updates", last))


def _gradient(run: ReportedRun, path: tuple[str, ...]) -> list[Point]:
    return run.curve(path, run.record.gradients)


def _layers(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [layer for record in records for layer in record.get("layers") or ()]


def _last_layers(runs: Sequence[ReportedRun], kind: str, names: Sequence[str]) -> list[list[str]]:
    """Table rows with some numbers of each layer at the last measurement of each run."""
    return [
        [str(layer.get("layer")), run.tag, *(short(finite(layer.get(name)), 3) for name in names)]
        for run in runs
        for layer in _layers(getattr(run.record, kind)[-1:])
    ]


def _by_layer(runs: Sequence[ReportedRun], kind: str, *path: str) -> _Layers:
    """One number of each layer by epoch, for each run that has it."""
    found: _Layers = {}
    for run in runs:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for record in getattr(run.record, kind):
            for layer in _layers([record]):
                by_name.setdefault(str(layer.get("layer")), []).append({**layer, "epoch": record.get("epoch")})
        for name, records in by_name.items():
            if points := run.curve(path, records):
                found.setdefault(name, []).append((run, points))
    return found


def _by_age(runs: Sequence[ReportedRun]) -> _Layers:
    """Staleness of each layer by the age of rows, at the last measurement."""
    found: _Layers = {}
    for run in runs:
        for layer in _layers(run.record.staleness[-1:]):
            if points := run.curve(("staleness",), layer.get("by_age") or (), over="age"):
                found.setdefault(str(layer.get("layer")), []).append((run, points))
    return found


def _layer_figures(layers: _Layers, title: str, y_title: str, *, x_title: str = "epoch") -> list[str]:
    """For one run, a figure with a curve per layer; for several, a figure per layer, all with the same axis."""
    some = _some(layers)
    values = [y for layer in some for _, points in layers[layer] for _, y in points]
    if not values:
        return []
    if len({run.number for its in layers.values() for run, _ in its}) == 1:
        # The tag is the end of the layer's name, such as 0 for convs.0, or of its type of nodes.
        tags = [layer.split(" ")[-1].split(".")[-1][:3] for layer in some]
        series = [
            Series(layer, layers[layer][0][1], at, tag) for at, (layer, tag) in enumerate(zip(some, tags, strict=True))
        ]
        keys = [Key(one.name, one.color) for one in series]
        label = f"{title} by {x_title}, of {len(series)} layers"
        plot = line_chart(series, label=label, x_title=x_title, y_title=y_title)
        return [figure(title, plot, data=series_table(title, x_title, series), keys=keys)]
    found = []
    for layer in some:
        series = [run.series(points) for run, points in layers[layer]]
        name = f"{title}, {_called(layer)}"
        label = f"{name} by {x_title}, of {len(series)} runs"
        y_range = (min(values), max(values))
        plot = line_chart(series, label=label, x_title=x_title, y_title=y_title, y_range=y_range)
        found.append(figure(name, plot, data=series_table(name, x_title, series)))
    return found


def _some(layers: _Layers) -> list[str]:
    """A few of the layers, from the first to the last."""
    names = list(layers)
    return [names[index] for index in spaced(len(names), _MOST_LAYERS)]


def _left_out(layers: _Layers) -> str:
    if len(layers) <= _MOST_LAYERS:
        return ""
    return paragraph(f"The plots show {_MOST_LAYERS} of {len(layers)} layers; the run folders have all of them.")


def _called(layer: str) -> str:
    return f"the {layer}" if layer.split(" of ")[0] == "output" else layer
