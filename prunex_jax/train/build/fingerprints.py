"""Tells whether a run goes on with the data and the functions that it began with.

Settings say which data set and which network of ours it has. What a caller brings they
only call `own`, and files may have changed since.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from prunex_jax.base.environment import source_digest
from prunex_jax.base.imports import is_named
from prunex_jax.base.jaxprs import digest_of
from prunex_jax.base.trees import PyTree
from prunex_jax.data import VALID
from prunex_jax.data.fingerprint import fingerprint_of
from prunex_jax.tasks import Own, Task
from prunex_jax.train.build.config import ExperimentConfig
from prunex_jax.train.build.optimizer import MakeOptimizer, make_inner

# Packages of which another version may trace the same function differently, beside this
# one.
_TRACED_BY = ("jax", "jaxlib", "flax", "optax", "equinox", "torch", "torchax")
_OF_SETTINGS = "of the settings"
_VERSIONS = "the versions of packages"
_INPUTS, _METRICS = "function of inputs", "function of metrics"
# Examples of the batches that programs are traced with.
_BATCH_SIZE = 2


def fingerprints_of(
    task: Task,
    config: ExperimentConfig,
    own: Own | None = None,
    own_optimizer: MakeOptimizer | None = None,
) -> dict[str, dict[str, Any]]:
    """Describes what a run learns from, and the functions that a caller has brought.

    Returns:
      `data` and `functions`: what is described -> its value, which JSON can hold, and
      the versions of the packages without which digests say nothing of each other.
    """
    names = ("network", _INPUTS, "loss", _METRICS, "optimizer")
    functions = dict.fromkeys(names, _OF_SETTINGS)
    own = own or Own()
    if own.model is not None or is_named(config.model.name):
        functions["network"] = _network_digest(task)
    if any(x is not None for x in (own.data, own.loss, own.inputs)) or own.metrics:
        functions |= _loss_digests(task)
    if own_optimizer is not None or is_named(config.optimizer.name):
        functions["optimizer"] = _optimizer_digest(task, config, own_optimizer)
    return {
        "data": {
            **fingerprint_of(task.dataset),
            _VERSIONS: _version_of("pillow"),
        },
        "functions": {
            **{f"the {name}": value for name, value in functions.items()},
            _VERSIONS: ", ".join(
                (*map(_version_of, _TRACED_BY), f"prunex_jax {source_digest()}")
            ),
        },
    }


def _version_of(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def first_difference(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Any, Any] | None:
    """What differs between two starts of a run: what it is, what it was, what it is.

    Digests by other versions of packages say nothing of each other.

    Example:
      >>> before = {'data': {'the number of examples in train': 4}}
      >>> first_difference(before, {'data': {'the number of examples in train': 5}})
      ('the number of examples in train', 4, 5)
      >>> first_difference({}, before)  # Of a run before there were fingerprints.
    """
    for kind, found in now.items():
        held = before.get(kind)
        if not isinstance(held, Mapping):
            continue
        if held.get(_VERSIONS) != found.get(_VERSIONS):
            held = {key: x for key, x in held.items() if isinstance(x, int)}
        for key, value in found.items():
            if key in held and held[key] != value:
                return key, held[key], value
    return None


def _network_digest(task: Task) -> str:
    model = task.model
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    return digest_of(jax.make_jaxpr(model.apply)(*arrays, model.example(_BATCH_SIZE)))


def _loss_digests(task: Task) -> dict[str, str]:
    """Of what the network reads, of the loss, and of what is measured."""
    model, objective, split = task.model, task.objective, task.dataset.train
    one = split.finished(split.evaluation_batch(np.arange(1)))
    batch = {VALID: np.ones(1, np.float32), **one}
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    outputs = jax.eval_shape(model.apply, *arrays, objective.inputs(batch))

    def metrics(outputs: PyTree, batch: Mapping[str, Any]) -> PyTree:
        measures = objective.measures(objective.score(outputs, batch))
        return {name: x for name, x in measures.items() if name != "loss"}

    found = {
        _INPUTS: jax.make_jaxpr(objective.inputs)(batch),
        "loss": jax.make_jaxpr(objective.loss)(outputs, batch),
        _METRICS: jax.make_jaxpr(metrics)(outputs, batch),
    }
    return {name: digest_of(program) for name, program in found.items()}


def _optimizer_digest(
    task: Task, config: ExperimentConfig, own_optimizer: MakeOptimizer | None
) -> str:
    params, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    # Its schedule is told apart by the settings.
    inner = make_inner(config.optimizer, lambda step: 0.1 + 0 * step, own_optimizer)
    state = jax.eval_shape(inner.init, params)
    return digest_of(jax.make_jaxpr(inner.update)(params, state, params))
