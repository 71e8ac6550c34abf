"""The list of traps, which the other modules fill, and the small models that most of them use."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, odd_graph, undirected_graph
from support.oracle import Change, Outcome, outcome

C = CHANNELS
Step = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class Trap:
    """What to run, whether a refusal would be needless, and what a refusal has to say."""

    run: Callable[[], Outcome]
    exact: bool
    says: str

    def complaint(self, found: Outcome) -> str:
        """What is bad about an outcome, if anything."""
        if not found.held or (self.exact and found.kind != "exact"):
            return f"{found.kind}: {found.detail}"
        if found.kind == "refused" and not re.search(self.says, found.detail, re.IGNORECASE | re.DOTALL):
            return f"refused, but not with /{self.says}/: {found.detail}"
        return ""


TRAPS: dict[str, Trap] = {}


def trap(name: str, *, exact: bool = False, says: str = "") -> Callable[[Callable[[], Outcome]], None]:
    """Add a trap to the list: exact or refused; only exact; or refused with a message that the expression matches."""

    def register(run: Callable[[], Outcome]) -> None:
        assert name not in TRAPS, name
        TRAPS[name] = Trap(run, exact, says)

    return register


def graph(num_nodes: int = 40, num_pairs: int = 70, seed: int = 0) -> Data:
    return undirected_graph(num_nodes, num_pairs, seed, torch.double)


def directed(seed: int = 0) -> Data:
    return odd_graph(seed, torch.double)


def in_blocks(data: Data, num_parts: int = 4) -> gas.HaloLoader:
    """Parts of consecutive nodes."""
    return gas.HaloLoader(data, partition=torch.arange(data.num_nodes) * num_parts // data.num_nodes)


def sage() -> Any:
    return pyg.SAGEConv(C, C)


class Net(nn.Module):
    """Two layers with a step between them and one at the end; what they keep is an attribute of the model."""

    def __init__(
        self,
        between: Step | None = None,
        at_end: Step | None = None,
        *,
        first: Step | None = None,
        layer: Callable[[], Any] = sage,
        **state: Any,
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList([layer(), layer()])
        self.first, self.between, self.at_end = first, between, at_end
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = self.first(self, x) if self.first else x
        x = self.convs[0](x, edge_index).tanh()
        x = self.between(self, x) if self.between else x
        x = self.convs[1](x, edge_index)
        return self.at_end(self, x) if self.at_end else x


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def later(make: Callable[[], nn.Module], *changes: Change, data: Data | None = None) -> Outcome:
    """A model that is changed after it was evaluated; it is evaluated again, and then trained."""
    return outcome(make, graph() if data is None else data, changes=changes)


def while_training(make: Callable[[], nn.Module], *changes: Change, data: Data | None = None) -> Outcome:
    """A model that is changed after some steps of training; it is trained on, and then evaluated."""
    return outcome(make, graph() if data is None else data, changes=changes, mode="training")


def between(step: Step, data: Data | None = None, **state: Any) -> Outcome:
    """A model with a step between its layers."""
    return outcome(lambda: Net(step, **copy.deepcopy(state)), graph() if data is None else data)


def at_end(step: Step, data: Data | None = None, **state: Any) -> Outcome:
    """A model with a step after its layers."""
    return outcome(lambda: Net(at_end=step, **copy.deepcopy(state)), graph() if data is None else data)
