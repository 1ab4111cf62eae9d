"""Settings of the mesh: which processes and devices form hosts."""

import dataclasses
from typing import Literal

from prunex_jax.base.settings import setting

# Devices that can be simulated; more are a slip of the pen.
MAX_SIMULATED = 4096

# What lies in slices over the devices of a host.
Shard = Literal["none", "state", "params"]


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
    """Which devices form a host, and how simulated devices are made."""

    # auto | host | process | slice, or the number of hosts, as in "2"; or hosts x
    # virtual CPU devices, as in "2x2", that stand in where the run has one process, and
    # mean auto where it has several.
    layout: str = "auto"
    # Virtual CPU devices of this process; 0 uses the devices the machine has.
    cpu_devices: int = setting(0, at_least=0, at_most=MAX_SIMULATED)
    # Hosts x devices, as in "4x2", that one real device simulates, such as a GPU; empty
    # for the devices there are. On CPUs `cpu_devices` is faster.
    simulated: str = ""
    # none (every device of a host has all of the training state) | state (each has an
    # equal slice of what the optimizer and the method remember) | params (and of the
    # parameters, which are gathered for both passes of a step).
    shard: Shard = "none"
    # Gbit/s of the link of a host, such as 10: by it XLA plans on GPUs how early sums
    # over hosts start, and so how much runs beside them (`rounds.delay`). 0 leaves XLA
    # its own guess, which is for the fastest links.
    link_gbits: float = setting(0.0, at_least=0)
