"""The paper's Figure 4 on this machine: what histories in host memory cost when halos grow.

A 4-layer GIN, 256 wide, trains on batches of 4,000 nodes, each with 60 random neighbours in its batch. Halo nodes have
60 edges each into the batch, and there are 0 to 5 of them per batch node; histories have a million rows. Computation
grows with the halo, since there are more edges. What is left is I/O: histories in host memory against histories on the
GPU, with transfers that overlap the step, and without.

Run with ``python benchmarks/figure4.py folder`` on a machine with a GPU: it writes ``step.json`` and ``step.svg``.
"""

import sys
from pathlib import Path

from gnnautoscale.cli.bench import step

# What the original implementation needs for the same work on one H200, in milliseconds, by halo nodes per batch node.
ORIGINAL = {0: 5.1, 1: 6.1, 5: 7.2}


def main(folder: str) -> None:
    """Measures, prints and draws."""
    out = Path(folder)
    step(output=out / "step.json", plot=out / "step.svg")
    print("the original on one H200:", ", ".join(f"{ms} ms at {ratio}" for ratio, ms in ORIGINAL.items()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
