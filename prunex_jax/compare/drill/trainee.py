"""A training process that drills disturb: a small network on the digits, on CPU.

    python -m prunex_jax.compare.drill.trainee --method=NAME --workdir=FOLDER
        --steps=N --progress=FILE [--at=STEP [--fault=NAME]]

It writes the number of steps it has done into FILE, and after the last one a digest of
its part of the state. Faults that only the process itself can do come from here.
"""

import hashlib
import itertools
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.command import EXIT_STOPPED, Command, Flag, Values, run_command
from prunex_jax.base.errors import RunStopped
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.compare.drill.plan import CHECKPOINT_STEPS, FULL_DISK, HANG
from prunex_jax.train.commands.command import LAUNCH_FLAGS, given_launch
from prunex_jax.train.loop import Progress
from prunex_jax.train.run import train
from prunex_jax.train.steps.state import TrainState

# Slows the steps down, so that saves do not last longer than several of them; more so
# after a fault, so that the run has not ended when all have heard of a signal.
_PAUSE_SECONDS, _PAUSE_AFTER_SECONDS = 0.05, 1.0
# What may still be written to a disk that is full: the number of steps, nothing else.
_LEFT_BYTES = 64
_WIDTHS = (64, 32, 32, 10)

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("method", "", "Method of the run.", is_required=True),
        Flag("workdir", "", "Run folder.", is_required=True),
        Flag("steps", 0, "Length of the run.", is_required=True),
        Flag("progress", "", "File for the steps done.", is_required=True),
        Flag("at", 0, "Steps after which a fault comes; 0 for none."),
        Flag("fault", "", "What this process does to itself then."),
        Flag("silence_seconds", 12, "As run.silence_seconds."),
        Flag("stall_seconds", 3600, "As run.stall_seconds."),
        *LAUNCH_FLAGS,
    ),
)


def settings_of(values: Values) -> dict[str, Any]:
    """Settings of the run."""
    return {
        "topology": {"layout": "process", "cpu_devices": 1},
        "data": {"name": "digits", "batch_size": 32},
        "sparsity": {"num_stairs": 2},
        "method": {"name": values.method},
        "run": {
            "steps": values.steps,
            "log_every_steps": 1,
            "checkpoint_every_steps": CHECKPOINT_STEPS,
            "max_host_drift": 0.0,
            "silence_seconds": float(values.silence_seconds),
            "stall_seconds": float(values.stall_seconds),
        },
    }


def network(widths: Sequence[int] = _WIDTHS) -> tuple[Any, Any]:
    """A perceptron of these widths, with channels to prune, as (init, apply)."""

    def init(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
        layers = {}
        for number, (n, m) in enumerate(itertools.pairwise(widths)):
            key, own = jax.random.split(key)
            kernel = jax.random.normal(own, (n, m)) * (2 / n) ** 0.5
            layers[f"layer{number}"] = {"kernel": kernel, "bias": jnp.zeros(m)}
        return layers

    def apply(params: dict[str, dict[str, jax.Array]], images: jax.Array) -> jax.Array:
        x = images.reshape(images.shape[0], -1)
        for number in range(len(widths) - 1):
            layer = params[f"layer{number}"]
            x = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.relu(x) if number < len(widths) - 2 else x
        return x

    return init, apply


class Trainee:
    """Says how far it is, and does its fault."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._progress = Path(values.progress)
        self._file = os.open(self._progress, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def __call__(self, progress: Progress, state: TrainState) -> None:
        """Called by the loop between steps."""
        step, values = progress.step, self._values
        text = f"{step:10d}"
        if step == values.steps:
            text += f" {digest_of_state(state)}"
        os.pwrite(self._file, text.encode(), 0)
        is_after = 0 < values.at <= step
        if values.fault and is_after:
            self._suffer()
        time.sleep(_PAUSE_AFTER_SECONDS if is_after else _PAUSE_SECONDS)

    def _suffer(self) -> None:
        if self._values.fault == FULL_DISK:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_LEFT_BYTES, most))
        elif self._values.fault == HANG:
            time.sleep(1e6)
        else:
            raise RuntimeError("a drill: this process fails, and nothing is wrong")


def digest_of_state(state: PyTree) -> str:
    """Digest of what this process holds of the state, or of a part of it."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_by_path(state).items()):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        digest.update(path.encode())
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one training process of a drill."""
    return run_command(COMMAND, _train, arguments)


def _train(values: Values, rest: list[str]) -> int:
    del rest
    try:
        train(
            settings_of(values),
            values.workdir,
            model=network(),
            launch=given_launch(values),
            after_step=[Trainee(values)],
        )
    except RunStopped:
        return EXIT_STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
