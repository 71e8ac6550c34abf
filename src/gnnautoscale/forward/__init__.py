"""One forward pass over one batch.

Records of the edges that layers use, the plan with the model's slots, the session that follows it, and the policies
that exchange rows at slots. This package knows nothing about training.
"""

from gnnautoscale.forward.batch_edges import BatchEdges, EdgeForm
from gnnautoscale.forward.compensation import Compensation, step_exchange
from gnnautoscale.forward.copying import copy_model
from gnnautoscale.forward.edges import ActiveLayer, EdgeSource, own_attribute
from gnnautoscale.forward.exact import (
    Draws,
    GradientStore,
    NeedsStatistics,
    RecordedDraws,
    Stage,
    StageExchange,
    WholeGraphNorms,
)
from gnnautoscale.forward.exchange import (
    ExchangePolicy,
    HistoryStore,
    PlanOnly,
    RowStore,
    StepExchange,
    StoreExchange,
    StreamedStore,
    as_matrix,
    run_pass,
)
from gnnautoscale.forward.hooks import Hooks, has_hooks, in_place_of, running_session
from gnnautoscale.forward.memory import GraphMemory
from gnnautoscale.forward.norms import uses_own_statistics
from gnnautoscale.forward.observe import LayerRun, Observer
from gnnautoscale.forward.pending import PendingRows, exchanged
from gnnautoscale.forward.plan import SHORTCUTS, LayerCall, Plan, Shortcut, TypedPlan
from gnnautoscale.forward.record import ArgumentKind, Arguments, EdgeRecord, describe, has_rows
from gnnautoscale.forward.session import Normalize, Session, check_layout, evaluating
from gnnautoscale.forward.sweep import SweepExchange
from gnnautoscale.forward.typed_memory import TypedMemory
from gnnautoscale.forward.typed_session import KindSession, TypedSession, attributes_of, relations_of
from gnnautoscale.forward.watch import OVERRIDES, Attribute, Form, Watch, form_of_values, held_tensors

__all__ = [
    "OVERRIDES",
    "SHORTCUTS",
    "ActiveLayer",
    "ArgumentKind",
    "Arguments",
    "Attribute",
    "BatchEdges",
    "Compensation",
    "Draws",
    "EdgeForm",
    "EdgeRecord",
    "EdgeSource",
    "ExchangePolicy",
    "Form",
    "GradientStore",
    "GraphMemory",
    "HistoryStore",
    "Hooks",
    "KindSession",
    "LayerCall",
    "LayerRun",
    "NeedsStatistics",
    "Normalize",
    "Observer",
    "PendingRows",
    "Plan",
    "PlanOnly",
    "RecordedDraws",
    "RowStore",
    "Session",
    "Shortcut",
    "Stage",
    "StageExchange",
    "StepExchange",
    "StoreExchange",
    "StreamedStore",
    "SweepExchange",
    "TypedMemory",
    "TypedPlan",
    "TypedSession",
    "Watch",
    "WholeGraphNorms",
    "as_matrix",
    "attributes_of",
    "check_layout",
    "copy_model",
    "describe",
    "evaluating",
    "exchanged",
    "form_of_values",
    "has_hooks",
    "has_rows",
    "held_tensors",
    "in_place_of",
    "own_attribute",
    "relations_of",
    "run_pass",
    "running_session",
    "step_exchange",
    "uses_own_statistics",
]
