"""Makes simulated devices and joins this process to the others of the run.

Every change to jax's global state that must come before the first computation is here.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_settings
from prunex_jax.mesh.hosts import parse_layout, stand_ins
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes.compilation_cache import AUTO, keep_compiled
from prunex_jax.processes.environments import Probes
from prunex_jax.processes.gpus import (
    Reservation,
    check_reservations,
    has_gpu_support,
    read_reservation,
    reserve_gpus,
)
from prunex_jax.processes.launcher import Launch, LaunchFlags, detect_launch
from prunex_jax.processes.memory import keep_freed_memory
from prunex_jax.processes.registry import LastStart
from prunex_jax.processes.rendezvous import register
from prunex_jax.processes.store import Store, StoreError, is_used

# How long jax itself waits for the other processes.
_JOIN_SECONDS = 300
# And until it gives up on one that is silent.
_HEARTBEAT_SECONDS = 100
_LATER_SECONDS = 10
# What XLA's scheduler assumes of the links between hosts.
_LINKS_FLAG = "--xla_gpu_analytical_latency_estimator_options"
_RESTART = "restart the program (in a notebook: restart the kernel)"


def start_processes(
    config: TopologyConfig,
    flags: LaunchFlags,
    environ: Mapping[str, str] = os.environ,
    *,
    compile_cache: str = AUTO,
    join_seconds: int = _JOIN_SECONDS,
    min_processes: int = 0,
    silence_seconds: float = 0,
    last: LastStart | None = None,
) -> Launch:
    """Prepares jax for this run; call it before anything else uses jax.

    A second call in the same process, as in a notebook, changes nothing when the
    settings are the same. A program that has called `jax.distributed.initialize` itself
    keeps what it has.

    Args:
      config: `cpu_devices` > 0 asks for that many virtual CPU devices in each
        process, and for no other platform; so does a layout as in "2x2" where there is
        one process.
      flags: What the user said about the processes. Where the process is a command's
        own, it keeps compiled programs on disk, and freed memory on CPU; see
        `keep_compiled` and `keep_freed_memory`.
      environ: Environment variables.
      compile_cache: Where compiled programs are kept, as `run.compile_cache` says.
      join_seconds: How long to wait for the other processes.
      min_processes: How many of them are enough after that; 0 for all.
      silence_seconds: How long a process may be silent, as `Limits.silence` says; jax
        gives up on it later than that.
      last: The last start of the run, with what `Launch.addresses` said then; so the
        others can meet without process 0.
    Returns:
      What was detected; the start screen prints its `reason`.
    Raises:
      UserError: The processes cannot be joined, or jax runs already in a process of
        several, or of a command's own, with other devices than `config` asks for. In
        others `Launch.simulated` says what stands in for them.
    """
    check_settings(config, "topology")
    parse_layout(config.layout)
    launch = _detect(config, flags, environ)
    if config.link_gbits:
        _tell_scheduler(config.link_gbits)
    cpu_devices = _num_cpu_devices(config, launch)
    if cpu_devices:
        _request_cpu_devices(cpu_devices)
    if launch.is_distributed and not jax.distributed.is_initialized():
        # Before others are waited for, of whom some may not come then.
        _check_unused(launch)
        settings: Any = jax.config  # Whose type does not list what it has.
        uses_gpus = not cpu_devices and has_gpu_support(settings.jax_platforms)
        launch = _with_those_there(launch, uses_gpus, join_seconds, min_processes, last)
        _join(launch, join_seconds, silence_seconds)
        launch = _with_gpus_apart(launch, uses_gpus, environ, join_seconds)
    if cpu_devices and (launch.is_distributed or flags.owns_process):
        _check_cpu_devices(cpu_devices)
    elif cpu_devices:
        launch = _with_what_runs(launch, config.layout, cpu_devices)
    if flags.owns_process:
        keep_compiled(compile_cache, environ)
        if jax.default_backend() == "cpu":
            keep_freed_memory(environ)
    return launch


def _detect(
    config: TopologyConfig, flags: LaunchFlags, environ: Mapping[str, str]
) -> Launch:
    if jax.distributed.is_initialized():
        return Launch("caller", "jax.distributed was started before")
    probes = Probes()
    if config.cpu_devices:
        # GPUs that nobody is going to use must not stop a run by being uneven.
        probes = dataclasses.replace(probes, count_gpus=lambda _: None)
    return detect_launch(environ, flags, probes)


def _tell_scheduler(link_gbits: float) -> None:
    """Tells XLA how fast hosts are joined; it takes links for far faster than most are.

    XLA reads the variable when jax is first used.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    # XLA counts in GB/s.
    flag = f"{_LINKS_FLAG}=nic_speed_gbps={link_gbits / 8:g}"
    if flag in flags.split():
        return
    if _LINKS_FLAG in flags:
        raise UserError(
            f"topology.link_gbits={link_gbits:g}, but XLA_FLAGS has {_LINKS_FLAG}: "
            "set topology.link_gbits=0, or take the flag out"
        )
    if is_used():
        raise UserError(
            f"topology.link_gbits={link_gbits:g} comes too late, as jax was used "
            f"before: {_RESTART}, or set topology.link_gbits=0"
        )
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _num_cpu_devices(config: TopologyConfig, launch: Launch) -> int:
    """Virtual devices to make here; 0 for the devices there are."""
    found = stand_ins(config.layout)
    if config.cpu_devices or config.simulated or launch.is_distributed or not found:
        return config.cpu_devices
    hosts, devices = found
    return hosts * devices


