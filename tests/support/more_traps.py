"""Further models in the spirit of the known traps."""
