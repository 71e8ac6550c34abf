"""Train any PyTorch Geometric model on graphs that do not fit a GPU, with historical embeddings."""

from gnnautoscale._util import __version__ as __version__
from gnnautoscale.analysis import diagnose
from gnnautoscale.attach import (
    LocalLipschitz,
    ScalableGNN,
    Verification,
    autoscale,
    detach,
    grow,
    infer,
    predict,
    refresh,
    verify,
)
from gnnautoscale.data import Dataset, load
from gnnautoscale.errors import InputError, StaleHistoryWarning, UnsupportedModelError
from gnnautoscale.exact import exact_forward
from gnnautoscale.graph import HaloLoader
from gnnautoscale.replay import capture
from gnnautoscale.runs import FitResult
from gnnautoscale.tasks import GraphLoader, LinkLoader
from gnnautoscale.training import fit

__all__ = [
    "Dataset",
    "FitResult",
    "GraphLoader",
    "HaloLoader",
    "InputError",
    "LinkLoader",
    "LocalLipschitz",
    "ScalableGNN",
    "StaleHistoryWarning",
    "UnsupportedModelError",
    "Verification",
    "autoscale",
    "capture",
    "detach",
    "diagnose",
    "exact_forward",
    "fit",
    "grow",
    "infer",
    "load",
    "predict",
    "refresh",
    "verify",
]
