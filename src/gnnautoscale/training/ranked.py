"""Training on several ranks: what differs from one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data  # type: ignore[import-untyped]

from gnnautoscale._util import set_random_states
from gnnautoscale.data import Dataset, TypedDataset
from gnnautoscale.errors import InputError
from gnnautoscale.ranks import COUNTS, RankLoader, Shard, TypedShard, World, current, last_gradients
from gnnautoscale.runs import FitResult
from gnnautoscale.tasks import Task
from gnnautoscale.training.checkpoint import Checkpoint
from gnnautoscale.training.feed import Item
from gnnautoscale.training.flow import Flow
from gnnautoscale.training.identity import key_of, targets_of
from gnnautoscale.training.options import FitOptions, HowToEvaluate
from gnnautoscale.training.resharding import pieces_of, read_shards, save_shards, take_rows
from gnnautoscale.training.strategies import HistoryStrategy

_SPLITS = ("train", "val", "test")


def is_ranked(data: Any) -> bool:
    """Whether to train on shards: there are several ranks, or the data is a folder of shards."""
    return current().size > 1 or isinstance(data, (str, Path))


def on_rank(options: FitOptions) -> FitOptions:
    """The options of this rank: its own GPU, and a run folder on the first one only."""
    world = current()
    device = options.device
    if torch.device(device).type == "cuda" and world.size > 1:
        device = str(world.device)
    first = world.is_first
    return replace(
        options,
        device=device,
        run_dir=options.run_dir if first else None,
        tensorboard=options.tensorboard and first,
    )


def rank_loader(source: Any, options: FitOptions, labels: Tensor | None) -> RankLoader:
    """The loader of this rank: of a graph that all ranks have, or of a folder of shards."""
    names = ("batch_size", "drawings", "seed", "num_workers")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given |= {"shuffle": True, "keep": options.keep_batches, "bidirectional": options.compensate != "none"}
    if torch.device(options.device).type == "cuda":
        given["device"] = options.device
    if isinstance(source, (str, Path)):
        return RankLoader(source, **given)
    cut = {name: getattr(options, name) for name in ("partition", "balance", "cache_dir")}
    if labels is not None:
        return RankLoader(source, **{**given, **cut, "partition": labels})
    return RankLoader(source, options.num_parts, **given, **cut)


class RankStrategy(HistoryStrategy):
    """Trains on the batches of one rank, together with the other ranks; scores are those of all nodes.

    ``whole`` is the whole graph as a data set, or ``None`` if shards come from files.
    """

    _loader: RankLoader

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        loaders: dict[str, RankLoader],
        optimizer: torch.optim.Optimizer,
        task: Task,
        options: FitOptions,
        *,
        whole: Dataset | None,
        **ends: Any,
    ) -> None:
        self._of_splits = loaders
        self._lag, self._moves_ghosts = options.lag, options.compensate == "momentum"
        super().__init__(model, dataset, {**loaders}, optimizer, task, options, **ends)
        if self._refreshes > len(self._loader):
            rule, fix = f"refresh must be at most the number of batches of a rank, {len(self._loader)}", "Lower it."
            raise InputError(rule, got=str(self._refreshes), fix=fix)
        self._targets = self._targets_of_shards() if whole is None else targets_of(task, whole)

    @property
    def _shard(self) -> Shard | TypedShard:
        shard: Shard | TypedShard | None = self._loader.shard
        if shard is None:
            raise RuntimeError("a rank trains on a shard")
        return shard

    @property
    def _seen(self) -> tuple[Data, Tensor]:
        """What the task sees of this rank's share, and which nodes of the whole graph its first ones are, its own."""
        return self._loader.data, self._loader.nodes

    def _targets_of_shards(self) -> list[Tensor | None]:
        """A number that depends on the targets of all nodes, whatever rank has them."""
        data, nodes = self._seen
        own, total = nodes.numel(), 0
        for place, each in enumerate(self._engine.task.identity(data)):
            if each is not None:
                values = each[:own].unsqueeze(-1).flatten(1).double().nan_to_num(-0.125).contiguous().view(torch.long)
                columns = 2 * torch.arange(values.size(1)) + 2 * place + 1
                total += int(((values >> 7) * columns * (2 * nodes.unsqueeze(1) + 1)).sum())
        return [torch.tensor([sum(self.world.gather(total)) % 2**63])]

    @cached_property
    def key(self) -> str:
        """See :attr:`Strategy.key`: that of whole graphs."""
        shards = (loader.shard for loader in self._of_splits.values())
        return key_of(self._targets, (shard.whole["key"] for shard in shards if shard is not None))

    def save(self, folder: Path, step: int, state: dict[str, Any], random: dict[str, Any]) -> Path:
        """See :meth:`Strategy.save`: each rank writes its own rows."""
        own = self.state_dict()
        common = {**state, "strategy": {"graph": own.pop("graph"), "labels": self._loader.whole_labels}}
        del own["labels"]
        shard = {"strategy": own, "random": random, "nodes": self._loader.nodes}
        return save_shards(self.world, folder, step, common, shard)

    def _saved_rows(self) -> dict[str, Any]:
        """The rows of own nodes, and behind them those of ghosts that this rank has moved itself."""
        end = self._shard.kinds[""].nodes.numel() if self._moves_ghosts else self._loader.num_own
        return first_rows(super()._saved_rows(), end)

    def restore(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """See :meth:`Strategy.restore`; with other ranks than before, the epoch that was under way begins anew."""
        shards, rank, size = read_shards(checkpoint), self._shard.rank, self._shard.size
        same = len(shards) == size and _are_same(shards[rank]["nodes"], self._loader.nodes)
        same = all(self.world.gather(same))
        pieces = pieces_of(checkpoint, shards, self._shard.whole.get(COUNTS))
        if same:
            pieces = [pieces[rank]]
            self._loader.load_state_dict(shards[rank]["strategy"]["loader"])
            self.done = shards[rank]["strategy"]["loader"]["done"]
            self._engine.load_state_dict(shards[rank]["strategy"]["engine"])
            if self.flow is not None:
                self.flow.load_state_dict(shards[rank]["strategy"].get("flow"))
            set_random_states(shards[rank]["random"], device)
        else:
            before = shards[0]["strategy"] if shards else checkpoint.state["strategy"]
            self._engine.steps = before["engine"]["steps"]
            if self.flow is not None:
                self.flow.refreshed()
            torch.manual_seed(torch.initial_seed() + 7919 * (1 + checkpoint.step))
        take_rows(self._memory, self._loader, pieces, device)
        self._memory.share(self._memory.histories)
        if self._memory.sharing is not None and self._memory.last_gradients:
            self._memory.sharing.share(last_gradients(self._memory))
        if same and self._moves_ghosts:
            ghosts = slice(self._loader.num_own, self._shard.kinds[""].nodes.numel())
            for slot, history in self._memory.histories.items():
                history.raw[ghosts].copy_(pieces[0].rows["histories"][slot]["raw"][ghosts])

    @property
    def loader(self) -> RankLoader:
        """Makes the batches that this rank trains on."""
        return self._loader

    @property
    def world(self) -> World:
        """The ranks."""
        return self._loader.world

    def _new_flow(self) -> Flow:
        """See :meth:`HistoryStrategy._new_flow`: parts are those of all ranks."""
        shard = self._shard
        first, end = shard.first_part[shard.rank : shard.rank + 2].tolist()
        return Flow(self._loader.parts, own=range(first, end), lag=self._lag)

    def _elsewhere(self) -> list[int]:
        shard, steps = self._shard, self._loader.steps
        groups = [] if steps is None else steps.groups
        first = shard.first_part.tolist()
        others = (rank for rank in range(len(groups)) if rank != shard.rank)
        return [first[rank] + part for rank in others for part in groups[rank]]

    def stopping(self, stop: Event) -> Callable[[], bool]:
        """See :meth:`Strategy.stopping`: all ranks stop after the same step."""
        together = self._engine.together
        if together is None:
            return super().stopping(stop)
        together.wish = stop.is_set
        return lambda: together.stop

    def scores(self, dataset: Dataset, evaluation: HowToEvaluate) -> dict[str, float]:
        """See :meth:`Strategy.scores`: the first rank scores the outputs of all nodes that are in a split."""
        (data, nodes), task = self._seen, self._engine.task
        own, out = nodes.numel(), self.output("train", evaluation)
        if not bool(torch.isfinite(out).all()):
            raise FloatingPointError("the model's outputs are not finite any more")
        masks = [data[f"{split}_mask"][:own] for split in _SPLITS if f"{split}_mask" in data]
        rows = torch.stack(masks).any(0).nonzero().squeeze(1)
        given = {"out": out[rows.to(out.device)].cpu(), "y": data.y[rows]}
        given |= {f"{split}_mask": data[f"{split}_mask"][rows] for split in _SPLITS if f"{split}_mask" in data}
        gathered = {name: self.world.gather_to_first(value) for name, value in given.items()}
        scores: dict[str, float] = {}
        if self.world.is_first:
            found = {name: torch.cat(values) for name, values in gathered.items() if values is not None}
            every = found.pop("out")
            scored = Data(**found)
            scored.num_nodes = every.size(0)
            scores = {split: task.score(every, scored, split) for split in _SPLITS}
        told: dict[str, float] = self.world.broadcast(scores)
        return told

    def agreed(self, fact: bool) -> bool:
        """See :meth:`Strategy.agreed`."""
        told: bool = self.world.broadcast(fact)
        return told

    def _train(self, number: int, most: int | None, after_step: Callable[[Item | None], None]) -> float:
        loss = super()._train(number, most, after_step)
        self._memory.settle()  # rows of other ranks that lag behind, so that whoever looks at an epoch's end may wait
        return loss

    def peak(self, num_bytes: int | None) -> int | None:
        """See :meth:`Strategy.peak`."""
        return max((each for each in self.world.gather(num_bytes) if each is not None), default=None)

    def facts(self) -> dict[str, Any]:
        """Numbers of nodes and edges of the whole graph, and of nodes in its splits."""
        (data, _), whole = self._seen, self._shard.whole
        masks = {f"{split} nodes in split": data.get(f"{split}_mask") for split in _SPLITS}
        counts = self.world.gather({name: 0 if mask is None else int(mask.sum()) for name, mask in masks.items()})
        found = {name: sum(each[name] for each in counts) for name in masks}
        return {"nodes": whole["nodes"], "edges": whole["edges"], **found, "ranks": self.world.size}

    def describe(self, result: FitResult) -> None:
        """See :meth:`Strategy.describe`."""
        super().describe(result)
        facts = self.world.gather((result.history_bytes, result.connectivity))
        result.history_bytes = sum(size for size, _ in facts)
        result.connectivity = sum(ratio for _, ratio in facts) / len(facts)


def first_rows(saved: dict[str, Any], count: int) -> dict[str, Any]:
    """The first rows of all histories, in the form that checkpoints hold."""
    for kept in saved.values():
        for history in kept.values():
            history["raw"] = history["raw"][:count]
    return saved


def _are_same(nodes: Any, others: Any) -> bool:
    """Whether two ranks have the same nodes, or the same of each type."""
    if not isinstance(nodes, dict):
        return torch.equal(nodes, others)
    return nodes.keys() == others.keys() and all(torch.equal(each, others[kind]) for kind, each in nodes.items())


def share_of(dataset: Dataset, loader: RankLoader) -> Dataset:
    """The data set of this rank's share of the graph."""
    if isinstance(dataset, TypedDataset):
        return TypedDataset.of_types(loader.data, dataset.target, dataset.name)
    return Dataset.of(loader.data, dataset.name)
