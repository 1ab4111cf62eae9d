"""Where a run is: all that it resumes from beside its training state."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.train.steps.clock import ClockTotals
from prunex_jax.train.steps.compiled import Ledger

# Version 0 had no version; 2 knew no other mesh than that of the run, and 3 left out no
# examples; 2 to 4 may have had several cuts, and said which was the last.
_VERSION = 5


@dataclasses.dataclass(frozen=True)
class Handover:
    """The cut after which a run goes on with its small network."""

    step: int  # Steps done when it happened.
    # Channel group of the full network -> positions of the channels that are left,
    # sorted. With the settings they say every width of the small network.
    kept: Mapping[str, Sequence[int]]
    max_abs_error: float  # Largest difference between masked and shrunk logits then.
    seconds_per_step_median: float  # Of the steps before it.

    def masks(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Masks of the full network, bool[size] per group, True where kept.

        Example:
          >>> Handover(8, {'a': [0, 2]}, 1e-6, 0.1).masks({'a': 3})['a'].tolist()
          [True, False, True]
        """
        return {
            name: np.isin(np.arange(size), self.kept[name])
            for name, size in sizes.items()
        }


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """Where a run is, as its checkpoints keep it.

    Example:
      >>> position = RunPosition({'stem': 16}, step=8)
      >>> RunPosition.from_dict(position.to_dict()) == position
      True
    """

    # Channel group of the full network -> channels that are kept now.
    keep_counts: Mapping[str, int]
    counts_density: float = 1.0  # The density that they were chosen for.
    step: int = 0  # Steps done.
    phase: int = 0  # Position of the method of now in the schedule.
    # The last phase that has done what its method does before its first step; -1 before
    # any.
    prepared_phase: int = -1
    num_rounds: int = 0  # Exchanges done.
    handover: Handover | None = None  # The cut that has happened; None before it.
    mesh_since: int = 0  # Steps done when the run came to its number of hosts,
    # and bytes per host that hierarchical dense averaging had sent by then.
    dense_bytes_before: float = 0.0
    # Examples that were left out of batches, which do not divide among the devices that
    # are left, and the multiply-accumulates that they would have taken.
    left_out: int = 0
    left_out_macs: int = 0
    clock: ClockTotals = dataclasses.field(default_factory=ClockTotals)  # Times so far.
    # What was sent, called and compiled so far.
    ledger: Ledger = dataclasses.field(default_factory=Ledger)

    def dense_bytes(self, per_step: float) -> float:
        """Bytes per host that hierarchical dense averaging would have sent by now."""
        return self.dense_bytes_before + per_step * (self.step - self.mesh_since)

    def to_dict(self) -> dict[str, Any]:
        """Gives plain values for a checkpoint; `from_dict` inverts it."""
        return {"version": _VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Reads what a checkpoint holds beside the training state.

        Raises:
          UserError: It is of a later version, or not of this form.
        """
        version = saved.get("version", 0)
        if version not in range(_VERSION + 1):
            raise UserError(
                f"the checkpoint has a run position of version {version!r}, and this "
                f"version of prunex_jax reads up to {_VERSION}; use the one that wrote "
                "it, another --workdir, or --fresh to start over"
            )
        fields = {key: value for key, value in saved.items() if key != "version"}
        cut = fields.get("handover")
        if version < _VERSION and isinstance(cut, Mapping):
            if not cut.get("is_last", True):
                raise _not_readable("channels were still to go after its cut")
            of_several = ("is_last", "macs_before")
            fields["handover"] = {k: v for k, v in cut.items() if k not in of_several}
        if version < 3:
            fields = {"mesh_since": 0, "dense_bytes_before": 0.0, **fields}
        if version < 4:
            fields = {"left_out": 0, "left_out_macs": 0, **fields}
        position: Self = _read(cls, fields, "position")
        for name in ("step", "phase", "num_rounds"):  # They count, and choose.
            if getattr(position, name) < 0:
                raise _not_readable(f"position.{name} is {getattr(position, name)}")
        return position


def _read(kind: Any, value: Any, where: str) -> Any:
    """Makes a value of an annotated type from plain values, and refuses all others."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(parts[0], value, where)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for key in sorted(hints.keys() ^ value.keys()):
            problem = "lacks" if key in hints else "has an unknown"
            raise _not_readable(f"{where} {problem} {key!r}")
        items = {key: _read(hints[key], value[key], f"{where}.{key}") for key in hints}
        return typing.cast(type, kind)(**items)
    if isinstance(value, Mapping) and isinstance(origin, type):
        if issubclass(origin, Mapping) and all(isinstance(key, str) for key in value):
            return {k: _read(parts[1], v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple) and isinstance(origin, type):
        if issubclass(origin, Sequence):
            return tuple(_read(parts[0], item, where) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind:
        return value
    raise _not_readable(f"{where} is {value!r}")


def _not_readable(problem: str) -> UserError:
    return UserError(
        f"the checkpoint has a run position that cannot be read: {problem}; use the "
        "version of prunex_jax that wrote it, another --workdir, or --fresh to start "
        "over"
    )
