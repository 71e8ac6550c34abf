"""Train any PyTorch Geometric model on graphs that do not fit a GPU, with historical embeddings."""

from gnnautoscale.autoscale import autoscale, detach
from gnnautoscale.errors import InputError, StaleHistoryWarning, UnsupportedModelError
from gnnautoscale.inference import infer, predict, refresh
from gnnautoscale.loader import HaloLoader
from gnnautoscale.regularize import LocalLipschitz
from gnnautoscale.scalable import ScalableGNN

__all__ = [
    "HaloLoader",
    "InputError",
    "LocalLipschitz",
    "ScalableGNN",
    "StaleHistoryWarning",
    "UnsupportedModelError",
    "autoscale",
    "detach",
    "infer",
    "predict",
    "refresh",
]
