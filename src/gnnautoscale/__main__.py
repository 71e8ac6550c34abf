"""The command line as ``python -m gnnautoscale``, for launchers such as ``torchrun``."""

from gnnautoscale.cli import main

if __name__ == "__main__":
    main()
