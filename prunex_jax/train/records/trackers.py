"""Shows the rows of a run's metrics in TensorBoard, trackio and Weights & Biases.

All are optional packages. What is missing is refused before any work; what fails later
is said once, and the run goes on without it. TensorBoard reads RUN/tensorboard;
RUN/wandb.json and RUN/trackio.json keep the name under which a resumed run goes on.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from prunex_jax.base.errors import UserError, one_line, suggest
from prunex_jax.base.files import read_object, write_json
from prunex_jax.base.imports import need_package
from prunex_jax.train.build.config import dotted_keys
from prunex_jax.train.build.settings import RunConfig

_PROJECT = "prunex_jax"  # Where none is given.
_LOGIN_SECONDS = 60


class _Shown(NamedTuple):
    """What a tracker is told of the run that it shows."""

    workdir: Path
    settings: Mapping[str, Any]  # Shown beside the curves.
    step: int  # After which the run goes on, -1 from its beginning,
    last_shown: int  # and the last step that it had shown before.


class _Tracker(Protocol):
    """Where rows go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the numbers of one row."""

    def close(self, is_good: bool) -> None:
        """Writes what is left; `is_good` unless an error ends the run."""


class _TensorBoard:
    """Event files; those of an abandoned course are hidden from the resumed step on."""

    def __init__(self, project: str, shown: _Shown) -> None:
        del project
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(
            str(shown.workdir / "tensorboard"),
            purge_step=shown.step + 1 if shown.last_shown >= 0 else None,
            # Names have seconds: another start within the same one would write over it.
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, is_good: bool) -> None:
        del is_good
        self._writer.close()


class _Wandb:
    """A run of a project, found again by the name that the run folder keeps."""

    def __init__(self, project: str, shown: _Shown) -> None:
        import wandb

        held, self._last_shown = _remembered("wandb.json", project, shown)
        self._run = wandb.init(
            project=project,
            id=held["id"],
            name=shown.workdir.name,
            dir=str(shown.workdir),
            resume="allow",
            config=dict(shown.settings),
            # Nobody may be there to answer when it asks who they are.
            settings={"login_timeout": _LOGIN_SECONDS},
        )
        write_json(shown.workdir / "wandb.json", held)
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

    def __init__(self, project: str, shown: _Shown) -> None:
        import trackio

        held, self._last_shown = _remembered("trackio.json", project, shown)
        self._run = trackio.init(
            project=project,
            # Runs are known by their names, and folders may have the same.
            name=f"{shown.workdir.name}-{held['id'][:8]}",
            resume="allow",
            config=dict(shown.settings),
            embed=False,
        )
        write_json(shown.workdir / "trackio.json", held)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_shown:
            self._run.log(dict(values), step=step)

    def close(self, is_good: bool) -> None:
        del is_good
        self._run.finish()


def _remembered(file: str, project: str, shown: _Shown) -> tuple[dict[str, Any], int]:
    """What a run is called in a project, and the last step that it shows there.

    The run folder keeps the name, so that a resumed run goes on with its curves. Rows
    do not vanish there: what it repeats is left out.
    """
    held = read_object(shown.workdir / file) or {}
    if held.get("project") == project and isinstance(held.get("id"), str):
        return held, shown.last_shown
    return {"project": project, "id": uuid.uuid4().hex}, -1


class _Kind(NamedTuple):
    """A tracker that settings may ask for; its extra is called as it is."""

    package: str  # What it needs.
    open: Callable[[str, _Shown], _Tracker]  # Given the project.


_KINDS = {
    "tensorboard": _Kind("tensorboardX", _TensorBoard),
    "trackio": _Kind("trackio", _Trackio),
    "wandb": _Kind("wandb", _Wandb),
}
# What trackers leave in a run folder.
FILES_OF_TRACKERS = ("tensorboard", "wandb", "wandb.json", "trackio.json")


def check_trackers(config: RunConfig) -> None:
    """Refuses trackers that there are not, or whose package is not installed.

    Raises:
      UserError: With what to write, or the command that installs it.
    """
    said = f"config.run.trackers={config.trackers}"
    for entry in config.trackers:
        name, project = _parsed(entry)
        if name not in _KINDS:
            raise UserError(
                f"{said} has {entry!r}; trackers are {', '.join(_KINDS)}, "
                f"with a project as in 'wandb:mine'{suggest(name, _KINDS)}"
            )
        if project and name == "tensorboard":
            raise UserError(
                f"{said} has {entry!r}, and TensorBoard shows folders, no projects; "
                "leave out what follows its name"
            )
        need_package(_KINDS[name].package, name, said)
    names = [_parsed(entry)[0] for entry in config.trackers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"{said} has {twice} twice; name one project")


def _parsed(entry: str) -> tuple[str, str]:
    """Name and project of a tracker; an empty project where none is given."""
    name, _, project = entry.partition(":")
    return name, project


class Trackers:
    """The trackers that the settings of a run ask for; none on most processes.

    A tracker opens with the first row: by then the run knows where it goes on.

    Args:
      config: Says which; `check_trackers` has seen it.
      workdir: The run folder.
      settings: All settings of the run.
      tell: Called with one line about a tracker that fails.
    """

    def __init__(
        self,
        config: RunConfig,
        workdir: Path,
        settings: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self._projects = dict(map(_parsed, config.trackers))  # By name.
        self._shown = _Shown(workdir, settings, -1, -1)
        self._tell = tell
        self._open: dict[str, _Tracker] = {}
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
        self._shown = self._shown._replace(step=step, last_shown=last_shown)

    def show(self, row: Mapping[str, Any]) -> None:
        """Hands a row of plain values to every tracker; never fails."""
        step, plain = row["step"], dotted_keys(row)
        if step != self._newest[0]:
            self._newest = step, set()
        shown = self._newest[1]
        values = {
            key.replace(".", "/"): value
            for key, value in plain.items()
            if isinstance(value, int | float) and key not in {"step", *shown}
        }
        shown.update(plain)
        for name in tuple(self._projects):
            self._try(name, self._write, name, step, values)

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if name not in self._open:
            project = self._projects[name] or _PROJECT
            self._open[name] = _KINDS[name].open(project, self._shown)
        self._open[name].write(step, values)

    def _try(self, name: str, do: Callable[..., None], *arguments: Any) -> None:
        """Goes on without a tracker that fails, whatever its package raises."""
        try:
            do(*arguments)
        except Exception as error:
            self._projects.pop(name, None)
            self._open.pop(name, None)
            self._tell(f"{name} failed, the run goes on without it: {one_line(error)}")
