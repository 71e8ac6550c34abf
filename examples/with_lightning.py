"""Trains with PyTorch Lightning: its Trainer takes a HaloLoader, and the module wraps an autoscaled model.

Histories are no parameters: Lightning saves and moves the weights, and the histories follow the model.
"""

import logging
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # advice about workers and logging intervals


class NodeClassifier(lightning.LightningModule):
    """Any PyG model, trained on the batches of a HaloLoader."""

    def __init__(self, model: nn.Module, data: Data) -> None:
        """Take a PyG model and the whole graph."""
        super().__init__()
        self.model = gas.autoscale(model, data)
        self.losses: list[float] = []

    def training_step(self, batch: Data, _: int) -> Tensor | None:
        """Compute the loss of a batch; one without labels only brings the histories up to date."""
        out = self.model(batch.x, batch.edge_index)  # one row for each of the batch's own nodes
        mask = batch.train_mask[: batch.batch_size]
        if not mask.any():
            return None
        loss = F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
data = communities(600, degree=8, num_features=16, num_classes=4)
loader = gas.HaloLoader(data, num_parts=12, batch_size=3, shuffle=True)
module = NodeClassifier(GraphSAGE(data.num_features, 32, num_layers=3, out_channels=4), data)
trainer = lightning.Trainer(
    max_epochs=20,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)

logits = gas.infer(module.model, loader)  # exact, for all nodes
correct = (logits.argmax(dim=1) == data.y)[data.test_mask]
print(f"first loss: {module.losses[0]:.3f}")
print(f"last loss: {module.losses[-1]:.3f}")
print(f"test accuracy: {100 * correct.float().mean():.1f} %")
