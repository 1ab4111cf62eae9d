"""Trains: from settings to a run folder with metrics, checkpoints and a small network.

Each imports only from those below it, which `make check` holds:

commands/  command lines
run        `train`: everything that is around the loop
loop       the loop, from top to bottom; what may follow a step, as a list
console    what people see: the start screen, lines of progress, the last screen
records/   what a run leaves behind: the run folder; reads it back
changes/   in mid-run: the network, the method, the mesh
build/     a run from its settings, before anything is compiled
steps/     what a step is: its state, its programs, its time
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunex_jax.train.loop import every
    from prunex_jax.train.records.opened import OpenedRun, open_run
    from prunex_jax.train.records.summary import TrainResult
    from prunex_jax.train.run import train, train_steps

__all__ = [
    "OpenedRun",
    "TrainResult",
    "every",
    "open_run",
    "train",
    "train_steps",
]
# Public name -> its module, where that is not `run`.
_HOMES = {
    "OpenedRun": "records.opened",
    "every": "loop",
    "open_run": "records.opened",
}


def __getattr__(name: str) -> Any:
    """Imports the trainer when it is first asked for: it takes seconds."""
    if name in __all__:
        home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'run')}")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
