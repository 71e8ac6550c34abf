"""For researchers of the method: benchmarks, the paper's experiments, and which nodes models can tell apart.

It offers the modules ``bench``, ``expressiveness``, ``figure`` and ``reproduce``. Only the command line builds on it.
"""
