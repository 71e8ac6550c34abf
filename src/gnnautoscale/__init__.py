"""Train any PyTorch Geometric model on graphs that do not fit a GPU, with historical embeddings."""

from gnnautoscale.autoscale import autoscale, detach
from gnnautoscale.datasets import Dataset, load
from gnnautoscale.diagnostics import diagnose
from gnnautoscale.errors import InputError, StaleHistoryWarning, UnsupportedModelError
from gnnautoscale.growth import grow
from gnnautoscale.inference import infer, predict, refresh
from gnnautoscale.loader import HaloLoader
from gnnautoscale.regularize import LocalLipschitz
from gnnautoscale.result import FitResult
from gnnautoscale.scalable import ScalableGNN
from gnnautoscale.train import fit

__all__ = [
    "Dataset",
    "FitResult",
    "HaloLoader",
    "InputError",
    "LocalLipschitz",
    "ScalableGNN",
    "StaleHistoryWarning",
    "UnsupportedModelError",
    "autoscale",
    "detach",
    "diagnose",
    "fit",
    "grow",
    "infer",
    "load",
    "predict",
    "refresh",
]
