"""Proposes how to train on a graph and a machine.

It runs short trials, and estimates from them what other settings take.
"""

from gnnautoscale.tuning.advice import PASSED, Advice, Candidate, amount, tune

__all__ = ["PASSED", "Advice", "Candidate", "amount", "tune"]
