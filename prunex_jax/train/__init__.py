"""Trains: from settings to a run folder with metrics, checkpoints and a small network.

In the order in which a run uses them:

    config        settings, in any form -> ExperimentConfig
    joining       the processes of a run: joined, and watched over
    same          refuses processes with other settings, data or folders
    experiment    settings and mesh -> task, channels, method, rounds and programs
    teaching      networks whose answers a run learns beside the labels
    rounds        which method at which step, and which exchange after which
    state         what is trained, and where it lives on the mesh
    step          the programs: birth, local step, exchange, report, evaluation
    program       compiles them, counts calls and bytes
    ahead         compiles, while steps run, what will be called later
    loop          calls them in order; what may follow a step, as a list
    rows          what is logged
    means         of networks that a run learns from, and ends with
    position      what a run resumes from beside its state
    regroup       a state on another number of hosts or devices
    restoring     reads a run back, on any mesh
    transitions   mid-run: the small network, the next method
    work          multiply-accumulates of training, over all cuts
    evaluation    scores of networks, and whether a run is lost
    summary       the end: shrinks, proves equal, tests once, sums up
    checkpoint    state and position on disk
    folder        settings, metrics and summary on disk
    trackers      metrics in TensorBoard and W&B as well
    profiling     a window of steps for jax's profiler
    console       what a person sees
    dry_run       what a run will need, without running it
    supervise     starts a lost command again

`run` puts them together; `command`, `export` and `evaluate` are the command lines.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunex_jax.train.loop import every
    from prunex_jax.train.run import train, train_steps
    from prunex_jax.train.summary import TrainResult

__all__ = ["TrainResult", "every", "train", "train_steps"]


def __getattr__(name: str) -> Any:
    """Imports the trainer when it is first asked for: it takes seconds."""
    if name in __all__:
        from prunex_jax.train import loop, run

        return getattr(loop if name == "every" else run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
