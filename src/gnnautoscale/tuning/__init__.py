"""Proposes how to train on a graph and a machine.

It runs short trials and reasons from what they measure.
"""

from gnnautoscale.tuning.advice import PASSED, Advice, amount, tune

__all__ = ["PASSED", "Advice", "amount", "tune"]
