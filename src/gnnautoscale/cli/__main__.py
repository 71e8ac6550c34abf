"""``python -m gnnautoscale.cli`` is the command ``gas``."""

from gnnautoscale.cli import main

main()
