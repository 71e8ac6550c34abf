"""Attaches histories to a model that several ranks train together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import Linear  # type: ignore[import-untyped]

from gnnautoscale._util import checked, state_of
from gnnautoscale.attach import attached, plan_of
from gnnautoscale.attach import autoscale as attach_histories
from gnnautoscale.errors import InputError
from gnnautoscale.forward import TypedMemory
from gnnautoscale.history import History
from gnnautoscale.ranks.exchange import Ghosts
from gnnautoscale.ranks.gradients import GradientMean
from gnnautoscale.ranks.loader import RankLoader
from gnnautoscale.ranks.norms import RankNorms

M = TypeVar("M", bound=nn.Module)


@checked(lag={"least": 0, "below": 2})
def autoscale(
    model: M,
    loader: RankLoader,
    *,
    also: Sequence[nn.Module] = (),
    lag: int = 0,
    sync_norms: bool = False,
    **options: Any,
) -> M:
    """Train a model on all ranks together, in batches of a :class:`RankLoader`.

    It is :func:`gnnautoscale.autoscale`, and besides: weights become those of the first rank; every ``backward()`` ends
    with the mean of all ranks' gradients; and what a step pushes goes to the ranks that need it.

    Args:
        model: The model; it is returned.
        loader: The rank's loader.
        also: Further modules that the loop trains, such as a head or a decoder; ranks share their gradients, too.
        lag: How many steps more the rows of other ranks may take to arrive: 0, so that a pull sees all pushes of the
            step before; or 1, so that it sees those of the one before that, and slow networks hide behind a whole step.
        sync_norms: Whether batch norms take their statistics over the batches of all ranks.
        options: Those of :func:`gnnautoscale.autoscale`. A folder for histories gets one folder for each rank.

    Example:
        >>> from torch_geometric.datasets import KarateClub
        >>> from torch_geometric.nn import GCN
        >>> loader = RankLoader(KarateClub()[0], num_parts=4)
        >>> model = autoscale(GCN(34, 16, num_layers=2, out_channels=4), loader)
    """
    attach_shared(model, loader, lag=lag, sync_norms=sync_norms, **options)
    if loader.world.size > 1:
        if any(is_lazy(weight) for weight in model.parameters()):
            plan_of(model, loader)  # gives them their shapes, so that ranks can have the same ones
        lazy = [type(each).__name__ for each in also if any(is_lazy(weight) for weight in each.parameters())]
        if lazy:
            fix = "Give it its number of inputs."
            raise InputError("modules that ranks train have weights with shapes", got=f"a lazy {lazy[0]}", fix=fix)
        loader.world.agree({"modules beside the model": [form_of(each) for each in also]})
        average_gradients(model, loader, *also)
    return model


def attach_shared(
    model: nn.Module, loader: RankLoader, *, lag: int = 0, sync_norms: bool = False, **options: Any
) -> None:
    """Attach histories whose ghosts are kept up to date; see :func:`autoscale`."""
    if isinstance(lag, bool) or lag not in (0, 1):
        raise InputError("lag must be 0 or 1", got=repr(lag), fix="Leave it out for 0.")
    if not isinstance(loader, RankLoader):
        fix = "Make one with gnnautoscale.ranks.RankLoader(data, ...)."
        raise InputError("ranks share a graph through a RankLoader", got=type(loader).__name__, fix=fix)
    if loader.shard is None:
        attach_histories(model, loader.data, **options)
        return
    if not loader.is_typed:  # there batches have the numbers of the whole graph
        _check_no_table(model, loader.shard.whole["nodes"])
    if options.get("compensate", "none") != "none" and not loader.shard.bidirectional:
        fix = "Build it with RankLoader(..., bidirectional=True)."
        raise InputError("ranks compensate with a bidirectional loader", got="another one", fix=fix)
    if options.get("history_dir") is not None:
        options["history_dir"] = Path(options["history_dir"]) / f"rank-{loader.shard.rank}"
    told = {name: options.get(name) for name in ("dtype", "edge_dropout", "compensate")}
    loader.world.agree({"model": form_of(model), **told, "lag": lag, "sync_norms": sync_norms})
    attach_histories(model, loader.data, **options)
    memory = attached(model).memory
    if loader.steps is None:
        return
    memory.sharing = ghosts = Ghosts(loader.steps)
    ghosts.lag = lag
    ghosts.follow(lambda: memory.records_by_kind)
    if sync_norms:
        attached(model).normalize_by(RankNorms(loader.world))
        ghosts.meets_within = True


def form_of(model: nn.Module) -> tuple[str, dict[str, tuple[int, ...]]]:
    """What ranks compare of a model: how it was made, but for where functions are in memory, and its shapes.

    Example:
        >>> form_of(nn.Linear(2, 1))
        ('Linear(in_features=2, out_features=1, bias=True)', {'weight': (1, 2), 'bias': (1,)})
    """
    made = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    return made, {name: tuple(value.shape) for name, value in state_of(model).items()}


def last_gradients(memory: Any) -> dict[str, list[History]]:
    """The last known gradients of a memory's slots, in the order of these, by type of nodes."""
    kinds = memory.kinds if isinstance(memory, TypedMemory) else {"": memory}
    return {kind: [each.last_gradients[slot] for slot in sorted(each.last_gradients)] for kind, each in kinds.items()}


def _check_no_table(model: nn.Module, num_nodes: int) -> None:
    """Refuse a model that looks rows up by the numbers of nodes, since each rank numbers those of its share anew."""
    for name, module in model.named_modules():
        for own_name, weight in module.named_parameters(recurse=False):
            is_table = not is_lazy(weight) and weight.dim() > 1 and weight.size(0) == num_nodes
            if is_table and not isinstance(module, (nn.Linear, Linear)):
                raise InputError(
                    "on several ranks a model has no rows of its own for all nodes, since ranks number nodes anew",
                    got=f"'{f'{name}.{own_name}'.lstrip('.')}' of shape {tuple(weight.shape)}",
                    fix="Give nodes features, or train in one process.",
                )


@checked()
def average_gradients(model: nn.Module, loader: RankLoader, *further: nn.Module, **options: Any) -> GradientMean:
    """Let every backward pass end with the mean of all ranks' gradients, also those of ``further`` modules."""
    scaler = attached(model)

    def after_backward() -> None:
        if scaler.compensate == "gradient":
            scaler.memory.send_gradients()

    made = GradientMean(loader.world, [model, *further], after=after_backward, **options)
    if isinstance(ghosts := scaler.memory.sharing, Ghosts):
        ghosts.mean, made.meets_within = made, ghosts.meets_within
    return made
