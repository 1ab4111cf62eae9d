"""GPUs that are not here: XLA compiles for the description of a device.

What it makes is never run; memory and schedules are the compiler's word.
"""

import importlib.util
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.mesh.hosts import split_grid
from prunex_jax.mesh.mesh import Topology, make_topology

# What NVIDIA's data sheets and drivers say of a GPU, in XLA's format: NAME.txtpb.
_FOLDER = Path(__file__).parent
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def lacking_compiler() -> str:
    """What is missing to compile for GPUs; empty for nothing.

    Example:
      >>> lacking_compiler() in ("", "no compiler for GPUs is installed")
      True
    """
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(name):
                return ""
        except ModuleNotFoundError:
            pass
    return "no compiler for GPUs is installed"


def described_topology(text: str) -> Topology:
    """Hosts with GPUs of which none is here, to compile for.

    Args:
      text: Such as "h100:2x8", for 2 hosts with 8 H100 each.
    Returns:
      Their mesh; arrays cannot be placed on it.
    Raises:
      UserError: It says no such thing, no description of the GPU comes with this
        package, or no compiler is here.
    """
    name, _, grid = text.partition(":")
    known = sorted(path.stem for path in _FOLDER.glob("*.txtpb"))
    found = split_grid(grid)
    if name not in known or found is None:
        raise UserError(
            f"{text!r} names no GPUs to compile for: write a name and hosts x devices, "
            f"as in {known[0]}:2x8; known are {', '.join(known)}{suggest(name, known)}"
        )
    if lacking := lacking_compiler():
        raise UserError(
            f"cannot compile for {text}: {lacking}; pip install 'jax[cuda13]', or only "
            "jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version with --no-deps"
        )
    hosts, devices = found
    described: Any = topologies.get_topology_desc(
        platform="cuda",
        target_config=(_FOLDER / f"{name}.txtpb").read_text(),
        topology=f"1x{hosts}x{devices}",
    )
    return make_topology("process", devices=described.devices)
