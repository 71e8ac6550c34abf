"""Several processes that train one model: each rank owns some parts of the graph, and their rows of histories.

Starts from torchrun's environment, assigns parts to ranks, cuts a graph into shards, in memory or in files, and keeps
the rows that ranks share up to date with collectives of ``torch.distributed``. It knows nothing about training loops.
"""

from gnnautoscale.ranks.attaching import attach_shared, autoscale, average_gradients, form_of, last_gradients
from gnnautoscale.ranks.cutting import COUNTS, RELATIONS, TARGET
from gnnautoscale.ranks.files import MANIFEST, read_manifest, read_shard, write_shards
from gnnautoscale.ranks.gradients import GradientMean
from gnnautoscale.ranks.loader import RankLoader
from gnnautoscale.ranks.shard import Shard
from gnnautoscale.ranks.typed_shard import TypedShard
from gnnautoscale.ranks.world import LostRankError, World, current, is_first_to_say, start

__all__ = [
    "COUNTS",
    "MANIFEST",
    "RELATIONS",
    "TARGET",
    "GradientMean",
    "LostRankError",
    "RankLoader",
    "Shard",
    "TypedShard",
    "World",
    "attach_shared",
    "autoscale",
    "average_gradients",
    "current",
    "form_of",
    "is_first_to_say",
    "last_gradients",
    "read_manifest",
    "read_shard",
    "start",
    "write_shards",
]
