"""Which nodes a model can tell apart: Weisfeiler-Lehman colours beside the outputs of GAS and of the baselines.

The paper shows that a GNN with histories tells apart what the Weisfeiler-Lehman test does (Theorem 2), and that a GNN
on sampled edges gives different outputs to nodes of the same colour (its Proposition). This package runs both.
"""

from gnnautoscale.experiments.expressiveness.colours import (
    Comparison,
    compare_classes,
    nearest_colours,
    row_classes,
    wl_colours,
)
from gnnautoscale.experiments.expressiveness.outputs import (
    TOLERANCE,
    PowerfulGNN,
    full_batch,
    on_subgraphs,
    while_training,
    with_histories,
)
from gnnautoscale.experiments.expressiveness.survey import Example, examples, survey

__all__ = [
    "TOLERANCE",
    "Comparison",
    "Example",
    "PowerfulGNN",
    "compare_classes",
    "examples",
    "full_batch",
    "nearest_colours",
    "on_subgraphs",
    "row_classes",
    "survey",
    "while_training",
    "with_histories",
    "wl_colours",
]
