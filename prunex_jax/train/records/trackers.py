"""Shows the rows of a run's metrics in TensorBoard, trackio and Weights & Biases.

All are optional packages. What is missing is refused before any work; what fails later
is said once, and the run goes on without it. TensorBoard reads RUN/tensorboard;
RUN/wandb.json and RUN/trackio.json keep the name under which a resumed run goes on.
"""

import functools
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from prunex_jax.base.errors import one_line
from prunex_jax.base.files import read_object, write_json
from prunex_jax.base.imports import need_package
from prunex_jax.train.build.config import dotted_keys
from prunex_jax.train.build.settings import RunConfig

_TENSORBOARD = "tensorboard"
_WANDB = "wandb"
_WANDB_RUN = "wandb.json"
_TRACKIO_RUN = "trackio.json"
# Setting -> the package that it needs; the extra is called like the setting.
_PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
_LOGIN_SECONDS = 60
# What a tracker leaves in a run folder.
FILES_OF_TRACKERS = (_TENSORBOARD, _WANDB, _WANDB_RUN, _TRACKIO_RUN)


class Tracker(Protocol):
    """Where rows go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the numbers of one row."""

    def close(self, is_good: bool) -> None:
        """Writes what is left; `is_good` unless an error ends the run."""


class Trackers:
    """The trackers that the settings of a run ask for; none on most processes.

    A tracker opens with the first row: by then the run knows where it goes on.

    Args:
      makers: Name -> makes a tracker of the step after which the run goes on, and of
        the last step that was shown before.
      tell: Called with one line about a tracker that fails.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[int, int], Tracker]],
        tell: Callable[[str], None],
    ) -> None:
        self._makers = dict(makers)
        self._tell = tell
        self._open: dict[str, Tracker] = {}
        self._step = self._last_shown = -1
        # Names that the newest step was shown with: costs are in rows of both kinds.
        self._newest: tuple[int, set[str]] = (-1, set())

    def __enter__(self) -> Self:
        """Has nothing to do yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all of them."""
        for name in tuple(self._open):
            self._try(name, self._open.pop(name).close, kind is None)

    def go_on_after(self, step: int, last_shown: int) -> None:
        """Says where the run goes on, and the last step that it had shown before."""
        self._step, self._last_shown = step, last_shown

    def show(self, row: Mapping[str, Any]) -> None:
        """Hands a row of plain values to every tracker; never fails."""
        step = row["step"]
        if step != self._newest[0]:
            self._newest = step, set()
        shown = self._newest[1]
        values = {
            key.replace(".", "/"): value
            for key, value in dotted_keys(row).items()
            if isinstance(value, int | float) and key not in {"step", *shown}
        }
        shown.update(dotted_keys(row))
        for name in tuple(self._makers):
            self._try(name, self._write, name, step, values)

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if name not in self._open:
            self._open[name] = self._makers[name](self._step, self._last_shown)
        self._open[name].write(step, values)

    def _try(self, name: str, do: Callable[..., None], *arguments: Any) -> None:
        """Goes on without a tracker that fails, whatever its package raises."""
        try:
            do(*arguments)
        except Exception as error:
            self._makers.pop(name, None)
            self._open.pop(name, None)
            self._tell(f"{name} failed, the run goes on without it: {one_line(error)}")


def check_trackers(config: RunConfig) -> None:
    """Refuses trackers whose package is not installed.

    Raises:
      UserError: With the command that installs it.
    """
    for setting, package in _PACKAGES.items():
        value = getattr(config, setting)
        if value:
            need_package(package, setting, f"config.run.{setting}={value}")


def make_trackers(
    config: RunConfig,
    workdir: Path,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Trackers:
    """Makes the trackers that settings ask for."""
    makers: dict[str, Callable[[int, int], Tracker]] = {}
    if config.tensorboard:
        makers["TensorBoard"] = functools.partial(_TensorBoard, workdir)
    if config.trackio:
        makers["trackio"] = lambda _, last: _Trackio(
            config.trackio, workdir, settings, last
        )
    if config.wandb:
        makers["W&B"] = lambda _, last: _Wandb(config.wandb, workdir, settings, last)
    return Trackers(makers, tell)


class _TensorBoard:
    """Event files; those of an abandoned course are hidden from the resumed step on."""

    def __init__(self, workdir: Path, step: int, last_shown: int) -> None:
        import tensorboardX

        purged = step + 1 if last_shown >= 0 else None
        folder = str(workdir / _TENSORBOARD)
        # Names have seconds: another start within the same one would write over it.
        suffix = f".{time.time_ns()}"
        self._writer = tensorboardX.SummaryWriter(
            folder, purge_step=purged, filename_suffix=suffix
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, is_good: bool) -> None:
        del is_good
        self._writer.close()


def _remembered(file: Path, project: str) -> tuple[dict[str, Any], bool]:
    """What a run is called in a project, and whether it is new there.

    The run folder keeps the name, so that a resumed run goes on with its curves.
    """
    held = read_object(file) or {}
    if held.get("project") == project and isinstance(held.get("id"), str):
        return held, False
    return {"project": project, "id": uuid.uuid4().hex}, True


class _Wandb:
    """A run of a project, found again by the name that the run folder keeps."""

    def __init__(
        self, project: str, workdir: Path, settings: Mapping[str, Any], last_shown: int
    ) -> None:
        import wandb

        held, is_new = _remembered(workdir / _WANDB_RUN, project)
        # Rows do not vanish there: what a resumed run repeats is left out.
        self._last_shown = -1 if is_new else last_shown
        self._run = wandb.init(
            project=project,
            id=held["id"],
            name=workdir.name,
            dir=str(workdir),
            resume="allow",
            config=dict(settings),
            # Nobody may be there to answer when it asks who they are.
            settings={"login_timeout": _LOGIN_SECONDS},
        )
        write_json(workdir / _WANDB_RUN, held)
        # A row of validation follows the row of its step: the step is a number of each.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_shown:
            self._run.log({"step": step, **values})

    def close(self, is_good: bool) -> None:
        self._run.finish(exit_code=0 if is_good else 1)


class _Trackio:
    """A run of a project on this machine, or on a server that trackio is told of."""

    def __init__(
        self, project: str, workdir: Path, settings: Mapping[str, Any], last_shown: int
    ) -> None:
        import trackio

        held, is_new = _remembered(workdir / _TRACKIO_RUN, project)
        self._last_shown = -1 if is_new else last_shown
        self._run = trackio.init(
            project=project,
            # Runs are known by their names, and folders may have the same.
            name=f"{workdir.name}-{held['id'][:8]}",
            resume="allow",
            config=dict(settings),
            embed=False,
        )
        write_json(workdir / _TRACKIO_RUN, held)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_shown:
            self._run.log(dict(values), step=step)

    def close(self, is_good: bool) -> None:
        del is_good
        self._run.finish()
