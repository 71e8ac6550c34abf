"""What histories do to a model.

Errors of rows and gradients, the paper's bounds on them, and Lipschitz constants. It looks at a model as it is and
changes nothing.
"""

from gnnautoscale.analysis.diagnostics import Probe, diagnose

__all__ = ["Probe", "diagnose"]
