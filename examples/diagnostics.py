"""Measures staleness and gradient errors while a model trains.

`fit(run_dir=...)` measures them from time to time and writes them to a folder; `gas.diagnose` measures at any time.
Staleness falls with the learning rate. Gradients still differ, because none flows through pulled rows.
"""

import tempfile
from pathlib import Path

import torch

import gnnautoscale as gas
from gnnautoscale.data.generate import communities
from gnnautoscale.models import GCN
from gnnautoscale.runs import read_run

data = communities(600, degree=8, num_features=16, num_classes=4)
torch.manual_seed(0)
model = GCN(data.num_features, 4, hidden=32, layers=3, dropout=0.0)
with tempfile.TemporaryDirectory() as folder:
    gas.fit(
        model,
        data,
        num_parts=12,
        batch_size=3,
        epochs=20,
        schedule="cosine",
        run_dir=f"{folder}/run",
        diagnose=["staleness", "gradients"],
        diagnose_every=5,
    )
    run = read_run(Path(folder) / "run")

for when, gradients in zip(run.staleness, run.gradients, strict=True):
    stale = [layer["staleness"]["relative"] for layer in when["layers"] if layer["staleness"]]
    print(f"relative staleness after epoch {when['epoch']}: {max(stale):.4f}")
    print(f"cosine of gradients after epoch {when['epoch']}: {gradients['cosine']:.4f}")

loader = gas.HaloLoader(data, num_parts=12, batch_size=3)
gas.refresh(model, loader)
refreshed = gas.diagnose(model, loader)["staleness"]["layers"][0]["staleness"]
print(f"relative staleness after a refresh: {refreshed['relative']:.4f}")
