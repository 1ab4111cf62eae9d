"""Opens a run folder to look at it: settings, rows, summary and network."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.shrink import Network
from prunex_jax.tasks import Own
from prunex_jax.train.build.config import ExperimentConfig, resolve_config
from prunex_jax.train.build.experiment import own_of
from prunex_jax.train.build.optimizer import MakeOptimizer
from prunex_jax.train.records.folder import (
    CONFIG,
    ENVIRONMENT,
    SUMMARY,
    RunFolder,
    holds_run,
    read_json,
)
from prunex_jax.train.records.restoring import TrainedNetwork, load_trained


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRun:
    """A run as its folder has it; nothing is trained, and nothing is written there.

    Attributes:
      workdir: The folder.
      config: Its settings.
      environment: Versions, devices and the source that it ran on, at its last start.
      rows: What it has logged, one dict per logged step.
      summary: How it ended; None if it has not.
    """

    workdir: Path
    config: ExperimentConfig
    environment: Mapping[str, Any]
    rows: list[dict[str, Any]]
    summary: Mapping[str, Any] | None
    _own: Own | None = None
    _optimizer: MakeOptimizer | None = None

    @property
    def network(self) -> Network:
        """The network of the newest checkpoint, shrunk; host arrays."""
        return self.trained.shrunk

    @functools.cached_property
    def trained(self) -> TrainedNetwork:
        """The newest checkpoint: masked and shrunk network, certificate, export.

        Raises:
          UserError: There is no checkpoint, or the network was brought to the run and
            was not given to `open_run`.
        """
        return self.at(None)

    def at(self, step: int | None) -> TrainedNetwork:
        """The checkpoint of a step; None takes the newest.

        Raises:
          UserError: As `trained`.
        """
        return load_trained(
            self.workdir,
            step=step,
            simulates=True,
            own=self._own,
            own_optimizer=self._optimizer,
        )

    def export(self, folder: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
        """Exports the network, with a certificate; see `TrainedNetwork.export`."""
        return self.trained.export(folder, overwrite=overwrite)


def open_run(workdir: str | Path, **brought: Any) -> OpenedRun:
    """Opens a run folder, of a run that has ended, was stopped or is at work.

    Args:
      workdir: The run folder; it is only read.
      **brought: What was brought to `train`, by the same names: `model`, `data`,
        `loss`, `inputs`, `metrics` and `optimizer`. It is needed for the network only.
    Raises:
      UserError: The folder holds no run, or a file of it cannot be read.
    Example:
      >>> import tempfile
      >>> from prunex_jax.train import train
      >>> settings = {'run': {'steps': 2}, 'method': {'name': 'dense'},
      ...             'model': {'name': 'resnet20', 'width': 0.25}}
      >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
      ...     result = train(settings, folder)
      ...     run = open_run(folder)
      prunex_jax ...
      >>> run.config.model.width, run.summary['steps'], len(run.rows)
      (0.25, 2, 1)
    """
    path = expanded(workdir)
    if not holds_run(path):
        raise UserError(f"{path} holds no run; give the folder of one")
    optimizer = brought.pop("optimizer", None)
    return OpenedRun(
        workdir=path,
        config=resolve_config(read_json(path / CONFIG)),
        environment=read_json(path / ENVIRONMENT),
        rows=RunFolder(path, is_primary=False).read_rows(),
        summary=read_json(path / SUMMARY) if (path / SUMMARY).is_file() else None,
        _own=own_of(**brought),
        _optimizer=optimizer,
    )
