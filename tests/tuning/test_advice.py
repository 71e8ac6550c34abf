"""What is proposed before training: candidates, the choice between them, and the command that follows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Data  # type: ignore[import-untyped]
from typer.testing import CliRunner

import gnnautoscale.cli as cli
from gnnautoscale.attach import autoscale
from gnnautoscale.cli.advice import TUNE, parse_memory, train_command
from gnnautoscale.cli.schema import TRAIN
from gnnautoscale.data import generate
from gnnautoscale.data.datasets import Dataset
from gnnautoscale.errors import InputError
from gnnautoscale.models import GCN
from gnnautoscale.tasks import NodeClassification, task_for
from gnnautoscale.training.options import FitOptions
from gnnautoscale.tuning import advice as tune
from gnnautoscale.tuning import trials
from gnnautoscale.tuning.advice import Candidate, choose, consider, part_counts
from gnnautoscale.tuning.trials import Cut, Place, Trial, Trials, interpolate

TINY = ["--data", "communities", "--nodes", "400", "--degree", "4", "--features", "5", "--classes", "3"]
DEVICE = Place("device", "same", "it fits")
MB = 10**6
UNIT = 10**8  # so much that the least margin does not matter


def graph(nodes: int = 400) -> Data:
    return generate.communities(nodes, degree=4, num_features=5, num_classes=3)


def candidate(parts: int, memory: int, epoch: float = 1.0, **changes: Any) -> Candidate:
    made = Candidate(
        parts, 0.1 * parts, 1000 // parts, "device", "same", True, memory, epoch / parts, epoch, True, True
    )
    return replace(made, **changes)


# The choice ##########################################################################################################


def test_counts_are_powers_and_leave_parts_of_some_size() -> None:
    assert part_counts(2) == [1, 2]
    assert part_counts(199) == [1, 2]
    assert part_counts(200) == [1, 2, 4]
    assert part_counts(10**5) == [1, 4, 16, 64, 256, 1024]
    for nodes in (3, 1000, 25_599, 25_600, 51_200, 10**9):
        counts = part_counts(nodes)
        assert 2 <= len(counts) <= tune.MOST_COUNTS
        assert counts[-1] <= max(2, nodes // tune.LEAST_NODES)


def test_chooses_the_fewest_parts_that_fit() -> None:
    few, many = candidate(2, 50, fits=False), candidate(4, 20)
    assert choose([few, many, candidate(8, 10)]) is many
    assert choose([few]) is None


def test_passes_over_what_is_slower() -> None:
    slow, fast = candidate(1, 50, slower_than=2), candidate(2, 50)
    assert choose([slow, fast]) is fast


class Known(Trials):
    """Trials with made-up measurements: seconds of a step and bytes at the peak by number of parts."""

    def __init__(self, measured: dict[int, tuple[float, int]], budget: int, places: list[Place] | None = None) -> None:
        labels = torch.zeros(8, dtype=torch.long)
        self.cuts = {parts: Cut(labels, 0.1 * parts, 1000 // parts, 1000 / parts, 0, 0) for parts in measured}
        self.places = places or [DEVICE]
        self.budget = budget
        self.levels = 2
        self.done = {(parts, DEVICE): Trial(memory, step, 0.0) for parts, (step, memory) in measured.items()}
        self._failed = set()
        self._device = torch.device("cpu")
        self._options, self._task = FitOptions(device="cpu"), NodeClassification(3)
        self._rows = [(5 * UNIT, 1, torch.float32)]  # histories of 40 units, with a second set for evaluation
        self._saved = 0.0
        self._dataset = Dataset.of(Data(num_nodes=5 * UNIT))


def test_full_batch_is_passed_over_only_for_what_is_faster_and_takes_no_more() -> None:
    def slower(step: float, memory: int) -> int | None:
        full = consider(Known({1: (1.2, 100 * UNIT), 2: (step, memory)}, budget=10**12))[0]
        return full.slower_than

    assert slower(0.49, 100 * UNIT) == 2  # an epoch of 0.98 seconds
    assert slower(0.51, 100 * UNIT) is None
    assert slower(0.49, 101 * UNIT) is None


@pytest.mark.parametrize("disk", [False, True])
def test_less_memory_never_gives_fewer_parts(disk: bool) -> None:
    places = [DEVICE, Place("device", "bfloat16", "")] + [Place("disk", "same", "")] * disk
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        random = torch.rand(2, 5, generator=generator)
        # Memory may as well grow with the number of parts: kept halos can outweigh smaller batches.
        measured = {2**i: (float(random[0, i]) / 2**i, int(60 * UNIT + 50 * UNIT * random[1, i])) for i in range(5)}
        before = 0
        for budget in range(150 * UNIT, 0, -5 * UNIT):
            chosen = choose(consider(Known(measured, budget, places)))
            if chosen is None:
                break
            assert chosen.num_parts >= before
            before = chosen.num_parts
        assert chosen is None
        assert before > 0


def test_histories_move_before_there_are_more_parts() -> None:
    places = [DEVICE, Place("device", "bfloat16", ""), Place("disk", "same", "")]

    def place(budget: int) -> tuple[int, str, str, bool]:
        chosen = choose(consider(Known({2: (1.0, 100 * UNIT), 4: (1.0, 50 * UNIT)}, budget, places)))
        assert chosen is not None
        return chosen.num_parts, chosen.storage, chosen.history_dtype, chosen.measured

    assert place(120 * UNIT) == (2, "device", "same", True)
    assert place(119 * UNIT) == (2, "device", "bfloat16", False)  # 20 units less
    assert place(95 * UNIT) == (2, "disk", "same", False)  # 40 units less
    assert place(71 * UNIT) == (4, "device", "same", True)


def test_says_what_is_needed_if_nothing_fits() -> None:
    with pytest.raises(InputError, match=r"got 5.9 GB. Pass at least 6 GB as memory, which 4 parts"):
        tune._advise(Known({1: (1.0, 100 * UNIT), 4: (1.0, 50 * UNIT)}, 59 * UNIT))


def test_refresh_if_histories_are_at_risk_and_it_costs_little() -> None:
    class Refreshed(Known):
        cost = 0.0

        def run(self, parts: int, place: Place, **changed: Any) -> Trial:
            assert changed == {"refresh_every": "epoch"}
            return Trial(50 * UNIT, 1.0, self.cost)

    known = Refreshed(
        {4: (1.0, 50 * UNIT), 8: (1.0, 50 * UNIT)}, 10**12
    )  # 0.4 and 0.8 halo nodes per node, 2 histories
    at_rest, at_risk = (each for each in consider(known))
    assert tune._refresh(at_rest, DEVICE, known)[0] == "never"
    known.cost = 8 * tune.REFRESH_COST
    assert tune._refresh(at_risk, DEVICE, known)[0] == "epoch"
    assert "adds 25 %" in tune._refresh(at_risk, DEVICE, known)[1]
    known.cost = 8 * tune.REFRESH_COST + 0.1
    assert tune._refresh(at_risk, DEVICE, known)[0] == "never"
    assert tune._refresh(replace(at_risk, measured=False), DEVICE, known)[0] == "never"


def test_compensates_if_measured_gradients_come_closer_to_full_batch() -> None:
    class Measured(Known):
        plain, peak = 0.8, 50 * UNIT
        compensated: float | None = 0.99

        def agreement(self, parts: int, together: int, place: Place) -> Any:
            assert (parts, together) == (40, 10)
            other = None if self.compensated is None else {"cosine": self.compensated}
            return {"cosine": self.plain, "compensated": other, "why_not": "it cannot."}

        def run(self, parts: int, place: Place, **changed: Any) -> Trial:
            assert (parts, changed) == (4, {"compensate": "gradient"})
            return Trial(self.peak, 1.5, 0.0)

    known = Measured({4: (1.0, 50 * UNIT)}, 100 * UNIT)
    (four,) = consider(known)

    def proposed(candidate: Candidate = four) -> tuple[str, str]:
        return tune._compensate({"num_parts": 40, "batch_size": 10}, candidate, DEVICE, known)

    assert proposed() == (
        "gradient",
        "the gradient of plain steps has a cosine of 0.800 to full batch's (measured), and compensated 0.990; a step "
        "takes 1.5 times as long (measured)",
    )
    assert proposed(replace(four, measured=False))[0] == "none"
    assert proposed(replace(four, epoch_seconds=trials.SECONDS))[0] == "none"
    known.peak = 99 * UNIT
    assert proposed()[0] == "none"
    assert proposed()[1].endswith("and 9.9 GB, too much")
    known.compensated = 0.85
    assert proposed()[0] == "none"
    assert proposed()[1].endswith("and compensated 0.850")
    known.compensated = None
    assert proposed()[1].endswith("and compensated steps are refused: it cannot")
    known._options = FitOptions(lipschitz=0.1, device="cpu")
    assert "penalty" in proposed()[1]


def test_measures_how_gradients_agree_with_full_batch() -> None:
    known = trials_of(graph(), memory=10**9)
    found = known.agreement(8, 2, DEVICE)
    assert found["compensated"] is not None
    assert found["cosine"] < found["compensated"]["cosine"]
    assert found["compensated"]["cosine"] == pytest.approx(1.0, abs=1e-3)


def test_joins_parts_if_batches_become_better_samples_and_fit() -> None:
    class Joined(Known):
        skew, rows, kept = 0.0, 500, 0

        def joined(self, parts: int, together: int) -> Cut:
            assert (parts, together) == (20, 10)
            return replace(self.cuts[20], connectivity=3.0, skew=self.skew, rows=self.rows, kept=self.kept)

    known = Joined({2: (1.0, 50 * UNIT), 20: (1.0, 50 * UNIT)}, 100 * UNIT)
    known.cuts[2] = replace(known.cuts[2], skew=0.5)
    two, twenty = consider(known)
    known.skew = 0.39
    assert tune._join(two, DEVICE, known) == (
        {"num_parts": 20, "batch_size": 10},
        "the targets of a part are off from the graph's by 0.50 (total variation), those of 10 out of 20 parts by "
        "0.39, with 3.00 halo nodes per node instead of 0.20",
    )
    known.rows = 2000  # and not 500: 10 units beside those of histories become 40
    assert tune._join(two, DEVICE, known)[0]["batch_size"] == 10
    known.rows = 2500
    options, why = tune._join(two, DEVICE, known)
    assert options == {"batch_size": 1}
    assert why.endswith("should take 9 GB")
    known.rows, known.skew = 500, 0.41
    assert tune._join(two, DEVICE, known)[0] == {"batch_size": 1}
    assert "too small" in tune._join(twenty, DEVICE, known)[1]


def test_a_gpu_captures_batches_that_come_back() -> None:
    class Joined(Known):
        kept = UNIT

        def joined(self, parts: int, together: int) -> Cut:
            return replace(self.cuts[20], kept=self.kept)

        @property
        def on_gpu(self) -> bool:
            return True

    known = Joined({2: (1.0, 50 * UNIT), 20: (1.0, 50 * UNIT)}, 100 * UNIT)
    known.cuts[2] = replace(known.cuts[2], skew=0.5)
    two, _ = consider(known)
    assert tune._join(two, DEVICE, known)[0] == {"num_parts": 20, "batch_size": 10, "drawings": tune.DRAWINGS}
    known.kept = 10 * UNIT
    assert tune._join(two, DEVICE, known)[0] == {"batch_size": 1}
    assert tune._join(two, replace(DEVICE, keep=False), known)[0]["batch_size"] == 10


# Estimates ###########################################################################################################


def test_interpolates_between_and_beyond() -> None:
    points = {1.0: 10.0, 3.0: 14.0, 5.0: 30.0}
    assert [interpolate(points, place) for place in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)] == [10, 12, 14, 22, 30, 38]
    assert interpolate(points, 0.0) == 8.0
    assert interpolate({2.0: 8.0, 3.0: 14.0}, 0.5) == 0.0
    assert interpolate(points, 6.0, least_slope=20.0) == 50.0
    assert interpolate(points, 2.0, least_slope=20.0) == 12.0
    assert interpolate({2.0: 6.0}, 4.0) == 12.0
    assert interpolate({2.0: 6.0}, 4.0, least_slope=5.0) == 16.0


def test_looks_at_a_cut() -> None:
    # Two triangles and a bridge: each part pulls one node from the other.
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 2, 3], [1, 2, 0, 4, 5, 3, 3, 2]])
    data = Data(x=torch.zeros(6, 2), edge_index=edges, y=torch.tensor([0, 0, 0, 1, 1, 1]))
    data.train_mask = torch.tensor([True, False, True, True, False, True])
    cut = Cut.of(data, torch.tensor([0, 0, 0, 1, 1, 1]), NodeClassification(2))
    assert cut.connectivity == pytest.approx(1 / 3)
    assert (cut.rows, cut.work) == (4, (8 + 8) / 2)
    assert cut.kept == 8 * (2 * 4 + 8 + 1) + 8 * 16
    assert cut.skew == 0.5
    assert cut.largest == cut.kept // 2


def trials_of(data: Data, memory: int | None = None, counts: Sequence[int] = (1, 2, 4), **options: Any) -> Trials:
    dataset = Dataset.of(data)
    chosen = FitOptions(**options)
    return Trials(lambda: GCN(5, 3, hidden=16, layers=3), dataset, task_for(dataset), list(counts), memory, chosen)


def test_knows_how_much_histories_take() -> None:
    known = trials_of(graph(), memory=10**9)
    assert known.levels == 2
    assert known._history_bytes("same") == 2 * 400 * 2 * 16 * 4
    assert known._history_bytes("bfloat16") == known._history_bytes("same") // 2
    assert trials_of(graph(), evaluate_parts=1)._history_bytes("same") == 400 * 2 * 16 * 4


def test_offers_places_that_take_less_and_less() -> None:
    def offered(**options: Any) -> list[tuple[str, str, bool]]:
        return [(place.storage, place.history_dtype, place.keep) for place in trials_of(graph(), **options).places]

    anew = [("device", "same", False), ("device", "bfloat16", False)]
    assert offered() == [("device", "same", True), ("device", "bfloat16", True), *anew]
    assert offered(keep_batches=False) == anew


def test_batches_that_are_not_kept_take_the_memory_of_a_few() -> None:
    known = trials_of(graph(1000), counts=[1, 16])
    kept, anew = known.places[0], known.places[2]
    saved = known.cuts[16].kept - trials.AT_A_TIME * known.cuts[16].largest
    assert known.known_bytes(16, kept) - known.known_bytes(16, anew) == saved > 0
    assert known.known_bytes(1, kept) == known.known_bytes(1, anew) == known.cuts[1].kept
    assert known.batch_options(kept) == {}
    assert known.batch_options(anew) == {"keep_batches": False}


def test_offers_the_disk_if_there_is_a_folder(tmp_path: Path) -> None:
    assert trials_of(graph(), history_dir=str(tmp_path)).places[-1].storage == "disk"


def test_never_tries_what_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(self: Trials, parts: int, place: Place, **changed: Any) -> Trial:
        tried.append(parts)
        return Trial(self.cuts[parts].rows * MB, 0.001, 0.0)

    monkeypatch.setattr(Trials, "run", run)
    data = graph(1000)
    rows = {parts: cut.rows for parts, cut in trials_of(data).cuts.items()}
    assert rows[4] < rows[2] < rows[1] == 1000
    advice = tune.tune(lambda: GCN(5, 3, hidden=16), data, memory=int(1.3 * rows[2] * MB))
    assert 1 not in tried
    assert advice.options["num_parts"] == 2
    assert advice.chosen.measured
    full = advice.candidates[0]
    assert (full.measured, full.fits) == (False, False)
    assert full.memory == pytest.approx(1000 * MB, rel=0.05)


def test_keeps_no_batches_in_a_trial_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(self: Trials, parts: int, place: Place, **changed: Any) -> Trial:
        tried.append(place.keep)
        return Trial(self.known_bytes(parts, place) + 10 * MB, 0.001, 0.0)

    monkeypatch.setattr(Trials, "run", run)
    data = generate.communities(1000, degree=4, num_features=10_000, num_classes=3)  # 40 MB
    advice = tune.tune(lambda: GCN(10_000, 3, hidden=4), data, memory=68 * MB)
    assert tried
    assert not any(tried)
    assert advice.options["num_parts"] > 1
    assert advice.options["keep_batches"] is False
    assert "too much to keep" in advice.reasons["keep_batches"]


def test_never_tries_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "run", lambda self, parts, place, **_: Trial(MB, 100.0 / parts, 0.0))
    advice = tune.tune(lambda: GCN(5, 3, hidden=16), graph(), memory=10**9)
    assert [each.num_parts for each in advice.candidates if each.measured] == [8]


def test_a_trial_that_runs_out_of_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Trials, parts: int, place: Place, **_: Any) -> Trial:
        if parts < 4:
            raise MemoryError("no room")
        return Trial(MB, 0.001, 0.0)

    monkeypatch.setattr(Trials, "run", run)
    advice = tune.tune(lambda: GCN(5, 3, hidden=16), graph(), memory=10**9)
    assert {each.num_parts: each.fits for each in advice.candidates} == {1: False, 2: False, 4: True, 8: True}
    assert advice.options["num_parts"] == 4


def test_a_trial_measures() -> None:
    known = trials_of(graph(), grad_norm=1.0)
    trial = known.run(4, known.places[0])
    assert trial.memory >= 0
    assert 0 < trial.step_seconds < 5
    assert trial.other_seconds > 0
    assert known.run(4, known.places[0], refresh_every="epoch").other_seconds > 0


def test_a_trial_leaves_the_folder_of_histories_to_the_next(tmp_path: Path) -> None:
    known = trials_of(graph(), history_dir=str(tmp_path))
    disk = next(place for place in known.places if place.storage == "disk")
    assert known.attempt(4, disk)
    assert known.attempt(2, disk)
    assert {parts for parts, _ in known.done} == {2, 4}
    assert known.expect(2, disk) is known.done[2, disk]


# The function and the command ########################################################################################


def test_advice_explains_every_option() -> None:
    advice = tune.tune("gcn", graph(), memory=10**9, model_options={"hidden": 16})
    assert advice.options == {"mode": "full"} or advice.options["num_parts"] > 1
    assert advice.options.keys() == advice.reasons.keys()
    assert all(advice.reasons.values())
    assert json.loads(json.dumps(advice.to_dict()))["budget"] == 10**9
    assert [each.num_parts for each in advice.candidates] == [1, 2, 4, 8]


def test_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    tune.tune("gcn", graph(), model_options={"hidden": 4})
    assert torch.equal(torch.rand(1), first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_parts": 4}, "got num_parts, which it decides itself"),
        ({"num_worker": 4}, "got 'num_worker'. Did you mean 'num_workers'?"),
        ({"memory": 0}, "memory must be an integer of at least 1"),
        ({"device": "abacus"}, "device must be one"),
        ({"memory": 1}, r"Pass at least [\d.]+ MB"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tune.tune("gcn", graph(), **arguments)


def test_refuses_an_autoscaled_model_and_a_single_node() -> None:
    def build() -> nn.Module:
        return autoscale(GCN(5, 3, hidden=4), graph())

    with pytest.raises(InputError, match="tune needs a plain model"):
        tune.tune(build, graph())
    mask = torch.tensor([True])
    one = Data(x=torch.ones(1, 2), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([0]))
    one.train_mask = one.val_mask = mask
    with pytest.raises(InputError, match="at least two nodes"):
        tune.tune("gcn", one)


ECHOES = ["--data", "echoes", "--graphs", "2", "--nodes", "400", "--readout", "mean"]


@pytest.mark.parametrize("asked", [TINY, [*TINY, "--task", "link", "--decoder", "bilinear"], ECHOES], ids=" ".join)
def test_the_proposed_command_trains(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trials, "run", lambda self, parts, place, **_: Trial(self.cuts[parts].rows * MB, 1e-3, 0.0))
    memory = ["--memory", "300MB", "--epochs", "2", "--seed", "7", "--no-keep-batches", "--hidden", "8"]
    result = CliRunner().invoke(cli.app, ["tune", *asked, *memory, "--json"])
    assert result.exception is None, result.exception
    advice = json.loads(result.stdout)
    assert advice["options"]["num_parts"] > 1
    assert advice["options"]["batch_size"] > ("link" in asked)
    assert "cosine" in advice["reasons"]["compensate"]  # that was measured
    words = shlex.split(advice["command"])
    assert words[:2] == ["gas", "train"]
    trained = CliRunner().invoke(cli.app, [*words[1:], "--json", "--quiet"])
    assert trained.exception is None, trained.exception
    options = json.loads(trained.stdout)["options"]
    nodes = int(asked[asked.index("--nodes") + 1])
    wanted = {**advice["options"], "epochs": 2, "seed": 7, "keep_batches": False, "hidden": 8, "nodes": nodes}
    assert {name: options[name] for name in wanted} == wanted


def test_command_shows_candidates_reasons_and_the_command() -> None:
    lines = CliRunner().invoke(cli.app, ["tune", *TINY, "--hidden", "4"]).stdout.splitlines()
    assert lines[0].startswith("parts\thalo per node")
    assert [line.split("\t")[0] for line in lines[1:5]] == ["full batch", "2", "4", "8"]
    assert sum("proposed" in line for line in lines[1:5]) == 1
    assert lines[5].startswith(("--mode full: ", "--num-parts "))
    assert lines[-1].startswith("gas train --data communities")


def test_every_option_of_tune_is_one_of_train() -> None:
    assert {option.name for option in TUNE} <= {option.name for option in TRAIN}
    assert set(tune.PASSED) <= {option.name for option in TUNE}


def test_command_line_leaves_out_defaults() -> None:
    given = {option.name: option.default for option in TUNE}
    assert train_command(given, {"refresh_every": "epoch"}) == "gas train --refresh-every epoch"
    assert train_command({**given, "undirected": True}, {}) == "gas train --undirected"


@pytest.mark.parametrize("text", ["", "GB", "8 apples", "-1GB", "1.2.3GB", "."])
def test_refuses_memory_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="--memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2gb", 2 * 10**9), ("3 MiB", 3 * 2**20), ("0.5TB", 5 * 10**11), ("7", 7), ("7B", 7)]
)
def test_reads_memory(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


def test_trial_ends_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fit(model: nn.Module, dataset: Dataset, **options: Any) -> Any:
        asked.update(options)
        raise MemoryError

    monkeypatch.setattr(trials, "fit", fit)
    known = trials_of(graph(), epochs=900, patience=3, evaluate_every=50, grad_norm=2.0)
    assert known.attempt(4, known.places[0])
    assert (asked["epochs"], asked["steps_per_epoch"], asked["grad_norm"]) == (trials.EPOCHS, 4, 2.0)
    assert (asked["patience"], asked["evaluate_every"]) == (None, 1)
    assert not known.attempt(4, known.places[0])
