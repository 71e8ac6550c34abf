"""Stops a run in the middle and goes on from its checkpoint: the result is that of a run that never stopped.

Here a callback stops it. Ctrl-C, a crash or a full disk would do the same.
"""

import tempfile

import torch

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.models import GCN
from gnnautoscale.runs.result import Epoch

data = communities(400, degree=8, num_features=16, num_classes=4)


class PowerCutError(Exception):
    """Something that nobody expected."""


def stop_after_five(epoch: Epoch) -> None:
    """Fails in epoch 6, when the checkpoints of five epochs have been written."""
    if epoch.number == 6:
        raise PowerCutError


def model() -> GCN:
    """The same weights to begin with, in each run."""
    torch.manual_seed(0)
    return GCN(data.num_features, 4, hidden=16, dropout=0.5)


def losses(result: gas.FitResult) -> list[float]:
    """The curve."""
    return [epoch.loss for epoch in result.epochs]


unbroken = gas.fit(model(), data, parts=8, batch_size=2, epochs=12)

with tempfile.TemporaryDirectory() as folder:
    try:
        gas.fit(model(), data, parts=8, batch_size=2, epochs=12, checkpoint_dir=folder, callback=stop_after_five)
    except PowerCutError:
        print("stopped: True")
    resumed = gas.fit(model(), data, parts=8, batch_size=2, epochs=12, checkpoint_dir=folder, resume=folder)

print(f"epochs in the end: {len(resumed.epochs)}")
print(f"same losses: {losses(resumed) == losses(unbroken)}")
print(f"same scores: {resumed.scores == unbroken.scores}")
