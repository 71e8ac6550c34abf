"""Helpers for every package, none of them for users.

Atomic files, options, random states, available cores, available, peak and page-locked memory, nested
tensors. It knows nothing about graphs or models.
"""

from gnnautoscale._util.archives import damage_in, open_npz
from gnnautoscale._util.arguments import check_argument, checked
from gnnautoscale._util.atomic import check_writable, no_empty_folders, write_atomically
from gnnautoscale._util.checksums import checksums_of, damaged_file, is_unchanged, with_checksum
from gnnautoscale._util.cores import available_cores
from gnnautoscale._util.devices import as_if_captured, is_capturing, usable_device
from gnnautoscale._util.docstrings import describe_arguments
from gnnautoscale._util.leaves import leaves_of
from gnnautoscale._util.locks import FolderLock
from gnnautoscale._util.memory import available_memory, lacks_memory
from gnnautoscale._util.modes import for_later, untracked
from gnnautoscale._util.nested import map_others, map_tensors, others_in, tensors_in
from gnnautoscale._util.notebook import html_table
from gnnautoscale._util.options import Option, OptionGroup, check_names, check_path, option, options_of, shown
from gnnautoscale._util.ordinary import ordinary
from gnnautoscale._util.peak_memory import PeakMemory, resident_memory
from gnnautoscale._util.pinned import Pinned, arriving_numbers, copy_staged, copy_staged_together, pinned_zeros
from gnnautoscale._util.random_state import RandomState, random_states, set_random_states, undisturbed
from gnnautoscale._util.reasons import did_you_mean, reason_of
from gnnautoscale._util.versions import __version__, versions
from gnnautoscale._util.weights import check_weights, load_state, state_of, weights_of

__all__ = [
    "FolderLock",
    "Option",
    "OptionGroup",
    "PeakMemory",
    "Pinned",
    "RandomState",
    "__version__",
    "arriving_numbers",
    "as_if_captured",
    "available_cores",
    "available_memory",
    "check_argument",
    "check_names",
    "check_path",
    "check_weights",
    "check_writable",
    "checked",
    "checksums_of",
    "copy_staged",
    "copy_staged_together",
    "damage_in",
    "damaged_file",
    "describe_arguments",
    "did_you_mean",
    "for_later",
    "html_table",
    "is_capturing",
    "is_unchanged",
    "lacks_memory",
    "leaves_of",
    "load_state",
    "map_others",
    "map_tensors",
    "no_empty_folders",
    "open_npz",
    "option",
    "options_of",
    "ordinary",
    "others_in",
    "pinned_zeros",
    "random_states",
    "reason_of",
    "resident_memory",
    "set_random_states",
    "shown",
    "state_of",
    "tensors_in",
    "undisturbed",
    "untracked",
    "usable_device",
    "versions",
    "weights_of",
    "with_checksum",
    "write_atomically",
]
