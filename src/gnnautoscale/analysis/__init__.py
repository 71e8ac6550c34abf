"""What histories do to a model.

Errors of rows and gradients, the paper's bounds on them, and Lipschitz constants. It looks at a model as it is and
changes nothing.
"""

from gnnautoscale.analysis.diagnostics import Diagnostic, diagnose
from gnnautoscale.analysis.gradients import GradientAgreement

__all__ = ["Diagnostic", "GradientAgreement", "diagnose"]
