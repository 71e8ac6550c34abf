"""Histories for a user's own model.

Attach and detach them, infer, predict, refresh and verify, follow a growing graph; the paper's base class and its local
Lipschitz penalty. This package knows nothing about training loops.
"""

from gnnautoscale.attach.attaching import autoscale, detach
from gnnautoscale.attach.autoscaler import Autoscaler, attached, attached_alone, attached_to_plain_graph, is_autoscaled
from gnnautoscale.attach.calling import (
    CallModel,
    call_with_batch,
    device_of,
    info_of,
    model_must_run,
    to_model_device,
    unpack_batch,
)
from gnnautoscale.attach.growth import grow
from gnnautoscale.attach.inference import (
    Outputs,
    collect,
    infer,
    infer_from_histories,
    infer_on,
    loader_for,
    plan_of,
    predict,
    refresh,
    sweep,
)
from gnnautoscale.attach.regularize import LocalLipschitz
from gnnautoscale.attach.scalable import ScalableGNN
from gnnautoscale.attach.verification import Verification, verify

__all__ = [
    "Autoscaler",
    "CallModel",
    "LocalLipschitz",
    "Outputs",
    "ScalableGNN",
    "Verification",
    "attached",
    "attached_alone",
    "attached_to_plain_graph",
    "autoscale",
    "call_with_batch",
    "collect",
    "detach",
    "device_of",
    "grow",
    "infer",
    "infer_from_histories",
    "infer_on",
    "info_of",
    "is_autoscaled",
    "loader_for",
    "model_must_run",
    "plan_of",
    "predict",
    "refresh",
    "sweep",
    "to_model_device",
    "unpack_batch",
    "verify",
]
