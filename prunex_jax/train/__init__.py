"""Trains: from settings to a run folder with a summary and a small network.

config -> experiment -> run -> loop (step, rounds) -> transitions -> summary
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunex_jax.train.run import train
    from prunex_jax.train.summary import TrainResult

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    """Imports the trainer when it is first asked for: it takes seconds."""
    if name in __all__:
        from prunex_jax.train import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
