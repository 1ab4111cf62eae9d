"""Eight virtual CPU devices and strict ranks for every test; set before jax is used."""

import jax
import numpy as np
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[(1, 4), (2, 2), (4, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    """Meshes of four devices, from one host to four."""
    return make_mesh(*request.param)


def make_mesh(num_hosts: int, devices_per_host: int) -> jax.sharding.Mesh:
    """A ('host', 'device') mesh over the first virtual devices."""
    count = num_hosts * devices_per_host
    devices = np.array(jax.devices()[:count]).reshape(num_hosts, devices_per_host)
    return jax.sharding.Mesh(devices, ("host", "device"))
