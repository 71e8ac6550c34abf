"""Connects the modules of a model to the session that runs, and disconnects them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing  # type: ignore[import-untyped]

from gnnautoscale._util import map_tensors
from gnnautoscale.errors import UnsupportedModelError
from gnnautoscale.forward.copying import copy_model
from gnnautoscale.forward.memo import with_memory
from gnnautoscale.forward.record import EDGE_METHODS, Arguments, describe
from gnnautoscale.forward.session import Session
from gnnautoscale.graph import BatchTensor


class Hooks:
    """Overrides methods of message-passing layers and batch norms; ``forward`` replaces the model's forward pass."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        #: The running pass, if any.
        self.session: Session | None = None
        self._model, self._forward = model, forward
        self._overridden: list[tuple[nn.Module, str, Any]] = []
        self.attach()

    def attach(self) -> None:
        """Override the methods of all layers and norms that the model has now."""
        self.remove()
        for name, module in self._model.named_modules():
            if isinstance(module, MessagePassing):
                forward = with_memory(module.forward, lambda: self.session)
                run = partial(self._layer, module, name or type(module).__name__, forward)
                self.override(module, "forward", in_place_of(module.forward, run))
                self.override(module, "SUPPORTS_FUSED_EDGE_INDEX", True)
                for method in EDGE_METHODS:
                    self.override(module, method, partial(self._edges, method, getattr(module, method)))
            elif isinstance(module, _BatchNorm):
                self.override(module, "forward", partial(self._batch_norm, name, module, module.forward))
        self._run_model = self._model.forward  # overridden above if the model is a single layer
        self.override(self._model, "forward", self._forward)
        self.override(self._model, "_history_hooks", self)

    def override(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module until :meth:`remove`."""
        self._overridden.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value

    def remove(self) -> None:
        """Undo all overrides."""
        for module, name, before in reversed(self._overridden):
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before
        self._overridden.clear()

    @contextmanager
    def lifted(self) -> Iterator[nn.Module]:
        """The model without its hooks, for as long as this context lasts."""
        hooks = [(module, name, module.__dict__[name]) for module, name, _ in self._overridden]
        before = self._overridden.copy()
        self.remove()
        try:
            yield self._model
        finally:
            for module, name, hook in hooks:
                module.__dict__[name] = hook
            self._overridden = before

    def bare_copy(self, *, share_above: int | None = None) -> nn.Module:
        """A copy of the model without hooks, in the same mode; see :func:`copy_model`."""
        with self.lifted() as model:
            return copy_model(model, share_above=share_above)

    def run(self, session: Session | None, arguments: Arguments) -> Any:
        """Run the model's own forward pass in a session; ``None`` stays in the running one."""
        before, self.session = self.session, session or self.session
        if session is not None and session.plan.ignores_edges:
            arguments = map_tensors(_without_edges, arguments)
        try:
            with nullcontext() if session is None else session.around_model():
                return self._run_model(*arguments[0], **arguments[1])
        finally:
            self.session = before

    def _layer(self, layer: MessagePassing, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            raise UnsupportedModelError(
                f"{describe(name, layer)} of an autoscaled model runs in the model's forward pass",
                got="a call outside it, by hand or by gradient checkpointing",
                fix="Call the whole model, or detach it to use its layers by themselves. Histories make checkpointing "
                "unnecessary.",
            )
        return self.session.layer(layer, name, run, (args, kwargs))

    def _edges(self, method: str, run: Callable[..., Any], edge_index: Tensor, size: Any = None, **values: Any) -> Any:
        if self.session is None:
            return run(edge_index, size=size, **values)
        return getattr(self.session, method)(run, edge_index, size, values)

    def _batch_norm(
        self, name: str, norm: _BatchNorm, run: Callable[[Tensor], Tensor], *args: Tensor, **kwargs: Tensor
    ) -> Tensor:
        (x,) = (*args, *kwargs.values())
        return run(x) if self.session is None else self.session.batch_norm(name, norm, run, x)


def in_place_of(forward: Callable[..., Any], run: partial[Any]) -> Callable[..., Any]:
    """What runs instead of a forward pass, with its signature: a model may ask which arguments a layer takes."""
    return update_wrapper(run, forward, assigned=(), updated=())


def running_session(model: nn.Module) -> Session | None:
    """The pass that a model's hooks run, if any."""
    hooks = model.__dict__.get("_history_hooks")
    return hooks.session if isinstance(hooks, Hooks) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are attached to a module."""
    overrides = (module.__dict__.get(name) for name in ("forward", *EDGE_METHODS))
    return any(isinstance(run, partial) and isinstance(getattr(run.func, "__self__", None), Hooks) for run in overrides)


def _without_edges(value: Tensor) -> Tensor:
    """Empty a batch's edge-level tensor, which saves layers the time to process it."""
    return value.emptied() if isinstance(value, BatchTensor) and value.is_own_edges else value
