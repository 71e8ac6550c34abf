"""What users call on their own models.

Attach and detach histories, the paper's base class, exact inference, prediction, refresh, growing graphs, and the local
Lipschitz penalty. It knows nothing about training loops.
"""

from gnnautoscale.attach.autoscaler import Autoscaler, attached, autoscale, detach, is_autoscaled
from gnnautoscale.attach.calling import CallModel, call_with_batch, device_of, near, outputs, unpack_batch
from gnnautoscale.attach.growth import grow
from gnnautoscale.attach.inference import infer, infer_from_histories, plan_of, predict, refresh
from gnnautoscale.attach.regularize import LocalLipschitz
from gnnautoscale.attach.scalable import ScalableGNN

__all__ = [
    "Autoscaler",
    "CallModel",
    "LocalLipschitz",
    "ScalableGNN",
    "attached",
    "autoscale",
    "call_with_batch",
    "detach",
    "device_of",
    "grow",
    "infer",
    "infer_from_histories",
    "is_autoscaled",
    "near",
    "outputs",
    "plan_of",
    "predict",
    "refresh",
    "unpack_batch",
]
