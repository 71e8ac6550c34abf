"""Stops a run halfway and resumes it from its checkpoint, with the result of an uninterrupted run.

Here a callback stops it. Ctrl-C, a crash or a full disk would do the same.
"""

import tempfile

import torch

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.models import GCN
from gnnautoscale.runs import Epoch

data = communities(400, degree=8, num_features=16, num_classes=4)


class PowerCutError(Exception):
    """Stands for any failure."""


def stop_after_five(epoch: Epoch) -> None:
    """Fails in epoch 6, after the checkpoints of five epochs."""
    if epoch.number == 6:
        raise PowerCutError


def model() -> GCN:
    """A model with the same initial weights in each run."""
    torch.manual_seed(0)
    return GCN(data.num_features, 4, hidden=16, dropout=0.5)


def losses(result: gas.FitResult) -> list[float]:
    """The loss of each epoch."""
    return [epoch.loss for epoch in result.epochs]


unbroken = gas.fit(model(), data, num_parts=8, batch_size=2, epochs=12)

with tempfile.TemporaryDirectory() as folder:
    try:
        gas.fit(model(), data, num_parts=8, batch_size=2, epochs=12, checkpoint_dir=folder, callback=stop_after_five)
    except PowerCutError:
        print("stopped: True")
    resumed = gas.fit(model(), data, num_parts=8, batch_size=2, epochs=12, checkpoint_dir=folder, resume=folder)

print(f"epochs in the end: {len(resumed.epochs)}")
print(f"same losses: {losses(resumed) == losses(unbroken)}")
print(f"same scores: {resumed.scores == unbroken.scores}")
