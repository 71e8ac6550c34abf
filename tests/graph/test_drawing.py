"""Parts drawn into batches."""

from __future__ import annotations

from gnnautoscale.graph.drawing import PartDrawing


def test_without_shuffling_epochs_are_alike() -> None:
    drawing = PartDrawing(5, 2)
    assert drawing.epoch() == drawing.epoch() == drawing.in_order() == [(0, 1), (2, 3), (4,)]
    assert drawing.in_order(together=2) == [(0, 1, 2, 3), (4,)]


def test_parts_are_spread_evenly_over_a_number_of_batches() -> None:
    assert [len(group) for group in PartDrawing(9, 4).epoch()] == [4, 4, 1]
    for count, sizes in ((2, [5, 4]), (3, [3, 3, 3]), (4, [3, 2, 2, 2])):
        assert [len(group) for group in PartDrawing(9, 4, count).epoch()] == sizes


def test_drawings_recur_and_anew_ones_differ() -> None:
    anew, few = (PartDrawing(20, 4, shuffle=True, drawings=drawings) for drawings in (None, 2))
    epochs = [anew.epoch() for _ in range(6)]
    assert len({group for groups in epochs for group in groups}) > 20
    assert all(sorted(part for group in groups for part in group) == list(range(20)) for groups in epochs)
    drawn = [few.epoch() for _ in range(6)]
    assert len({frozenset(groups) for groups in drawn}) == 2


def test_the_next_epoch_is_drawn_ahead_once() -> None:
    drawing = PartDrawing(20, 4, shuffle=True)
    first = drawing.first_of_next_epoch()
    assert drawing.first_of_next_epoch() == first == drawing.epoch()[0]


def test_a_state_continues_in_the_middle_of_an_epoch() -> None:
    drawing, other = (PartDrawing(20, 4, shuffle=True, drawings=3, seed=seed) for seed in (1, 2))
    groups = drawing.epoch()
    other.load_state_dict(drawing.state_dict(done=3))
    assert other.epoch() == groups[3:]
    assert [other.epoch() for _ in range(5)] == [drawing.epoch() for _ in range(5)]
