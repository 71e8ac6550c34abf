"""A user's own training step, captured on a GPU as those of :func:`gnnautoscale.fit` are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import checked, map_tensors, weights_of
from gnnautoscale.attach import attached_alone, device_of, info_of
from gnnautoscale.replay.graphs import on_training_stream
from gnnautoscale.replay.packing import Placement
from gnnautoscale.replay.replayer import Replayer

# How often the numbers of an optimizer may change before its steps are no longer captured.
_MOST_CHANGES = 8


class OwnStep:
    """Runs a step of the user's own on batches; see :func:`capture`."""

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Data], Any],
        optimizers: tuple[torch.optim.Optimizer, ...],
        placement: Placement,
    ) -> None:
        self._step, self._optimizers = step, optimizers
        self._scaler, self._device = attached_alone(model, "capture"), device_of(model)
        self._replayer = Replayer(model, self._device, placement=placement)
        weights = [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]
        self._weights = list({id(weight): weight for weight in (*weights_of(model), *weights)}.values())
        # Gradients between two steps, at the addresses where captured steps read and write them.
        self._gradients: dict[int, Tensor] = {}
        self._after: dict[Hashable, list[bool]] = {}
        self._key: Hashable = None
        self._numbers: Hashable = None
        self._changes = -1
        if self._device.type == "cuda":
            for optimizer in optimizers:
                _make_capturable(optimizer, self._device)

    @property
    def how(self) -> str:
        """How steps run, in words: captured, or the reason why they are not."""
        return self._replayer.how

    def __call__(self, batch: Data) -> Any:
        """Run the step on a batch; returns what it returns, with tensors that need no gradient."""
        if self._device.type != "cuda":
            return map_tensors(torch.Tensor.detach, self._step(batch))
        with on_training_stream(self._device):
            form = self._form()
            self._key = info_of(batch).key, form
            result = self._replayer.run(batch, self._work, {}, form=form)
            ends = self._after.get(self._key)
            if ends is not None:
                for weight, has_gradient in zip(self._weights, ends, strict=True):
                    weight.grad = self._gradients[id(weight)] if has_gradient else None
            # The next replay writes into its own tensors.
            return map_tensors(lambda value: value.detach().clone(), result)

    def _work(self, batch: Data, _: dict[str, Tensor]) -> Any:
        """The step, after which gradients are in their places."""
        result = self._step(batch)
        ends = [self._settled(weight) for weight in self._weights]
        if torch.cuda.is_current_stream_capturing():
            self._after[self._key] = ends
        return result

    def _form(self) -> Hashable:
        """What a captured step depends on besides its batch; what was captured is forgotten if the model changed."""
        numbers = tuple(_numbers(optimizer) for optimizer in self._optimizers)
        state = self._scaler.version, numbers
        if state != self._numbers:
            self._numbers = state
            self._changes += 1
            self._replayer.forget()
            self._after.clear()
            if self._changes > _MOST_CHANGES and self._replayer.why_not is None:
                self._replayer.why_not = (
                    "the model or the numbers of an optimizer change all the time (give it a learning rate in a "
                    "tensor on the GPU, which schedules write to)"
                )
        starts = tuple(self._settled(weight) for weight in self._weights)
        modes = self._scaler.form.mode, torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        return starts, modes

    def _settled(self, weight: Tensor) -> bool:
        """Whether a weight has a gradient, which is brought to its place."""
        if weight.grad is None:
            return False
        kept = self._gradients.get(id(weight))
        if kept is None or kept.shape != weight.grad.shape:
            kept = self._gradients[id(weight)] = torch.empty_like(weight.grad)
        if weight.grad is not kept:
            kept.copy_(weight.grad)
            weight.grad = kept
        return True


@checked(
    step={"fix": "Pass a function of a batch: def step(batch): ..."},
    optimizers={"fix": "Pass capture(model, step, optimizer)."},
)
def capture(
    model: nn.Module,
    step: Callable[[Data], Any],
    *optimizers: torch.optim.Optimizer,
    batches_on: Placement = "auto",
) -> OwnStep:
    """Make a training step of your own a fast one: on a GPU it is captured as a CUDA graph for each batch.

    The step gets a batch and does what a step does: it calls the model, computes one loss or several, calls
    ``backward``, and lets optimizers step, or leaves gradients there for a later step. The first calls run as they are.
    After that, batches that come back (one part per batch, no shuffling, or few drawings) are captured, and a replay
    runs none of the step's Python code. So everything that changes must be in tensors on the GPU, and nothing may wait
    for values on the host, such as ``.item()``, ``if mask.any()`` or ``out[mask]``. A step that does runs as it is;
    :attr:`OwnStep.how` says why.

    Args:
        model: An autoscaled model on its device.
        step: Called with a batch of a loader on that device; see ``HaloLoader(..., device=...)``. It returns a tensor,
            or a tuple, list or dictionary of tensors, or nothing.
        optimizers: The optimizers that the step uses. On a GPU their ``capturable`` is switched on.
        batches_on: Where captured batches live: all of them on the ``"device"``, one at a time (``"host"``), or all if
            they fit (``"auto"``).

    Returns:
        The step, to be called with each batch.

    Example:
        >>> import torch.nn.functional as F
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> import gnnautoscale as gas
        >>> data = KarateClub()[0]
        >>> data.y_train = torch.where(data.train_mask, data.y, -1)  # cross_entropy ignores the others
        >>> model = gas.autoscale(GCN(34, 16, num_layers=2, out_channels=4), data)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> def train(batch):
        ...     optimizer.zero_grad()
        ...     out = model(batch.x, batch.edge_index)
        ...     loss = F.cross_entropy(out, batch.y_train[: batch.batch_size], ignore_index=-1, reduction="sum")
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = gas.capture(model, train, optimizer)
        >>> losses = [step(batch) for batch in gas.HaloLoader(data, num_parts=4)]
        >>> step.how
        'uncaptured: CUDA graphs need a GPU'
    """
    return OwnStep(model, step, optimizers, batches_on)


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):
        if "capturable" in group:
            group["capturable"] = True
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def _numbers(optimizer: torch.optim.Optimizer) -> Hashable:
    """Everything in an optimizer's groups that a captured step would not read again."""
    return tuple(
        (name, id(value) if isinstance(value, Tensor) else repr(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ("params", "initial_lr")
    )
