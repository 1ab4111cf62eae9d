"""Trains: from settings to a run folder with metrics, checkpoints and a small network.

run        `train`: everything that is around the loop
loop       the loop, from top to bottom; what may follow a step, as a list
build/     a run from its settings, before anything is compiled
steps/     what a step is: its state, its programs, its time
changes/   in mid-run: the network, the method, the mesh
records/   what a run leaves behind: the run folder
commands/  what people give and see: command lines and the screen
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunex_jax.train.loop import every
    from prunex_jax.train.records.summary import TrainResult
    from prunex_jax.train.run import train, train_steps

__all__ = ["TrainResult", "every", "train", "train_steps"]


def __getattr__(name: str) -> Any:
    """Imports the trainer when it is first asked for: it takes seconds."""
    if name in __all__:
        from prunex_jax.train import loop, run

        return getattr(loop if name == "every" else run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
