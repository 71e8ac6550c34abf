"""One forward pass over one batch.

The record of what layers do with edges, the plan that says where histories are, the session that follows the plan, and
the policies that decide what happens at a slot. It knows nothing about training.
"""

from gnnautoscale.forward.fused import FusedEdges
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.plan import SHORTCUTS, LayerCall, Plan, Shortcut
from gnnautoscale.forward.record import EDGE_METHODS, ArgumentKind, Event, Slice
from gnnautoscale.forward.session import Frame, Penalty, Session, describe, evaluating, flat
from gnnautoscale.forward.sweep import Sweep, run_sweep

__all__ = [
    "EDGE_METHODS",
    "SHORTCUTS",
    "ArgumentKind",
    "Event",
    "Frame",
    "FusedEdges",
    "GraphMemory",
    "LayerCall",
    "Penalty",
    "Plan",
    "Session",
    "Shortcut",
    "Slice",
    "Sweep",
    "describe",
    "evaluating",
    "flat",
    "run_sweep",
]
