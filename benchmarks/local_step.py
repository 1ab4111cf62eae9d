"""What H-SADMM costs: its local step against a plain optax SGD step, on one device.

Both train the same ResNet-20 on the same batch. The two are timed in turn, so that a
machine whose speed drifts slows both. Prints one line of ratios.

    make benchmark
"""

import sys

import jax
import numpy as np
import optax

from benchmarks.pairs import describe_pairs
from prunex_jax.base.timing import time_in_turn
from prunex_jax.mesh import make_topology
from prunex_jax.processes import LaunchFlags, start_processes
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.build.optimizer import make_inner

BATCH_SIZE = 64
WARM_UP = 5
NUM_PAIRS = 60

SETTINGS = {
    "data": {"name": "synthetic", "image_size": 32, "batch_size": BATCH_SIZE},
    "run": {"steps": 1000},
    # One device has no links: everything the method does is its own cost.
    "method": {"name": "hsadmm"},
}


def main() -> None:
    """Times both kinds of step and prints the ratio, pair by pair."""
    config = resolve_config(SETTINGS)
    start_processes(config.topology, LaunchFlags(owns_process=True))
    topology = make_topology("1", devices=jax.devices()[:1])
    experiment = make_experiment(config, topology)
    batch = _batch(experiment)
    calls = {
        "plain": _plain_step(experiment, batch),
        "hsadmm": _hsadmm_step(experiment, batch),
    }
    timings = time_in_turn(calls, NUM_PAIRS, WARM_UP)
    sys.stdout.write(
        "local step of hsadmm / plain optax step: "
        f"{describe_pairs(timings['hsadmm'], timings['plain'])} "
        f"on {jax.devices()[0].device_kind}\n"
    )


def _batch(experiment: Experiment) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shape = experiment.task.model.example(BATCH_SIZE).shape
    sharding = jax.sharding.NamedSharding(experiment.mesh, jax.P(("host", "device")))
    batch = {
        "image": rng.normal(size=shape).astype(np.float32),
        "label": rng.integers(0, 10, BATCH_SIZE).astype(np.int32),
    }
    return jax.device_put(batch, sharding)


def _hsadmm_step(experiment: Experiment, batch):
    """The trainer's own compiled local step, until it is done."""
    programs = experiment.current.programs
    state = programs.init(jax.random.key(0))

    def step() -> None:
        nonlocal state
        state, ticket = programs.local_step(state, batch)
        jax.block_until_ready((state, ticket))

    return step


def _plain_step(experiment: Experiment, batch):
    """What one would write with optax alone, with the same optimizer and metrics."""
    model = experiment.task.model
    optimizer = make_inner(experiment.config.optimizer, experiment.learning_rate)

    def loss_of(params, statistics):
        logits, statistics = model.apply_train(params, statistics, batch["image"])
        targets = jax.nn.one_hot(batch["label"], logits.shape[-1])
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        correct = (logits.argmax(-1) == batch["label"]).sum()
        return loss, (statistics, correct)

    @jax.jit
    def update(params, statistics, opt_state):
        grads, (statistics, correct) = jax.grad(loss_of, has_aux=True)(
            params, statistics
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics, opt_state, correct

    params, statistics = jax.jit(model.init)(jax.random.key(0))
    state = (params, statistics, optimizer.init(params))

    def step() -> None:
        nonlocal state
        *state, correct = update(*state)
        jax.block_until_ready((state, correct))

    return step


if __name__ == "__main__":
    main()
