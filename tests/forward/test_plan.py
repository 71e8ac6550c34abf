"""What follows from a plan: live slots, levels, and which propagations fuse."""

from __future__ import annotations

import torch

from gnnautoscale.forward.plan import LayerCall, Plan

OUTPUT = Plan.OUTPUT


def needs(**slots: set[str]) -> dict[str, frozenset[str]]:
    return {OUTPUT if slot == "output" else slot: frozenset(needed) for slot, needed in slots.items()}


def test_slots_that_only_the_output_reads_have_no_history() -> None:
    chain = needs(a=set(), b={"a"}, c={"b"}, output={"c"})
    assert Plan(needs=chain).live == {"a", "b"}
    assert Plan(needs=chain).levels == [{"a"}, {"b"}]
    # A model that names its own slots has layers after the last one.
    assert Plan(needs=chain, explicit=True).levels == [{"a"}, {"b"}, {"c"}]


def test_slots_of_one_depth_are_one_level() -> None:
    plan = Plan(needs=needs(a=set(), b=set(), c={"a", "b"}, d={"a"}, e={"c", "d"}, output={"e"}))
    assert plan.live == {"a", "b", "c", "d"}
    assert plan.levels == [{"a", "b"}, {"c", "d"}]


def test_a_propagation_fuses_with_one_recorded_weight_at_most() -> None:
    weight, features = {"w": torch.ones(3)}, {"w": torch.ones(3, 2)}

    def call(*names: str, **options: frozenset[str]) -> LayerCall:
        return LayerCall([], [], [frozenset(names)], 1, shortcuts=options.get("shortcuts", frozenset({"fused"})))  # type: ignore[arg-type]

    assert call().fuses(0, {})
    assert call().weight(0) is None
    assert call("w").fuses(0, weight)
    assert call("w").weight(0) == "w"
    assert not call("w").fuses(0, {})  # computed in the batch
    assert not call("w").fuses(0, features)
    assert not call("w", "v").fuses(0, {**weight, "v": torch.ones(3)})
    assert not call("w", shortcuts=frozenset()).fuses(0, weight)


def test_a_copy_has_calls_of_its_own() -> None:
    """What was recorded for a call is looked up by the call itself."""
    plan = Plan(calls={"a": LayerCall(["node"], [None])}, needs=needs(a=set(), output={"a"}))
    copied = plan.copy()
    assert copied == plan
    assert copied.calls["a"] is not plan.calls["a"]
