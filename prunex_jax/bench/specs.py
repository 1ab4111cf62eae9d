"""What host processes are told to run: written by the runner, read by all of them.

It needs neither jax nor torch.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a process runs.

    Attributes:
      config: Settings of the run.
      workdir: Its folder.
      boundaries: Steps after which there is a gate; 0 is before the first.
      evaluates: Whether the validation split is scored at every gate, and the run is
        finished with its summary.
      stand_in_seconds: Pause in every step.
      exchange_only: Whether each step is a dense exchange and nothing else.
      hook: For peers.
      num_hosts: Hosts that share the data; peers have one process or more on each.
    """

    config: Mapping[str, Any]
    workdir: str
    boundaries: tuple[int, ...]
    evaluates: bool = False
    stand_in_seconds: float = 0.0
    exchange_only: bool = False
    hook: str = "dense"
    num_hosts: int = 1


def write_specs(path: Path, specs: Sequence[Spec]) -> None:
    """Writes what the processes of a session run, one after the other."""
    path.write_text(json.dumps([dataclasses.asdict(spec) for spec in specs]))


def read_specs(path: str | Path) -> list[Spec]:
    """Reads what `write_specs` wrote."""
    return [
        Spec(**{**values, "boundaries": tuple(values["boundaries"])})
        for values in json.loads(Path(path).read_text())
    ]
