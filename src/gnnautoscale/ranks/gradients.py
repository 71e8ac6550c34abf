"""The mean of the ranks' gradients, added up while the backward pass goes on."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gnnautoscale._util import weights_of
from gnnautoscale.errors import InputError
from gnnautoscale.ranks.world import Arrival, World

# Values that are added up at once; a backward pass finds the gradients of the last layers first.
_BUCKET = 1 << 20
# All weights whose gradients are those of all ranks, by identity.
_shared: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


class GradientMean:
    """Gives the weights of a model the mean of all ranks' gradients, at the end of every backward pass.

    So a step is that of one process that adds up the gradients of all ranks' batches and divides by their number. What
    modules keep besides weights, such as the running averages of batch norms, becomes the mean as well. A rank without
    anything to learn in a step calls :meth:`join` instead of a backward pass, and does not count in the
    mean.

    Args:
        world: The ranks.
        modules: What is trained. Weights and buffers become those of the first rank now.
        after: Called at the end of every backward pass, on every rank.
        wish: Whether this rank wants to stop; all ranks learn of it in :attr:`stop`.
    """

    def __init__(
        self,
        world: World,
        modules: Iterable[nn.Module],
        *,
        after: Callable[[], None] | None = None,
        wish: Callable[[], bool] = lambda: False,
    ) -> None:
        modules = list(modules)
        self.world, self._after, self.wish = world, after, wish
        weights = weights_of(*modules)
        self._weights: list[Tensor] = [weight for weight in weights if weight.requires_grad]
        self._frozen: list[Tensor] = [weight for weight in weights if not weight.requires_grad]
        _shared.update({id(weight): weight for weight in self._weights})
        self._knows_optimizers = False
        buffers = [buffer for module in modules for buffer in module.buffers()]
        world.same([*weights, *buffers])
        self._averages = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._buckets = _buckets(self._weights)
        self._bucket_of = {id(weight): number for number, bucket in enumerate(self._buckets) for weight in bucket}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for weight in self._weights
        ]
        #: Whether this rank counts in the mean of the present step.
        self.counts = True
        #: Whether backward passes need all ranks on the way, not only at their end.
        self.meets_within = False
        #: How many ranks had something to learn in the last step, and whether any rank wants to stop.
        self.learners, self.stop = 0, False
        #: Whether backward passes leave gradients as they are for now.
        self.waits = False
        # The size of each rank's weights in the last step.
        self._weight_sizes: _Later | None = None
        self._reset()

    @contextmanager
    def later(self) -> Iterator[None]:
        """Within, backward passes leave gradients as they are, until :meth:`average` is called."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    @property
    def weights(self) -> Sequence[Tensor]:
        """See :attr:`Learner.weights`."""
        return self._weights

    def gradients(self) -> list[Tensor | None]:
        """The gradients of all weights as they are."""
        return [weight.grad for weight in self._weights]

    def average(self, gradients: Sequence[Tensor | None], *, counts: bool) -> None:
        """Give the weights the mean of the gradients of all ranks, of which these are those of this one.

        The mean takes their place in memory; ``counts`` says whether this rank counts in it.
        """
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        self.counts = counts
        self._finish()

    @property
    def trained(self) -> bool:
        """Whether any rank had something to learn in the last step."""
        return self.learners > 0

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def join(self) -> bool:
        """Take part in a step without anything to learn; returns whether any rank had something."""
        self.average([None] * len(self._weights), counts=False)
        return self.trained

    def leave_out(self) -> Callable[[], Sequence[torch.optim.Optimizer] | None]:
        """See :meth:`Learner.leave_out`."""
        before, self.counts = self.gradients(), False
        for weight in self._weights:
            weight.grad = None

        def end() -> Sequence[torch.optim.Optimizer] | None:
            if self.trained:
                return self._find_optimizers()
            for weight, gradient in zip(self._weights, before, strict=True):
                weight.grad = gradient  # what steps before have added up stays
            return None

        return end

    def _check_weights(self) -> None:
        """Refuse to train weights whose gradients would be those of one rank."""
        optimizers = [] if self._knows_optimizers else self._find_optimizers()
        own = sum(_is_apart(weight) for optimizer in optimizers for weight in _stepped(optimizer))
        own += sum(weight.requires_grad for weight in self._frozen)
        if own:
            self._reset()
            raise InputError(
                "ranks train together the weights of a model and of modules named beside it, unless they begin frozen",
                got=f"{own} others that an optimizer steps, or that were unfrozen since",
                fix="Name other modules, ranks.autoscale(model, loader, also=[head]), and unfreeze weights before.",
            )
        if not self._knows_optimizers:
            others = (weight for each in _optimizers() if each not in optimizers for weight in _stepped(each))
            self._beside = _Beside(filter(_is_apart, others))
        elif self._running and (count := self._beside.leave(self._pass)):
            warnings.warn(
                f"each rank trains {count} weights apart, which another optimizer steps; if they belong to a head of "
                "this model, name it: ranks.autoscale(model, loader, also=[head])",
                stacklevel=2,
            )
        self._knows_optimizers = True

    def _find_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the weights, which only the user's loop knows."""
        mine = {id(weight) for weight in self._weights}
        found = [each for each in self._optimizers if each() is not None]
        if not found:
            ours = (each for each in _optimizers() if any(id(weight) in mine for weight in _stepped(each)))
            found = [weakref.ref(each) for each in ours]
            self._optimizers = found
        return [optimizer for each in found if (optimizer := each()) is not None]

    def _reset(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums: list[tuple[list[Tensor], Tensor, Arrival]] = []
        self.counts, self._running = True, False

    def _arrived(self, weight: Tensor) -> None:
        """The gradient of a weight is known: send it off with those of its bucket, once all before it are gone."""
        if self.waits:
            return
        if not self._running:
            self._running, self._pass = True, torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of[id(weight)]
        self._missing[bucket] -= 1
        while len(self._sums) < len(self._buckets) and self._missing[len(self._sums)] == 0:
            self._send(self._buckets[len(self._sums)])

    def _send(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([_gradient(weight).flatten() for weight in bucket]).to(self.world.wire)
        self._sums.append((bucket, flat, self.world.sum(flat)))

    def _finish(self) -> None:
        """Add up what is left, wait for all of it, and put the means in place.

        The host waits for the other ranks' hosts, but not for a GPU.
        """
        self.world.open.remove(self)
        self._check_weights()
        for bucket in self._buckets[len(self._sums) :]:
            self._send(bucket)
        facts = self._send_facts()
        here = [float(weight.grad is not None) for weight in self._weights]
        counts, wishes, *known = self.world.add_up(float(self.counts), float(self.wish()), *here)
        self.learners, self.stop = int(counts), wishes > 0
        self._take_facts(facts)
        known_at = {id(weight): count > 0 for weight, count in zip(self._weights, known, strict=True)}
        places: list[Tensor] = []
        means: list[Tensor] = []
        for bucket, _, arrival in self._sums:
            parts = torch.split(arrival.wait().div_(max(counts, 1.0)), [weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                if not known_at[id(weight)]:
                    weight.grad = None
                elif weight.grad is None:
                    weight.grad = part.view_as(weight).to(weight.device, copy=True)
                else:
                    places.append(weight.grad)
                    means.append(part.view_as(weight))
        if places:
            torch._foreach_copy_(places, means)
        self._reset()
        if self._after is not None:
            self._after()

    def _send_facts(self) -> Arrival:
        """Start to add up the size of each rank's weights, and the running averages of all."""
        facts = torch.zeros(self.world.size, dtype=torch.double, device=self.world.wire)
        # As one number, by which loops that differ are noticed, since they would let weights drift apart.
        facts[self.world.rank] = nn.utils.get_total_norm(weight.detach() for weight in self._weights)
        averages = (average.flatten().to(facts) for average in self._averages)
        return self.world.sum(torch.cat([facts, *averages]))

    def _take_facts(self, facts: Arrival) -> None:
        """Take the means of running averages, and compare the sizes of the weights in the step before."""
        sizes, *averages = torch.split(facts.wait(), [self.world.size, *(each.numel() for each in self._averages)])
        for average, values in zip(self._averages, averages, strict=True):
            average.copy_((values / self.world.size).view_as(average))
        before, self._weight_sizes = self._weight_sizes, _Later(sizes)
        # Those of this step are still being computed.
        told = [] if before is None else before.read()
        if len({repr(size) for size in told}) > 1:
            self._reset()
            rule = "all ranks must make the same steps with the same weights"
            fix = (
                "Let every rank do the same between backward() and step(), such as clipping; without labels let it "
                "do so with a loss of zero, out.sum() * 0."
            )
            raise InputError(rule, got=f"weights that differ, of sizes {told}", fix=fix)


def _optimizers() -> list[torch.optim.Optimizer]:
    """All optimizers of this process."""
    # By type, since some of PyTorch's objects warn when they are asked for their class.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights that an optimizer steps."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _is_apart(weight: Tensor) -> bool:
    """Whether a weight learns, but not together with other ranks."""
    return weight.requires_grad and _shared.get(id(weight)) is not weight


class _Beside:
    """Weights that are not the model's, and which of them learn in a backward pass of the model."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._passes: dict[int, int] = {}
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for weight in weights
        ]

    def _note(self, weight: Tensor) -> None:
        self._passes[id(weight)] = torch._C._current_graph_task_id()

    def leave(self, number: int) -> int:
        """How many of them learned in a pass; they are not looked at any more."""
        for hook in self._hooks:
            hook.remove()
        found, self._passes = self._passes, {}
        return sum(each == number for each in found.values())


class _Later:
    """Numbers that are copied from a GPU, to be read later."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None

    def read(self) -> list[float]:
        """The numbers."""
        if self._there is not None:
            self._there.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()


def _buckets(weights: list[Tensor]) -> list[list[Tensor]]:
    """Weights of one type each, the last layers' first, up to a number of values."""
    buckets: list[list[Tensor]] = []
    for weight in reversed(weights):
        last = buckets[-1] if buckets else []
        fits = last and last[0].dtype == weight.dtype and sum(each.numel() for each in last) < _BUCKET
        if fits:
            last.append(weight)
        else:
            buckets.append([weight])
    return buckets
