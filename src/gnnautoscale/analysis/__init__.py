"""What histories do to a model.

Errors of rows and gradients, the paper's bounds on them, and Lipschitz constants. It looks at a model as it is and
changes nothing.
"""

from gnnautoscale.analysis.diagnostics import Diagnostic, diagnose

__all__ = ["Diagnostic", "diagnose"]
