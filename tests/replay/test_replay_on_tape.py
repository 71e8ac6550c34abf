"""A replayed step does what the step itself would: nothing that matters happens in Python alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GraphSAGE  # type: ignore[import-untyped]

import gnnautoscale as gas
from gnnautoscale.training import loop
from support.communities import CLASSES, FEATURES, community_graph
from support.tape import Tape, capture_on_tape


def _losses(kind: Any, storage: Any, folder: Path) -> list[float]:
    data = community_graph()
    data.x = data.x.double()
    torch.manual_seed(1)
    model = kind(FEATURES, 8, num_layers=3, out_channels=CLASSES).double()
    disk: dict[str, Any] = {"history_dir": str(folder)} if storage == "disk" else {}
    return [each.loss for each in gas.fit(model, data, num_parts=6, epochs=3, storage=storage, **disk).epochs]


@pytest.mark.parametrize(
    ("kind", "storage", "resident"), [(GCN, "device", True), (GAT, "host", False), (GraphSAGE, "disk", True)]
)
def test_replayed_steps_train_as_others_do(
    kind: Any, storage: str, resident: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Adam's steps can be captured on a GPU only.
    monkeypatch.setattr(loop, "make_optimizer", lambda model, *_, also: torch.optim.SGD(model.parameters(), lr=0.1))
    expected = _losses(kind, storage, tmp_path / "plain")
    capture_on_tape(monkeypatch, resident=resident)
    monkeypatch.setattr(Tape, "played", 0)
    assert _losses(kind, storage, tmp_path / "taped") == pytest.approx(expected, abs=1e-12)
    assert Tape.played == 3 * 6 - 2
