"""Brings the processes of a run together, and watches over them.

It refuses those that differ in settings, packages, data, weights or folders.
"""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.environment import source_digest, versions
from prunex_jax.base.errors import UserError
from prunex_jax.mesh import (
    Topology,
    check_same,
    gather_texts,
    make_topology,
    run_together,
)
from prunex_jax.models.weights.files import SETTING
from prunex_jax.processes import (
    Heartbeat,
    LastStart,
    Launch,
    LaunchFlags,
    Limits,
    start_processes,
)
from prunex_jax.train.build.config import ExperimentConfig, config_to_dict, dotted_keys
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.start import Weights

# Every host may have its own.
_LOCAL = ("data.dir", "data.num_workers", "run.compile_cache")
# Variables that change what is computed.
_VARIABLES = (
    "JAX_DEFAULT_DTYPE_BITS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_ENABLE_X64",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
    "XLA_FLAGS",
)
_TOKEN = ".shared"
# Network file systems show a new file late.
_PATIENCE_SECONDS = 20.0


def join_processes(
    config: ExperimentConfig, launch: LaunchFlags, last: LastStart | None = None
) -> tuple[Launch, Topology]:
    """Joins this process to the others of its run, and arranges their devices.

    Raises:
      UserError: As from `processes.start_processes` and `mesh.make_topology`.
    """
    started = start_processes(
        config.topology,
        launch,
        compile_cache=config.run.compile_cache,
        join_seconds=config.run.join_seconds,
        min_processes=config.run.min_processes,
        silence_seconds=config.run.silence_seconds,
        last=last,
    )
    simulated = config.topology.simulated or started.simulated
    return started, make_topology(config.topology.layout, simulated=simulated)


def make_heartbeat(config: ExperimentConfig, launch: LaunchFlags) -> Heartbeat:
    """What watches over the processes of a run while it is entered."""
    limits = Limits(config.run.silence_seconds, config.run.stall_seconds)
    return Heartbeat(limits, ends_process=launch.owns_process)


def check_same_settings(
    config: ExperimentConfig, environ: Mapping[str, str] = os.environ
) -> None:
    """Compares settings, versions, variables and this package of all processes.

    Raises:
      AgreedError: They differ; it names the first difference.
    Collectives:
      As `mesh.check_same`.
    """
    settings = dotted_keys(config_to_dict(config))
    described = {
        **{f"config.{k}": repr(v) for k, v in settings.items() if k not in _LOCAL},
        **{f"the version of {k}": v for k, v in versions().items()},
        **{f"variable {k}": environ.get(k, "") for k in _VARIABLES},
        "the source of prunex_jax": source_digest(),
    }
    check_same(described, "start all processes with the same")


def check_same_reading(
    experiment: Experiment, fingerprints: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares what all processes have read: data, trained weights, when hosts meet.

    Raises:
      AgreedError: They differ; it names what does.
    Collectives:
      As `mesh.check_same`.
    """
    check_same_fingerprints(fingerprints)
    if experiment.start is not None:
        check_same_weights(experiment.start.weights)
    sync = experiment.current.plan.sync
    if sync is not None and sync.ends:
        # Devices may round learning rates differently, and rounds would wait for ever.
        found = {"the steps after which hosts meet": list(sync.ends)}
        check_same(found, "run the same jax on the same kind of device, on every host")


def check_same_fingerprints(fingerprints: Mapping[str, Mapping[str, Any]]) -> None:
    """Compares the data and the functions that all processes have.

    Raises:
      AgreedError: They differ; it names what does.
    Collectives:
      As `mesh.check_same`, for each kind.
    """
    for kind, described in fingerprints.items():
        check_same(described, f"give all processes the same {kind}")


def check_same_weights(weights: Weights) -> None:
    """Compares the files that all processes have read trained weights from.

    Raises:
      AgreedError: They differ.
    Collectives:
      As `mesh.check_same`.
    """
    named = {f"{SETTING}={weights.source!r}": dict(weights.digests)}
    check_same(named, "copy the same file to every host")


def check_shared_folder(workdir: Path) -> None:
    """Refuses a run folder that not all processes share.

    Process 0 leaves a file there that the others have to find.

    Raises:
      AgreedError: Some process does not see it; it names that process.
    Collectives:
      As `mesh.gather_texts` and `mesh.run_together`.
    """
    if jax.process_count() == 1:
        return
    is_first, token = jax.process_index() == 0, uuid.uuid4().hex
    file = workdir / _TOKEN
    if is_first:
        file.write_text(token)
    token = gather_texts(token)[0]
    try:
        run_together(lambda: _find(file, token))
    finally:
        if is_first:
            file.unlink(missing_ok=True)


def _find(file: Path, token: str) -> None:
    if not shows(file, token):
        raise UserError(
            f"--workdir={file.parent} is not the folder that process 0 sees under "
            "this name; give a folder on a file system that all hosts share"
        )


def shows(file: Path, token: str) -> bool:
    """Whether a file that another process has written is here within some seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
