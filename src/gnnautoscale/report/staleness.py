"""Sections about the errors of histories: staleness, errors beside their bounds, gradients, Lipschitz constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gnnautoscale.report.markup import Key, Section, figure, figures, folded, paragraph, series_table, table
from gnnautoscale.report.readable import Point, finite, short, spaced
from gnnautoscale.report.shown import Shown
from gnnautoscale.report.svg import Series, line_chart
from gnnautoscale.report.training import curves

_MOST_LAYERS = 6
_Layers = dict[str, list[tuple[Shown, list[Point]]]]


def staleness_section(runs: Sequence[Shown]) -> Section | None:
    """How far histories are from what current weights give, by epoch and by age."""
    by_epoch = _by_layer(runs, "staleness", "staleness", "relative")
    found = _layer_figures(by_epoch, "Staleness", "staleness, relative")
    ages = _layer_figures(_by_age(runs), "Staleness by age", "staleness", x_title="age in steps")
    if not found and not ages:
        return None
    how = (
        "Staleness is the distance between a row in a history and what a batch would compute for it now, for rows "
        "that some batch pulls; relative means divided by the norm of exact rows. It follows how fast weights "
        "change. If it is high, or grows with depth, and learning curves suffer: clip gradients, lower the learning "
        "rate, or refresh. By age: the mean over rows that were written so many steps ago, at the last measurement."
    )
    return Section("staleness", "Staleness of histories", paragraph(how) + figures(found + ages) + _left_out(by_epoch))


def error_section(runs: Sequence[Shown]) -> Section | None:
    """The errors of layers, and the bounds that Theorem 1 gives."""
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
    relative = _layer_figures(
        {layer: its for layer, its in means.items() if layer not in exact}, "Relative error", "error, relative"
    )
    if not found and not relative:
        return None
    how = (
        "The error is the distance between what a batch computes and the exact embedding, here that of the worst "
        "node. Theorem 1 bounds it by the measured staleness and the model's Lipschitz constants, so no solid line "
        "lies above the dashed line of its colour; how far it lies below says how cautious the bound is."
    )
    body = [paragraph(how), figures(found)]
    if exact:
        body.append(paragraph(f"Without any error at each measurement: {', '.join(exact)}."))
    if relative:
        body += [paragraph("Mean error, divided by the mean norm of exact rows:"), figures(relative)]
    return Section("errors", "Errors and their bounds", "".join(body) + _left_out(errors))


def gradient_section(runs: Sequence[Shown]) -> Section | None:
    """How far gradients are from those of full batch."""
    found = curves(runs, "Cosine with the exact gradient", _gradient("cosine"), "cosine")
    found += curves(runs, "Relative error of the gradient", _gradient("relative_error"), "error")
    if not found:
        return None
    rows = []
    for run in runs:
        for layer in _layers(run.record.gradients[-1:]):
            numbers = (short(finite(layer.get(name)), 3) for name in ("cosine", "relative_error"))
            rows.append([str(layer.get("layer")), run.tag, *numbers])
    heads = ["weights", "run", "cosine", "relative error"]
    last = table(heads, rows, caption="Each weight's gradient at the last measurement") if rows else ""
    how = (
        "The gradient over all batches, with histories as they are, beside that of full batch with the same "
        "weights. Cosine 1 and error 0 mean that they are the same; since no gradient flows through histories, they "
        "may differ even when these are fresh."
    )
    return Section(
        "gradients", "Gradients", paragraph(how) + figures(found) + (folded("Weight by weight", last) if last else "")
    )


def lipschitz_section(runs: Sequence[Shown]) -> Section | None:
    """The Lipschitz constants of layers."""
    found = _layer_figures(_by_layer(runs, "lipschitz", "whole"), "Lipschitz constant", "constant")
    if not found:
        for kind in ("message", "update"):
            found += _layer_figures(_by_layer(runs, "lipschitz", kind), f"Constant of {kind}s", "constant")
    rows = [
        [
            str(layer.get("layer")),
            run.tag,
            *(short(finite(layer.get(kind)), 3) for kind in ("whole", "message", "update")),
        ]
        for run in runs
        for layer in _layers(run.record.lipschitz[-1:])
    ]
    last = table(["layer", "run", "whole", "message", "update"], rows, caption="Constants at the last measurement")
    how = (
        "How much a layer can enlarge an error in its input. Errors of layers multiply, so constants above 1 make "
        "deep models sensitive to stale histories; weight decay and the Lipschitz penalty keep them small."
    )
    body = paragraph(how) + figures(found) + folded("Messages and updates", last)
    return Section("lipschitz", "Lipschitz constants", body) if found else None


def _gradient(name: str) -> Callable[[Shown], list[Point]]:
    return lambda run: run.curve((name,), run.record.gradients)


def _layers(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All layers' entries of some records."""
    return [layer for record in records for layer in record.get("layers") or ()]


