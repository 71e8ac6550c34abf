"""What two ranks that share a GPU do there and on the CPU; run in fresh processes, since a fork cannot use a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData  # type: ignore[import-untyped]
from torch_geometric.nn import GAT, GCN  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import undirected_graph
from gnnautoscale import ranks
from gnnautoscale.models import build_model
from support.communities import CLASSES, FEATURES, community_graph
from support.typed import typed_graph

# Losses of an epoch are added up in single precision, and so does Adam count its steps on a GPU.
_IN_FIT = 1e-6


class Outcome(NamedTuple):
    """What training ends with, and how its steps ran."""

    numbers: list[Tensor]
    how: str


@contextmanager
def over_the_wire(*, on_gpu: bool) -> Iterator[None]:
    """Let what ranks send be where it is for nccl, or for gloo."""
    world = ranks.current()
    before, world.wire = world.wire, world.device if on_gpu else torch.device("cpu")
    try:
        yield
    finally:
        world.wire = before


def _loop(device: str, storage: Any, lag: int, compensate: Any) -> Outcome:
    """A loop of a user's own."""
    data = undirected_graph(120, 500)
    data.x, data.y = data.x.double(), torch.arange(120) % 4
    loader = ranks.RankLoader(
        data, num_parts=12, batch_size=2, shuffle=True, seed=3, device=device, bidirectional=compensate != "none"
    )
    torch.manual_seed(5)
    model = GCN(data.num_features, 16, num_layers=3, out_channels=4).double().to(device)
    with tempfile.TemporaryDirectory() as folder:
        disk: dict[str, Any] = {"history_dir": folder} if storage == "disk" else {}
        ranks.autoscale(model, loader, lag=lag, storage=storage, compensate=compensate, **disk)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for _ in range(4):
            for batch in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y[: batch.batch_size])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                found.append(loss.detach().cpu())
        out = gas.infer(model, loader)
        gas.detach(model)
    return Outcome([torch.stack(found), out.cpu(), *(weight.detach().cpu() for weight in model.parameters())], "")


def _model(name: str, data: Any) -> nn.Module:
    torch.manual_seed(1)
    if isinstance(data, HeteroData):
        made = build_model(name, data, 2, ["paper"], hidden=8, layers=2, dropout=0.0)
    else:
        kind = {"gcn": GCN, "gat": GAT}[name]
        made = kind(FEATURES, 8, num_layers=3, out_channels=CLASSES)
    return made.double()


def typed() -> HeteroData:
    """Papers to classify."""
    data = typed_graph(6).apply(lambda x: x.double() if x.is_floating_point() else x)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    place = torch.arange(40) % 4
    for name, which in (("train", place < 2), ("val", place == 2), ("test", place == 3)):
        data["paper"][f"{name}_mask"] = which
    return data


def plain() -> Data:
    """Nodes in communities."""
    data = community_graph()
    data.x = data.x.double()
    return data


def fit_on(device: str, name: str, options: dict[str, Any]) -> Outcome:
    """A run of ``fit``, with the weights of its last epoch."""
    data = typed() if name.startswith("hetero") else plain()
    model = _model(name, data)
    with tempfile.TemporaryDirectory() as folder:
        disk = {"history_dir": str(Path(folder) / "rows")} if options.get("storage") == "disk" else {}
        given = {"num_parts": 6, "batch_size": 1, "epochs": 6, "lr": 0.01, "progress": False, **options, **disk}
        result = gas.fit(model, data, device=device, **given)
    losses = torch.tensor([epoch.loss for epoch in result.epochs], dtype=torch.double)
    return Outcome([losses, *(weight.detach().cpu() for weight in model.parameters())], result.how)


def compared(
    work: Any,
    cases: dict[str, dict[str, Any]],
    *,
    allowed: float,
    reference: str = "cpu",
    capture: bool = False,
) -> dict[str, str]:
    """What does not agree with the reference device: how far apart numbers are, or why steps are not captured."""
    wrong = {}
    for name, case in cases.items():
        expected = work(reference, **case)
        for on_gpu in (True,) if dist.get_backend() == "nccl" else (False, True):
            with over_the_wire(on_gpu=on_gpu):
                found = work("cuda", **case)
            apart = [
                float((one - other).abs().max()) for one, other in zip(found.numbers, expected.numbers, strict=True)
            ]
            if not max(apart) < allowed:
                wrong[f"{name}, wire on {'GPU' if on_gpu else 'CPU'}"] = f"{apart} ({found.how})"
            if capture and not found.how.startswith("captured"):
                wrong[f"{name}, capture"] = found.how
    return wrong


def loops() -> dict[str, str]:
    """Own loops with histories on each medium."""
    return compared(
        _loop,
        {
            f"{storage} lag {lag} {compensate}": {"storage": storage, "lag": lag, "compensate": compensate}
            for storage in ("device", "host", "disk")
            for lag, compensate in ((0, "none"), (1, "none"), (0, "gradient"))
        },
        allowed=1e-9,
    )


def captured_fits() -> dict[str, str]:
    """``fit`` with captured steps."""
    options: dict[str, dict[str, Any]] = {
        "device": {"storage": "device"},
        "host": {"storage": "host"},
        "disk": {"storage": "disk"},
        "lag": {"storage": "host", "lag": 1},
        "accumulate": {"storage": "host", "accumulate": 3, "grad_norm": 0.5},
        "compensated": {"storage": "host", "compensate": "gradient"},
    }
    cases = {f"gcn {name}": {"name": "gcn", "options": given} for name, given in options.items()}
    cases |= {f"gat {name}": {"name": "gat", "options": options[name]} for name in ("host",)}
    cases |= {f"typed {name}": {"name": "hetero-sage", "options": options[name]} for name in ("device", "host")}
    return compared(fit_on, cases, allowed=_IN_FIT, capture=True)


def other_fits() -> dict[str, str]:
    """``fit`` whose steps are not captured."""
    options: dict[str, dict[str, Any]] = {
        "drawn": {"storage": "host", "batch_size": 2},
        "norms": {"storage": "host", "sync_norms": True},
    }
    cases = {f"gcn {name}": {"name": "gcn", "options": given} for name, given in options.items()}
    wrong = compared(fit_on, cases, allowed=_IN_FIT)
    # A GPU draws other random directions than the CPU.
    penalty = {"storage": "host", "lipschitz": 0.1, "lipschitz_radius": 0.01}
    cases = {"penalty": {"name": "gcn", "options": penalty}}
    return wrong | compared(fit_on, cases, allowed=_IN_FIT, reference="cuda")


def over_nccl() -> dict[str, str]:
    """Own loops and ``fit``, between ranks that nccl takes for ranks on different machines."""
    host: dict[str, Any] = {"storage": "host", "epochs": 3}
    cases = {f"lag {lag}": {"storage": "host", "lag": lag, "compensate": "none"} for lag in (0, 1)}
    cases["compensated"] = {"storage": "device", "lag": 0, "compensate": "gradient"}
    wrong = compared(_loop, cases, allowed=1e-9)
    fits = {"captured": {"name": "gcn", "options": host}, "types": {"name": "hetero-sage", "options": host}}
    wrong |= compared(fit_on, fits, allowed=_IN_FIT, capture=True)
    return wrong | compared(
        fit_on, {"norms": {"name": "gcn", "options": {**host, "sync_norms": True}}}, allowed=_IN_FIT
    )
