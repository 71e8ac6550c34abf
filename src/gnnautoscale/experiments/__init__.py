"""What only a researcher of the method needs.

The paper's experiments, benchmarks, and what models can tell apart. Nothing below imports it.
"""
