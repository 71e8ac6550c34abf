"""Models that have deceived the library, or might; each is exact, or refused with the reason."""

from support.traps import changes, interfaces, known, mixing, modes
from support.traps.registry import TRAPS

__all__ = ["TRAPS", "changes", "interfaces", "known", "mixing", "modes"]