def _request_cpu_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # jax runs already; `_check_cpu_devices` tells whether that matters.
        return
    jax.config.update("jax_platforms", "cpu")


def _check_cpu_devices(count: int) -> None:
    devices = jax.local_devices()
    platform = devices[0].platform
    if platform == "cpu" and len(devices) == count:
        return
    raise UserError(
        f"topology.cpu_devices={count}, but jax already runs with {len(devices)} "
        f"{platform} devices in this process: {_RESTART}, or set topology.cpu_devices="
        f"{len(devices) if platform == 'cpu' else 0}"
    )


def _with_what_runs(launch: Launch, layout: str, count: int) -> Launch:
    """Lets a device of those that jax has stand for the virtual ones.

    In a notebook any array that was made before has started jax.
    """
    devices = jax.local_devices()
    platform = devices[0].platform
    if platform == "cpu" and len(devices) == count:
        return launch
    asked = parse_layout(layout)
    hosts = asked if isinstance(asked, int) else (stand_ins(asked) or (1, count))[0]
    if count % hosts:
        raise UserError(
            f"topology.layout={hosts} cannot be cut from topology.cpu_devices={count}; "
            "make it divide them"
        )
    grid = f"{hosts}x{count // hosts}"
    running = f"{len(devices)} {platform} device{'s' if len(devices) > 1 else ''}"
    warning = (
        f"jax was in use before, with {running}, so one of them simulates {grid}: the "
        f"same numbers up to rounding; {_RESTART} for devices of their own"
    )
    return dataclasses.replace(launch, simulated=grid, warning=warning)


def _check_unused(launch: Launch) -> None:
    if is_used():
        raise UserError(
            f"cannot join the processes of the run ({launch.reason}): jax was used "
            f"before the processes were joined: {_RESTART}"
        )


def _join(launch: Launch, seconds: int, silence_seconds: float) -> None:
    """Joins the others by jax's own service."""
    ids = launch.local_device_ids
    # Later than the heartbeat, which says who is lost.
    gives_up = max(_HEARTBEAT_SECONDS, math.ceil(silence_seconds) + _LATER_SECONDS)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.num_processes,
            launch.process_id,
            # An empty list would be read as "not given".
            list(ids) if ids else None,
            # jax has no name for its Kubernetes detection.
            None if launch.detection == "auto" else launch.detection,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=gives_up,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"cannot join the processes of the run ({launch.reason}): {text} (check "
            "that process 0 runs, that the others reach its address and port, or give "
            "--coordinator, --num_processes and --process_id)"
        ) from error


def _with_gpus_apart(
    launch: Launch, uses_gpus: bool, environ: Mapping[str, str], seconds: int
) -> Launch:
    """Refuses GPUs that are taken twice; the launch, with what is to be said of it."""
    reservation = Reservation(machine="", name="")
    if uses_gpus:
        reservation = reserve_gpus(environ, launch.local_device_ids)
    try:
        texts = Store("start").exchange("gpus", reservation.text, seconds)
    except StoreError as error:
        raise UserError(
            f"a process of the run has left before it was started ({launch.reason}): "
            "look at what it said"
        ) from error
    warning = check_reservations([read_reservation(text) for text in texts])
    return dataclasses.replace(launch, warning=launch.warning or warning)


def _with_those_there(
    launch: Launch, uses_gpus: bool, seconds: int, at_least: int, last: LastStart | None
) -> Launch:
    """The launch, with the processes that come; unchanged where jax is to find them."""
    address, count, number = launch.coordinator, launch.num_processes, launch.process_id
    if address is None or count is None or number is None:
        return launch
    roster = register(
        address,
        count,
        number,
        seconds=seconds,
        at_least=at_least,
        last=last,
        needs_name=not uses_gpus,  # Gloo listens at what the hostname means.
    )
    reason = launch.reason
    if roster.num_there < count:
        reason += f"; {roster.num_there} of {count} came"
        reason += f", this is process {roster.place} of them"
    return dataclasses.replace(
        launch,
        coordinator=roster.coordinator,
        num_processes=roster.num_there,
        process_id=roster.place,
        reason=reason,
        addresses=roster.addresses,
    )