def _by_layer(runs: Sequence[Shown], kind: str, *path: str) -> _Layers:
    """One number of each layer by epoch, for each run that has it."""
    found: _Layers = {}
    for run in runs:
        records = [
            {"epoch": record.get("epoch"), str(layer.get("layer")): layer}
            for record in getattr(run.record, kind)
            for layer in _layers([record])
        ]
        for name in dict.fromkeys(key for record in records for key in record if key != "epoch"):
            points = run.curve((name, *path), records)
            if points:
                found.setdefault(name, []).append((run, points))
    return found


def _by_age(runs: Sequence[Shown]) -> _Layers:
    """Staleness of each layer by the age of rows, at the last measurement."""
    found: _Layers = {}
    for run in runs:
        for layer in _layers(run.record.staleness[-1:]):
            pairs = [(finite(row.get("age")), finite(row.get("staleness"))) for row in layer.get("by_age") or ()]
            points = sorted((age, mean) for age, mean in pairs if age is not None and mean is not None)
            if points:
                found.setdefault(str(layer.get("layer")), []).append((run, points))
    return found


def _layer_figures(layers: _Layers, title: str, y_title: str, *, x_title: str = "epoch") -> list[str]:
    """Layers as curves of one figure if there is one run; else a figure for each layer, all with the same axis."""
    some = _some(layers)
    values = [y for layer in some for _, points in layers[layer] for _, y in points]
    if not values:
        return []
    reach = (min(values), max(values))
    if len({run.number for its in layers.values() for run, _ in its}) == 1:
        # A tag is the end of a layer's name, such as 0 for convs.0.
        series = [Series(layer, layers[layer][0][1], at, layer.split(".")[-1][:3]) for at, layer in enumerate(some)]
        keys = [Key(one.name, one.color) for one in series]
        plot = line_chart(
            series, label=f"{title} by {x_title}, of {len(series)} layers", x_title=x_title, y_title=y_title
        )
        return [figure(title, plot, data=series_table(title, x_title, series), keys=keys)]
    found = []
    for layer in some:
        series = [run.series(points) for run, points in layers[layer]]
        name = f"{title}, {_called(layer)}"
        label = f"{name} by {x_title}, of {len(series)} runs"
        plot = line_chart(series, label=label, x_title=x_title, y_title=y_title, y_range=reach)
        found.append(figure(name, plot, data=series_table(name, x_title, series)))
    return found


def _some(layers: _Layers) -> list[str]:
    """A few of the layers, from the first to the last."""
    names = list(layers)
    return [names[index] for index in spaced(len(names), _MOST_LAYERS)]


def _left_out(layers: _Layers) -> str:
    if len(layers) <= _MOST_LAYERS:
        return ""
    return paragraph(f"{_MOST_LAYERS} of {len(layers)} layers are drawn; the run folders have all of them.")


def _called(layer: str) -> str:
    return "the output" if layer == "output" else layer
