"""Random edges for the kernels' tests, and fixtures that run each test with plain torch and with Triton."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import scatter  # type: ignore[import-untyped]

from gnnautoscale import kernels
from gnnautoscale.kernels import Adjacency, long_rows, spmm

ON_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
IMPLEMENTATIONS = [
    "plain",
    pytest.param("triton", marks=[NEEDS_TRITON, *([pytest.mark.gpu] if ON_GPU else [])]),
    *([pytest.param("plain on a gpu", marks=pytest.mark.gpu)] if ON_GPU else []),
]
REDUCES = ["sum", "mean", "max", "min"]
HALVES = [torch.bfloat16, torch.float16]
LONG = 20  # the length of a long row in tests, so that small graphs have some


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Load Triton and its kernels anew, so that they run on the CPU: Triton decides that when it is imported."""

    def loaded() -> list[str]:
        # The compiled part cannot be loaded twice, and need not be.
        return [
            name
            for name in sys.modules
            if (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
            or name.startswith("gnnautoscale.kernels.triton_")
        ]

    modules = ("triton_launch", "triton_rows", "triton_spmm", "triton_attention", "triton_halo")
    for name in modules:
        importlib.import_module(f"gnnautoscale.kernels.{name}")  # so that all are there to come back to
    before = {name: sys.modules.pop(name) for name in loaded()}
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:
            patch.delattr(kernels, name)
        patch.setenv("TRITON_INTERPRET", "1")
        interpreted: Any = importlib.import_module("triton.runtime.interpreter")
        prepare = interpreted._patch_lang_tensor

        def prepare_for_new_numpy(tensor: Any, scope: Any) -> None:
            prepare(tensor, scope)
            # Triton 3.6 calls int() on arrays of one value, which NumPy 2.4 refuses.
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        patch.setattr(interpreted, "_patch_lang_tensor", prepare_for_new_numpy)
        for name in modules:
            importlib.import_module(f"gnnautoscale.kernels.{name}")
        rows: Any = sys.modules["gnnautoscale.kernels.triton_rows"]
        assert type(rows._gather_kernels[True]).__name__ == "InterpretedFunction"
        yield
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors must be for one of the implementations to run; the public functions then go to it."""
    if request.param == "triton" and not ON_GPU:
        request.getfixturevalue("interpreter")
    for module in ("attention", "halo", "rows", "spmm"):
        path = sys.modules[f"gnnautoscale.kernels.{module}"]
        monkeypatch.setattr(path, "use_triton", lambda tensor: request.param == "triton")
    return "cuda" if ON_GPU and request.param != "plain" else "cpu"


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are long from ``LONG`` edges on."""
    monkeypatch.setattr(long_rows, "LONG_ROW", LONG)


class RandomEdges:
    """Random edges, also as a matrix; one target has many, some have none, and some edges are there twice."""

    def __init__(self, device: str, *, weighted: bool, num_targets: int = 6, num_sources: int = 8) -> None:
        generator = torch.Generator().manual_seed(3)
        target = torch.cat([torch.randint(num_targets - 2, (50,), generator=generator), torch.full((70,), 2)])
        self.target = torch.cat([target, torch.tensor([0, 0])]).sort().values.to(device)
        source = torch.randint(num_sources - 2, (122,), generator=generator)
        source[:2] = 1
        self.source = source.to(device)
        self.num_targets, self.num_sources = num_targets, num_sources
        # Powers of two: products and sums of small integers with these are exact in every type.
        exact = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(4, (122,), generator=generator)]
        self.weight = exact.to(device) if weighted else None

    def adjacency(self) -> Adjacency:
        return Adjacency.build(self.target, self.source, self.num_targets, self.num_sources, self.weight)

    def expected(self, x: Tensor, grad: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
        """Result and gradient by PyG's scatter, in double precision on the CPU."""
        wide = x.detach().double().cpu().requires_grad_()
        messages = wide[self.source.cpu()]
        if self.weight is not None:
            messages = messages * self.weight.double().cpu().unsqueeze(1)
        out = scatter(messages, self.target.cpu(), 0, self.num_targets, reduce=reduce)
        (gradient,) = torch.autograd.grad(out, wide, grad.double().cpu())
        return out.detach(), gradient


def integers(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small whole numbers, so that there are ties and zeros and no rounding."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(adjacency: Adjacency, x: Tensor, grad: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = spmm(adjacency, x, reduce)
    (gradient,) = torch.autograd.grad(out, x, grad)
    assert out.dtype == gradient.dtype == x.dtype
    return out.detach(), gradient


class Hubs(RandomEdges):
    """Random edges with a given number for each target, or for each source."""

    def __init__(self, device: str, degrees: list[int], *, weighted: bool, of: str = "target") -> None:
        generator = torch.Generator().manual_seed(4)
        ends = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
        others = torch.randint(8, ends.shape, generator=generator)
        target, source = (ends, others) if of == "target" else (others, ends)
        target, order = target.sort(stable=True)
        self.target, self.source = target.to(device), source[order].to(device)
        self.num_targets, self.num_sources = (len(degrees), 8) if of == "target" else (8, len(degrees))
        exact = torch.tensor([-1.0, 0.5, 1.0, 2.0])[torch.randint(4, ends.shape, generator=generator)]
        self.weight = exact.to(device) if weighted else None

    def rows(self, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What goes in and the gradient of what comes out."""
        shapes = enumerate((self.num_sources, self.num_targets))
        x, grad = (integers(n, width, device=str(self.target.device), dtype=dtype, seed=seed) for seed, n in shapes)
        return x, grad


DEGREES = {
    "one long row": [3, 0, 90, 2],
    "several": [25, 0, 21, 230, 1, 19],
    "as long as a piece": [20, 5, 20],
    "one edge more": [21, 3, 0],
    "whole segments": [40, 60, 0],
}
