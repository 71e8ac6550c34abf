"""One forward pass over one batch.

The record of what layers do with edges, the plan that says where histories are, the session that follows the plan, and
the policies that decide what happens at a slot. It knows nothing about training.
"""

from gnnautoscale.forward.edges import EdgeSource, Frame, describe, own_attribute
from gnnautoscale.forward.exchange import (
    ExchangePolicy,
    HistoryStore,
    PlanOnly,
    RowStore,
    StepExchange,
    StoreExchange,
    flat,
    run_pass,
)
from gnnautoscale.forward.hooks import Hooks, has_hooks
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.norms import by_constants, takes_statistics
from gnnautoscale.forward.observe import LayerRun, Observer
from gnnautoscale.forward.plan import SHORTCUTS, LayerCall, Plan, Shortcut
from gnnautoscale.forward.record import ArgumentKind, Event, Slice
from gnnautoscale.forward.session import Session, evaluating
from gnnautoscale.forward.sweep import SweepExchange

__all__ = [
    "SHORTCUTS",
    "ArgumentKind",
    "EdgeSource",
    "Event",
    "ExchangePolicy",
    "Frame",
    "GraphMemory",
    "HistoryStore",
    "Hooks",
    "LayerCall",
    "LayerRun",
    "Observer",
    "Plan",
    "PlanOnly",
    "RowStore",
    "Session",
    "Shortcut",
    "Slice",
    "StepExchange",
    "StoreExchange",
    "SweepExchange",
    "by_constants",
    "describe",
    "evaluating",
    "flat",
    "has_hooks",
    "own_attribute",
    "run_pass",
    "takes_statistics",
]
