"""Ways to call an autoscaled model, and what is said about those that cannot work."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch_geometric import nn as pyg  # type: ignore[import-untyped]
from torch_geometric.data import Batch, Data  # type: ignore[import-untyped]

import gnnautoscale as gas
from conftest import CHANNELS, assert_same, undirected_graph
from gnnautoscale.attach.calling import unpack_batch
from gnnautoscale.errors import InputError, UnsupportedModelError
from support.typed import TARGETS, converted, typed_graph

C = CHANNELS


def scaled() -> tuple[nn.Module, Data, Data]:
    """An autoscaled model, its graph and a batch."""
    data = undirected_graph()
    model = gas.autoscale(pyg.GraphSAGE(C, 6, num_layers=2, out_channels=4), data)
    return model, data, next(iter(gas.HaloLoader(data, 3)))


# Unpacking ###########################################################################################################


def unpacked(forward: Callable[..., Any], data: Data | None = None, **kwargs: Any) -> Any:
    """The names that ``model(batch)`` passes on, or ``"batch"`` for the batch itself."""
    batch = next(iter(gas.HaloLoader(undirected_graph() if data is None else data, 3)))
    args, named = unpack_batch(inspect.signature(forward), "Net", (batch,), kwargs)
    for name, value in named.items():
        expected = batch.edge_index if name == "adj_t" else batch[name] if name not in kwargs else kwargs[name]
        assert value is expected
    return "batch" if args == (batch,) else set(named)


def several() -> Data:
    """A graph that has an attribute ``batch``."""
    return Batch.from_data_list([undirected_graph(), undirected_graph(seed=1)])


def test_arguments_are_found_by_name() -> None:
    assert unpacked(lambda x, edge_index: 0) == {"x", "edge_index"}
    assert unpacked(lambda x, edge_index, edge_weight=None, noise=0.1: 0) == {"x", "edge_index", "edge_weight"}
    assert unpacked(lambda x, edge_index, *rest, **more: 0) == {"x", "edge_index"}
    assert unpacked(lambda edge_index, n_id: 0) == {"edge_index", "n_id"}
    assert unpacked(lambda x, adj_t, n_id: 0) == {"x", "adj_t", "n_id"}
    assert unpacked(lambda x, edge_index=None: 0) == {"x", "edge_index"}
    assert unpacked(lambda x, adj_t=None: 0) == {"x", "adj_t"}
    assert unpacked(lambda x, edge_index, edge_weight: 0, edge_weight=3) == {"x", "edge_index", "edge_weight"}


def test_sizes_of_the_batch_are_passed_where_they_are_required() -> None:
    assert unpacked(lambda x, edge_index, num_nodes, batch_size: 0) == {"x", "edge_index", "num_nodes", "batch_size"}
    assert unpacked(lambda x, edge_index, num_nodes=None, batch_size=None: 0) == {"x", "edge_index"}
    # A graph may know its number of nodes without an attribute of that name.
    data = undirected_graph()
    assert "num_nodes" not in data
    _, named = unpack_batch(inspect.signature(lambda x, edge_index, num_nodes: 0), "Net", (data,), {})
    assert named["num_nodes"] == 40


@pytest.mark.parametrize(
    "forward", [lambda data: 0, lambda batch: 0, lambda batch, scale=1.0: 0, lambda graph, *rest, **more: 0]
)
def test_the_batch_itself_is_passed_to_a_model_that_takes_it(forward: Callable[..., Any]) -> None:
    assert unpacked(forward) == "batch"
    assert unpacked(forward, several()) == "batch"


def test_an_assignment_to_graphs_is_an_argument_next_to_others() -> None:
    assert unpacked(lambda x, edge_index, batch: 0, several()) == {"x", "edge_index", "batch"}
    assert unpacked(lambda batch, edge_index=None: 0, several()) == {"batch", "edge_index"}
    with pytest.raises(InputError, match=r"a batch without ptr.*Store it in data, or pass the arguments one by one"):
        unpacked(lambda x, edge_index, ptr: 0, several())


def test_a_model_that_takes_edges_is_not_given_the_batch_in_place_of_something_else() -> None:
    with pytest.raises(InputError, match=r"required argument of Net.forward, but got a batch without features"):
        unpacked(lambda features, edge_index=None: 0)


@pytest.mark.parametrize(
    ("forward", "shown"),
    [
        (lambda *args, **kwargs: 0, r"forward\(\*args, \*\*kwargs\)"),
        (lambda **given: 0, r"forward\(\*\*given\)"),
        (lambda x, *rest: 0, r"forward\(x, \*rest\)"),
        (lambda x, edge_index, /: 0, r"forward\(x, edge_index, /\)"),
    ],
)
def test_arguments_without_names_are_asked_for(forward: Callable[..., Any], shown: str) -> None:
    with pytest.raises(InputError, match=rf"Net.forward must name its arguments.*{shown}.*one by one.*call=.*gas.fit"):
        unpacked(forward)


class Passes(nn.Module):
    """Passes on whatever it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pyg.GCN(C, 6, num_layers=2, out_channels=4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_model_without_names_works_as_the_message_says() -> None:
    data = undirected_graph()
    model = Passes().eval()
    expected = model(data.x, data.edge_index).detach()
    gas.autoscale(model, data)
    with pytest.raises(InputError, match=r"Passes.forward must name its arguments"):
        gas.infer(model, data)
    loader = gas.HaloLoader(data, 3)
    assert_same(gas.infer(model, loader, call=lambda model, batch: model(batch.x, batch.edge_index)), expected)
    with pytest.raises(InputError, match=r"Passes.forward must name its arguments"):
        gas.fit(Passes(), Data(**data.to_dict(), val_mask=~data.train_mask, test_mask=~data.train_mask), epochs=1)


class TakesBatch(nn.Module):
    """Calls its only argument ``batch``, as an attribute of a PyG batch is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv(C, 6), pyg.SAGEConv(6, 4)

    def forward(self, batch: Data) -> Tensor:
        out: Tensor = self.second(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
        return out


@pytest.mark.parametrize("make", [undirected_graph, several])
def test_a_model_of_batches_on_a_graph_made_of_several(make: Callable[[], Data]) -> None:
    data = make()
    model = TakesBatch().eval()
    expected = model(data).detach()
    gas.autoscale(model, data)
    assert_same(gas.infer(model, gas.HaloLoader(data, 4, partition="random")), expected)
    assert_same(gas.infer(model, data), expected)


# What is refused #####################################################################################################


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_rows_are_refused_by_name(layout: str) -> None:
    model, data, batch = scaled()
    x = getattr(batch.x, layout)()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: model(x, batch.edge_index), "argument 1"),
        (lambda: model(edge_index=batch.edge_index, x=x), "x"),
        (lambda: model(copy.copy(batch).update({"x": x})), "x"),
    ]
    for call, name in calls:
        with pytest.raises(InputError, match=rf"dense rows of nodes and edges, but got torch.sparse_\w+ for {name}\."):
            call()
    taking = gas.autoscale(TakesBatch(), data)
    with pytest.raises(InputError, match=r"but got torch.sparse_\w+ for batch.x\."):
        taking(copy.copy(batch).update({"x": x}))


def test_sparse_tensors_without_rows_of_the_graph_are_the_models_business() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pyg.SAGEConv(C, 4)

        def forward(self, x: Tensor, edge_index: Tensor, mix: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index) @ mix.to_dense()
            return out

    data = undirected_graph()
    model, mix = gas.autoscale(Scales(), data), torch.rand(4, 4).to_sparse()
    batch = next(iter(gas.HaloLoader(data, 3)))
    assert_same(model(batch.x, batch.edge_index, mix), model(batch.x, batch.edge_index, mix.to_dense()))


TRANSFORMS: dict[str, Callable[[nn.Module, Data], Any]] = {
    "grad": lambda model, batch: torch.func.grad(
        lambda weights: torch.func.functional_call(model, weights, (batch.x, batch.edge_index)).sum()
    )(dict(model.named_parameters())),
    "vmap": lambda model, batch: torch.func.vmap(lambda scale: model(batch.x * scale, batch.edge_index))(torch.ones(2)),
    "jvp": lambda model, batch: torch.func.jvp(lambda x: model(x, batch.edge_index), (batch.x,), (batch.x,)),
    "jacrev": lambda model, batch: torch.func.jacrev(lambda x: model(x, batch.edge_index))(batch.x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str) -> None:
    model, _, batch = scaled()
    for _ in range(2):  # before and after the model is known
        with pytest.raises(UnsupportedModelError, match=r"ordinary tensors, but got a call inside a transform"):
            TRANSFORMS[name](model, batch)
        model(batch)


def test_forward_mode_is_refused() -> None:
    model, _, batch = scaled()
    with forward_ad.dual_level(), pytest.raises(UnsupportedModelError, match="forward-mode"):
        model(forward_ad.make_dual(batch.x, torch.ones_like(batch.x)), batch.edge_index)  # type: ignore[no-untyped-call]
    model(batch)


def test_other_weights_by_functional_call() -> None:
    data = undirected_graph()
    model = pyg.GraphSAGE(C, 6, num_layers=2, out_channels=4).eval()
    weights = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    expected = torch.func.functional_call(model, weights, (data.x, data.edge_index))
    gas.autoscale(model, data)
    batch = next(iter(gas.HaloLoader(data, 1)))
    out = torch.func.functional_call(model, weights, (batch.x, batch.edge_index))
    assert_same(out, expected[batch.n_id])


# Heterogeneous graphs ################################################################################################


def test_arguments_by_type_are_found_by_name() -> None:
    batch = next(iter(gas.HaloLoader(typed_graph(), 3)))

    def found(forward: Callable[..., Any], **kwargs: Any) -> Any:
        args, named = unpack_batch(inspect.signature(forward), "Net", (batch,), kwargs)
        for name, value in named.items():
            assert value == (kwargs[name] if name in kwargs else batch.collect(name.removesuffix("_dict")))
        return "batch" if args == (batch,) else set(named)

    assert found(lambda x_dict, edge_index_dict: 0) == {"x_dict", "edge_index_dict"}
    assert found(lambda x_dict, edge_index_dict, n_id_dict, noise=1: 0) == {"x_dict", "edge_index_dict", "n_id_dict"}
    assert found(lambda x, edge_index, *rest, **more: 0) == {"x", "edge_index"}
    assert found(lambda x, edge_index, alpha: 0, alpha=2) == {"x", "edge_index", "alpha"}
    assert found(lambda hetero: 0) == found(lambda batch: 0) == found(lambda data, noise=0.1: 0) == "batch"
    with pytest.raises(InputError, match=r"got n_id beside dictionaries, of which the type is not known.*call="):
        found(lambda x_dict, edge_index_dict, n_id: 0)
    with pytest.raises(InputError, match="got a batch of no type with height"):
        found(lambda x_dict, height_dict: 0)
    with pytest.raises(InputError, match="got a batch of no type with height"):
        found(lambda x, height: 0)


def test_converted_models_need_no_call_of_their_own() -> None:
    data = typed_graph()
    for kind in {*data.node_types} - {"author", "paper"}:
        del data[kind]
    for relation in {*data.edge_types} - {*TARGETS}:
        del data[relation]
    plain = converted("sum").double()
    with torch.no_grad():
        expected = plain(data.x_dict, data.edge_index_dict)
    model = gas.autoscale(plain, data)
    found = gas.infer(model, gas.HaloLoader(data, 3))
    for kind, rows in expected.items():
        assert_same(found[kind], rows)


# Copies and files ####################################################################################################


def through_file(batch: Data) -> Data:
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(batch: Data) -> Data:
    return pickle.loads(pickle.dumps(batch))  # noqa: S301


@pytest.mark.parametrize("way", [through_pickle, through_file])
def test_batches_from_files_are_plain_and_refused(way: Callable[[Data], Data]) -> None:
    model, data, batch = scaled()
    loaded = way(batch)
    assert type(loaded) is Data
    for name, value in batch:
        if isinstance(value, Tensor):
            assert type(loaded[name]) is Tensor
            assert torch.equal(loaded[name], value.as_subclass(Tensor))
        else:
            assert loaded[name] == value
    with pytest.raises(InputError, match=r"must be called with a batch of a HaloLoader.*gas.infer\(model, data\)"):
        model(loaded)
    assert_same(gas.detach(model)(loaded.x, loaded.edge_index), model(batch.x, batch.edge_index))
    assert data.num_nodes == 40


def test_copies_belong_to_the_batch() -> None:
    model, _, batch = scaled()
    model.eval()
    for copied in (copy.copy(batch), copy.deepcopy(batch), batch.clone()):
        assert_same(model(copied), model(batch))
    edges = copy.copy(batch.edge_index)
    assert edges is not batch.edge_index
    assert edges.data_ptr() == batch.edge_index.data_ptr()
    assert_same(model(batch.x, edges), model(batch))
    edges.plain[0, 0] = 0
    assert type(copy.copy(edges)) is Tensor
