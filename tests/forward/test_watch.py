"""Which changes of a model a watch notices, and which of them are changes of numbers alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnnautoscale.forward.watch import Attribute, Form, Watch, form_of, form_of_values

LIMIT = 3.0


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    options = {"factor": factor}
    scaled_by.options = options  # type: ignore[attr-defined]
    return lambda x: options["factor"] * x


class Model(nn.Module):
    """Has one of everything that a plan may depend on."""

    power = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)
        self.depth, self.rate, self.centred, self.kind = 1000, 0.5, False, "mean"
        self.sizes, self.options, self.names, self.pair = [1000, 2000], {"p": 0.5, "kind": "a"}, {"a"}, (1, [2.5])
        self.config = SimpleNamespace(rate=0.5, inner=SimpleNamespace(flag=True), steps=[1, 2])
        self.scale = scaled_by(2.0)
        self.table = torch.zeros(3)
        self.known: Tensor
        self.register_buffer("known", torch.tensor(False))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.first(x)).clamp(max=LIMIT) ** self.power


def watched() -> tuple[Any, Watch, Form]:
    model = Model()
    watch = Watch(model)
    return model, watch, watch.form


def seen(watch: Watch) -> Form:
    watch.look()
    return watch.form


# Nothing changes #####################################################################################################


def test_training_changes_nothing() -> None:
    model, watch, before = watched()
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    model.total.add_(1.0)
    model.table.add_(1.0)
    model.eval()
    model.train()
    assert not watch.has_changed()
    assert watch.changes() == set()
    assert seen(watch) == before


def test_another_tensor_of_the_same_kind_is_no_change() -> None:
    model, watch, before = watched()
    model.table, model.first.weight = torch.ones(5), nn.Parameter(torch.ones(2, 2))
    assert watch.has_changed()
    assert watch.changes() == {("", "table"), ("first", "_parameters")}
    assert seen(watch) == before
    assert not watch.has_changed()


def test_equal_models_have_equal_forms() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    assert Watch(copy.deepcopy(model)).form == Watch(model).form
    assert form_of(model) == form_of(copy.deepcopy(model))
    assert form_of(model) != form_of(model[0])


def test_the_copy_of_a_watch_watches_the_copy_of_its_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    watch = Watch(model)
    other: Any
    other, others = copy.deepcopy((model, watch))
    assert others.has_changed()  # it has not looked yet
    assert seen(others) == watch.form
    other[1].p = 0.5
    assert others.has_changed()
    assert not watch.has_changed()


# Something changes ###################################################################################################


# How to change the model, and which attribute that is.
NUMBERS: dict[str, tuple[Callable[[Any], object], Attribute]] = {
    "attribute": (lambda model: setattr(model, "depth", 2000), ("", "depth")),
    "attribute of a submodule": (lambda model: setattr(model.drop, "p", 0.7), ("drop", "p")),
    "item of a list": (lambda model: model.sizes.__setitem__(1, 3000), ("", "sizes")),
    "item of a dictionary": (lambda model: model.options.update(p=0.75), ("", "options")),
    "item of a list in a tuple": (lambda model: model.pair[1].__setitem__(0, 3.5), ("", "pair")),
    "configuration": (lambda model: setattr(model.config, "rate", 0.75), ("", "config")),
    "list in a configuration": (lambda model: model.config.steps.__setitem__(0, 7), ("", "config")),
    "variable of a function": (lambda model: scaled_by.options.update(factor=3.5), ("", "scale")),  # type: ignore[attr-defined]
}
STRUCTURE: dict[str, tuple[Callable[[Any], object], Attribute]] = {
    "flag": (lambda model: setattr(model, "centred", True), ("", "centred")),
    "text": (lambda model: setattr(model, "kind", "max"), ("", "kind")),
    "type": (lambda model: setattr(model, "depth", "1000"), ("", "depth")),
    "new attribute": (lambda model: setattr(model, "extra", None), ("", "extra")),
    "removed attribute": (lambda model: delattr(model, "kind"), ("", "kind")),
    "longer list": (lambda model: model.sizes.append(1), ("", "sizes")),
    "key of a dictionary": (lambda model: model.options.update(q=1), ("", "options")),
    "text in a dictionary": (lambda model: model.options.update(kind="b"), ("", "options")),
    "item of a set": (lambda model: model.names.add("b"), ("", "names")),
    "flag in a configuration": (lambda model: setattr(model.config.inner, "flag", False), ("", "config")),
    "function": (lambda model: setattr(model, "scale", torch.tanh), ("", "scale")),
    "shape of a weight": (
        lambda model: setattr(model.first, "weight", nn.Parameter(torch.ones(2, 3))),
        ("first", "_parameters"),
    ),
    "type of a tensor": (lambda model: setattr(model, "table", model.table.long()), ("", "table")),
    "module": (lambda model: setattr(model, "drop", nn.ReLU()), ("", "_modules")),
    "new module": (lambda model: model.add_module("last", nn.ReLU()), ("", "_modules")),
    "hook": (lambda model: model.drop.register_forward_hook(print), ("drop", "_forward_hooks")),
    "hook before": (lambda model: model.drop.register_forward_pre_hook(print), ("drop", "_forward_pre_hooks")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_changes_numbers_only(name: str) -> None:
    change, attribute = NUMBERS[name]
    model, watch, before = watched()
    change(model)
    assert watch.has_changed()
    assert watch.changes() == {attribute}
    after = seen(watch)
    assert after.structure == before.structure
    assert after.numbers != before.numbers
    assert not watch.has_changed()


@pytest.mark.parametrize("name", STRUCTURE)
def test_anything_else_changes_the_structure(name: str) -> None:
    change, attribute = STRUCTURE[name]
    model, watch, before = watched()
    change(model)
    assert watch.has_changed()
    assert watch.changes() == {attribute}
    assert seen(watch).structure != before.structure
    assert not watch.has_changed()


def test_attributes_of_the_class_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch, before = watched()
    monkeypatch.setattr(Model, "power", 2.5)
    assert watch.changes() == {("Model", "power")}
    assert seen(watch).structure == before.structure
    monkeypatch.setattr(Model, "forward", lambda model, x: x)
    assert watch.has_changed()
    assert watch.changes() == {("Model", "forward")}
    assert seen(watch).structure != before.structure


def test_global_variables_that_methods_read_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch, before = watched()
    monkeypatch.setitem(globals(), "LIMIT", 4.0)
    assert watch.has_changed()
    assert watch.changes() == {("Model", "LIMIT")}
    after = seen(watch)
    assert after.structure == before.structure
    assert after != before
    monkeypatch.setitem(globals(), "OTHER", 1)  # which no method reads
    assert not watch.has_changed()


def test_flags_in_buffers_are_watched() -> None:
    model, watch, before = watched()
    model.known.fill_(True)
    assert watch.has_changed()
    assert watch.changes() == set()  # the buffer is the same one
    assert seen(watch).structure != before.structure
    model.known.fill_(False)
    assert seen(watch) == before


# Modes ###############################################################################################################


def test_modes_are_part_of_the_form() -> None:
    model, watch, training = watched()
    model.eval()
    assert watch.has_changed()
    assert watch.changes() == {("", "training"), ("first", "training"), ("drop", "training")}
    evaluation = seen(watch)
    assert evaluation != training
    model.train()
    assert seen(watch) == training
    model.drop.eval()  # one module alone
    assert seen(watch) not in (training, evaluation)
    model.eval()
    assert seen(watch) == evaluation


# What is ignored #####################################################################################################


def test_ignored_attributes_are_left_out_of_the_form() -> None:
    model, watch, before = watched()
    watch.ignored = {("", "depth"), ("", "sizes")}
    plain = seen(watch)
    assert plain != before
    model.depth = 2000
    model.sizes.append(3)
    assert watch.has_changed()
    assert seen(watch) == plain
    model.rate = 0.75
    assert seen(watch) != plain


def test_modules_are_listed_by_path() -> None:
    model, watch, _ = watched()
    assert list(watch.modules) == ["", "first", "drop"]
    model.drop = nn.Sequential(nn.ReLU())
    assert list(watch.modules) == ["", "first", "drop"]  # as of the last look
    watch.look()
    assert list(watch.modules) == ["", "first", "drop", "drop.0"]
    assert watch.modules["drop"] is model.drop


# Values ##############################################################################################################


@pytest.mark.parametrize(
    ("value", "same_structure", "other_structure"),
    [
        (1, 2, True),
        (0.5, 0.25, 1),
        ("a", "a", "b"),
        (None, None, False),
        ([1, 2.0], [3, 4.0], [1]),
        ({"a": 1}, {"a": 2}, {"b": 1}),
        ((1, "a"), (2, "a"), (1, "b")),
        (torch.zeros(3), torch.ones(5), torch.zeros(3, dtype=torch.long)),
        (torch.tensor(True), torch.tensor(True), torch.tensor(False)),
    ],
)
def test_numbers_in_values_are_apart(value: Any, same_structure: Any, other_structure: Any) -> None:
    assert form_of_values(value).structure == form_of_values(same_structure).structure
    assert form_of_values(value).structure != form_of_values(other_structure).structure


def test_numbers_come_in_order() -> None:
    assert form_of_values([1, {"a": (2.5, "text", None)}, True, 3j]).numbers == (1, 2.5, 3j)
