import torch, copy
from torch import nn
from torch_geometric import nn as pyg
import gnnautoscale as gas
from gnnautoscale.attach import attached
from conftest import *
def a(): return pyg.Sequential("x, edge_index", [(nn.Linear(8,8),"x -> x"), nn.Dropout(.5), (pyg.GCNConv(8,8),"x, edge_index -> x")])
d=undirected_graph()
m=a(); gas.autoscale(m,d)
print(pyg.Sequential.forward, m.__dict__.get("forward"), )
c=attached(m).bare_copy()
print(pyg.Sequential.forward, c.__dict__.get("forward"), c.forward.__self__ is c)
