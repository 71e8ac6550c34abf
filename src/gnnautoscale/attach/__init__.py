"""What users call on their own models.

Attach and detach histories, the paper's base class, exact inference, prediction, refresh, growing graphs, and the local
Lipschitz penalty. It knows nothing about training loops.
"""

from gnnautoscale.attach.autoscaler import (
    Autoscaler,
    OpenSession,
    attached,
    autoscale,
    detach,
    is_autoscaled,
    unpack_batch,
)
from gnnautoscale.attach.growth import grow
from gnnautoscale.attach.inference import CallModel, infer, infer_from_histories, predict, refresh
from gnnautoscale.attach.regularize import LocalLipschitz
from gnnautoscale.attach.scalable import ScalableGNN

__all__ = [
    "Autoscaler",
    "CallModel",
    "LocalLipschitz",
    "OpenSession",
    "ScalableGNN",
    "attached",
    "autoscale",
    "detach",
    "grow",
    "infer",
    "infer_from_histories",
    "is_autoscaled",
    "predict",
    "refresh",
    "unpack_batch",
]
