"""Where the numbers of a run may go besides its folder: TensorBoard, Weights & Biases and MLflow, by one protocol."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gnnautoscale._util import checked, reason_of
from gnnautoscale.errors import InputError
from gnnautoscale.runs import FitResult


@runtime_checkable
class Logger(Protocol):
    """Gets the numbers of a run while it trains; an object of your own with these methods does as well.

    Example:
        >>> class Printer:
        ...     def start(self, about): print("training", about["title"])
        ...     def log(self, numbers, epoch): print(epoch, sorted(numbers))
        ...     def end(self, result): print("done" if result else "failed")
        >>> isinstance(Printer(), Logger)
        True
    """

    def start(self, about: Mapping[str, Any]) -> None:
        """Training begins: what the run is, with its ``"title"``, ``"options"``, ``"data"`` and ``"model"``."""

    def log(self, numbers: Mapping[str, float], epoch: int) -> None:
        """Numbers of an epoch, by names such as ``loss``, ``scores/val`` and ``seconds``."""

    def end(self, result: FitResult | None) -> None:
        """Training is over; ``None`` if it failed."""


class TensorBoard:
    """Writes for TensorBoard.

    Args:
        folder: Where to; several runs may be below one folder.
        first: The epoch to begin with: what the folder has from there on is dropped.

    Example:
        >>> from tempfile import mkdtemp
        >>> logger = TensorBoard(mkdtemp())  # doctest: +SKIP
    """

    @checked(first={"least": 0})
    def __init__(self, folder: str | Path, first: int = 1) -> None:
        _need("tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(folder), purge_step=first)

    def start(self, about: Mapping[str, Any]) -> None:
        """See :class:`Logger`."""

    def log(self, numbers: Mapping[str, float], epoch: int) -> None:
        """See :class:`Logger`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, epoch)

    def end(self, result: FitResult | None) -> None:
        """See :class:`Logger`."""
        self._writer.close()


class WandB:
    """Sends the numbers to Weights & Biases.

    Args:
        options: Arguments of ``wandb.init``, such as ``project`` and ``name``; by default its title is the name.

    Example:
        >>> gas.fit(model, data, loggers=[WandB(project="my graphs")])  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self._wandb, self._options, self._run = _need("wandb"), options, None

    def start(self, about: Mapping[str, Any]) -> None:
        """See :class:`Logger`."""
        self._run = self._wandb.init(**{"name": about["title"], "config": dict(about["options"]), **self._options})

    def log(self, numbers: Mapping[str, float], epoch: int) -> None:
        """See :class:`Logger`."""
        if self._run is not None:
            self._run.log(dict(numbers), step=epoch)

    def end(self, result: FitResult | None) -> None:
        """See :class:`Logger`."""
        if self._run is not None:
            if result is not None:
                self._run.summary.update({f"best/{split}": score for split, score in result.scores.items()})
            self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """Sends the numbers to MLflow.

    Args:
        experiment: Name of the experiment; by default MLflow's own.
        options: Arguments of ``mlflow.start_run``; by default the run has its title as name.

    Example:
        >>> gas.fit(model, data, loggers=[MLflow("my graphs")])  # doctest: +SKIP
    """

    def __init__(self, experiment: str | None = None, **options: Any) -> None:
        self._mlflow, self._experiment, self._options = _need("mlflow"), experiment, options

    def start(self, about: Mapping[str, Any]) -> None:
        """See :class:`Logger`."""
        if self._experiment is not None:
            self._mlflow.set_experiment(self._experiment)
        self._mlflow.start_run(**{"run_name": about["title"], **self._options})
        self._mlflow.log_params(dict(about["options"]))

    def log(self, numbers: Mapping[str, float], epoch: int) -> None:
        """See :class:`Logger`."""
        self._mlflow.log_metrics(dict(numbers), step=epoch)

    def end(self, result: FitResult | None) -> None:
        """See :class:`Logger`."""
        if result is not None:
            self._mlflow.log_metrics({f"best/{split}": score for split, score in result.scores.items()})
        self._mlflow.end_run("FINISHED" if result is not None else "FAILED")


#: Those that need nothing to be made, by their names on the command line.
BY_NAME = {"wandb": WandB, "mlflow": MLflow}


def start_logger(logger: Logger, about: Mapping[str, Any]) -> None:
    """Tell a logger that training begins; whatever keeps it from starting ends the run before it has trained."""
    try:
        logger.start(about)
    except Exception as error:  # of any package
        name, fix = type(logger).__name__, "Correct the settings of its package, or leave it out."
        raise InputError(f"{name} must be able to start", got=reason_of(error).rstrip("."), fix=fix) from error


def check_loggers(loggers: Any) -> list[Logger]:
    """Refuse anything but a list of loggers."""
    if not isinstance(loggers, (list, tuple)) or not all(isinstance(each, Logger) for each in loggers):
        got = type(loggers).__name__ if not isinstance(loggers, (list, tuple)) else repr(loggers)
        fix = "Pass objects with the methods start, log and end."
        raise InputError("loggers must be a list of gnnautoscale.training.Logger", got=got, fix=fix)
    return list(loggers)


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a record by a path, such as ``scores/val`` of an epoch and ``staleness/age/mean``."""
    values = {name: value for name, value in record.items() if name not in ("kind", "epoch", "step")}
    return _scalars("" if record["kind"] == "epoch" else record["kind"], values)


def check_package(name: str) -> None:
    """Refuse to log without a package."""
    if find_spec(name) is None:
        raise InputError(
            f"logging there needs the package {name}", got="an environment without it", fix=f"Run: pip install {name}"
        )


def _need(name: str) -> Any:
    check_package(name)
    return importlib.import_module(name)


def _scalars(prefix: str, value: Any) -> dict[str, float]:
    """All numbers in nested values, by a path such as ``age/mean``; items of lists go by their layer."""
    if isinstance(value, dict):
        items = [(prefix if name == "layers" else f"{prefix}/{name}", item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{prefix}/{item['layer']}", item) for item in value if "layer" in item]
    else:
        return {prefix: float(value)} if isinstance(value, (int, float)) else {}
    return {name: number for path, item in items for name, number in _scalars(path.lstrip("/"), item).items()}
