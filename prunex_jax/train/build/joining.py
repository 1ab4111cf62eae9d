"""Brings the processes of a run together, and watches over them.

What a run and its dry run do alike, before and after their networks are built.
"""

from prunex_jax.mesh import Topology, make_topology
from prunex_jax.processes import (
    Heartbeat,
    LastStart,
    Launch,
    LaunchFlags,
    Limits,
    start_processes,
)
from prunex_jax.train.build.config import ExperimentConfig


def join_processes(
    config: ExperimentConfig, launch: LaunchFlags, last: LastStart | None = None
) -> tuple[Launch, Topology]:
    """Joins this process to the others of its run, and arranges their devices.

    Args:
      config: All settings.
      launch: How processes find each other.
      last: The last start of the run; see `mesh.start_processes`.
    Returns:
      How they did, and hosts and devices.
    Raises:
      UserError: As from `mesh.start_processes` and `mesh.make_topology`.
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
    layout, simulated = config.topology.layout, config.topology.simulated
    return started, make_topology(layout, simulated=simulated)


def make_heartbeat(config: ExperimentConfig, launch: LaunchFlags) -> Heartbeat:
    """What watches over the processes of a run while it is entered."""
    limits = Limits(config.run.silence_seconds, config.run.stall_seconds)
    return Heartbeat(limits, ends_process=launch.owns_process)
