"""A model with hooks, and what it is like now; which models can have histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale.errors import InputError, UnsupportedModelError
from gnnautoscale.forward import OVERRIDES, Form, Hooks, Plan, Watch, describe, has_hooks, held_tensors


class HookedModel:
    """A model whose calls arrive elsewhere, and which is watched for changes.

    Args:
        model: The model.
        owner: Is found as the model's ``_autoscaler``.
        run: Takes the place of the model's ``forward``.
    """

    def __init__(self, model: nn.Module, owner: object, run: Callable[..., Any]) -> None:
        check_model(model)
        self._model, self._owner = model, owner
        self.hooks = Hooks(model, run)
        self._form: Form | None = None
        self._version = 0
        # The weights and buffers that the model may branch on.
        self._reads: frozenset[str] = frozenset()
        self._attach()

    def _attach(self) -> None:
        """Attach hooks to all layers that the model has now."""
        self.hooks.attach()
        self.hooks.override(self._model, "_autoscaler", self._owner)
        #: The model's weights, kept because finding them takes time in every step.
        self.weights = list(self._model.parameters())
        self._watch = Watch(self._model)

    def planned(self, plan: Plan) -> None:
        """Take note of a plan that was made: of what the model changes itself, and what it may branch on."""
        self._watch.ignored |= plan.harmless
        self._reads |= plan.reads
        self._watch.look()  # lazy weights have their shapes now

    def values_read(self) -> list[Tensor]:
        """The weights, buffers and other tensors of the model that it may branch on."""
        if not self._reads:
            return []
        named = (*self._model.named_parameters(), *self._model.named_buffers(), *held_tensors(self._model))
        return [value for name, value in named if name in self._reads]

    @property
    def version(self) -> int:
        """Changes when the model does, apart from its weights and its mode."""
        form = self.form._replace(mode=None)
        if form != self._form:
            self._form, self._version = form, self._version + 1
        return self._version

    @property
    def form(self) -> Form:
        """The model's modules, modes and attributes as they are now; layers that were replaced get hooks."""
        if self._watch.has_changed():
            changed, before = self._watch.changes(), self._watch.modules
            if replaced := [f"{path}.{name}" for path, name in changed if name in OVERRIDES and path in before]:
                raise InputError(
                    "the methods that hooks override must stay as they are while a model is autoscaled",
                    got=f"another {replaced[0]}",
                    fix="Call gas.detach(model), replace the method, and autoscale the model again.",
                )
            self._watch.look()
            if [*before.values()] != [*self._watch.modules.values()]:
                with self.hooks.lifted() as model:
                    check_model(model)
                ignored = self._watch.ignored
                self._attach()
                self._watch.ignored = ignored
        return self._watch.form


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot have histories."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MessagePassing)]
    if not layers:
        raise UnsupportedModelError(
            "an autoscaled model needs at least one message-passing layer (torch_geometric.nn.MessagePassing)",
            got=f"{type(model).__name__} without one",
            fix="Train a model that passes no messages on plain batches of nodes; it needs no histories.",
        )
    for module in model.modules():
        if has_hooks(module) or "_autoscaler" in vars(module):
            raise InputError(
                "a model can be autoscaled only once, and only as a whole",
                got=f"{type(module).__name__}, which is, or belongs to, an autoscaled model",
                fix="Call gas.detach on that model first.",
            )
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(
                "histories need the original model",
                got=f"{type(module).__name__}, which torch.compile has wrapped",
                fix="Pass the uncompiled model; on a GPU, gas.fit captures whole training steps as CUDA graphs.",
            )
    for name, layer in layers:
        if getattr(layer, "cached", False):
            raise UnsupportedModelError(
                f"{describe(name, layer)} must compute its edges in every call",
                got="cached=True, which would reuse the edges of the first batch",
                fix="Create it with cached=False; the normalized edges are recorded once anyway.",
            )
