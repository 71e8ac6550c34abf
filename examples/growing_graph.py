"""Follows a growing graph: new nodes and edges arrive, and only the rows they can reach are recomputed."""

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import gnnautoscale as gas
from gnnautoscale.data.generate import communities

torch.manual_seed(0)
whole = communities(1200, degree=4, num_features=16, num_classes=4)
known = 1196  # the last four nodes come later
early = (whole.edge_index < known).all(dim=0)
today = Data(x=whole.x[:known], edge_index=whole.edge_index[:, early])
# Old nodes come first, in their order; old edges may be anywhere among the new ones.
tomorrow = Data(x=whole.x, edge_index=torch.cat([today.edge_index, whole.edge_index[:, ~early]], dim=1))

loader = gas.HaloLoader(today, num_parts=10)
model = gas.autoscale(GCN(whole.num_features, 32, num_layers=2, out_channels=4), today)
gas.refresh(model, loader)
before = gas.infer(model, loader)

loader = gas.grow(model, loader, tomorrow)
new_nodes = torch.arange(known, whole.num_nodes)
arrived = gas.predict(model, loader, new_nodes)  # from the histories, which are up to date
after = gas.predict(model, loader, torch.arange(whole.num_nodes))

model = gas.detach(model).eval()
with torch.no_grad():
    exact = model(tomorrow.x, tomorrow.edge_index)
unchanged = (after[:known] == before).all(dim=1)
print(f"old nodes: {known}")
print(f"new nodes: {len(arrived)}")
print(f"old nodes whose output stays as it was: {int(unchanged.sum())}")
print(f"largest error for all nodes: {float((after - exact).abs().max()):.1e}")
