import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from prunex_jax.base.errors import UserError
from prunex_jax.data import batch_rows, place_batch
from tests.helpers.common import free_port


def _mesh(num_hosts: int, devices_per_host: int) -> Mesh:
    count = num_hosts * devices_per_host
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    devices = np.array(jax.devices()[:count]).reshape(num_hosts, devices_per_host)
    return Mesh(devices, ("host", "device"))


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)])
def test_devices_hold_contiguous_rows_in_mesh_order(shape: tuple[int, int]) -> None:
    mesh = _mesh(*shape)
    rows = batch_rows(mesh, 16)
    assert rows.tolist() == list(range(16)), "one process makes the whole batch"
    image = np.arange(16 * 6, dtype=np.float32).reshape(16, 2, 3)
    batch = {"image": image, "label": np.arange(16, dtype=np.int32)}
    placed = place_batch(batch, mesh, rows)
    assert placed["image"].sharding.spec == PartitionSpec(("host", "device"))
    for name, array in placed.items():
        assert array.dtype == batch[name].dtype
        assert np.array_equal(array, batch[name])
    local = 16 // mesh.size
    of_device = {shard.device: shard for shard in placed["label"].addressable_shards}
    for k, device in enumerate(mesh.devices.ravel()):
        held = np.asarray(of_device[device].data).tolist()
        assert held == list(range(k * local, (k + 1) * local))


def test_the_host_axis_is_the_slow_one() -> None:
    mesh = _mesh(2, 4)
    placed = place_batch({"row": np.arange(8)}, mesh, batch_rows(mesh, 8))
    per_host = jax.shard_map(
        lambda row: jax.lax.all_gather(row, "device", tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec(("host", "device")),
        out_specs=PartitionSpec("host"),
        check_vma=False,
    )(placed["row"])
    assert np.asarray(per_host).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        (63, r"data.batch_size=63 .* over 4 devices: use 60 or 64"),
        (3, r"data.batch_size=3 .* over 4 devices: use 4$"),
        (0, r"data.batch_size=0 .* over 4 devices: use 4$"),
    ],
)
def test_uneven_batches_are_refused(batch_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        batch_rows(_mesh(2, 2), batch_size)


def test_the_setting_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.eval_batch_size=5 "):
        batch_rows(_mesh(1, 2), 5, "data.eval_batch_size")


def test_rows_that_do_not_match_are_refused() -> None:
    mesh = _mesh(1, 2)
    with pytest.raises(ValueError, match="'image' has 3 rows instead of 4"):
        place_batch({"image": np.zeros((3, 2))}, mesh, batch_rows(mesh, 4))


_WORKER = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from prunex_jax.data.settings import DataConfig
    from prunex_jax.data import batch_rows, make_loader, open_dataset, place_batch

    port, index = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    # Interleaved on purpose: a process's rows need not be contiguous.
    order = [0, 2, 1, 3]
    devices = np.array([jax.devices()[k] for k in order]).reshape(2, 2)
    mesh = Mesh(devices, ("host", "device"))
    rows = batch_rows(mesh, 8)
    assert rows.tolist() == ([0, 1, 4, 5] if index == 0 else [2, 3, 6, 7]), rows
    config = DataConfig(name="synthetic", image_size=8, batch_size=8, augment="shift")
    train = open_dataset(config, seed=0).train
    loader = make_loader(train, config, rows=rows, seed=0, num_hosts=2)
    with loader.batches(3) as local:
        placed = place_batch(next(local), mesh, rows)
    loader = make_loader(train, config, rows=np.arange(8), seed=0, num_hosts=2)
    with loader.batches(3) as whole:
        expected = next(whole)
    for name, array in placed.items():
        assert array.shape == expected[name].shape
        assert len(array.addressable_shards) == 2
        for shard in array.addressable_shards:
            assert np.array_equal(shard.data, expected[name][shard.index]), name
    total = jax.jit(lambda x: x.sum())(placed["label"])
    assert int(total) == int(expected["label"].sum())
    jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_place_one_global_batch() -> None:
    port = str(free_port())
    command = [sys.executable, "-c", textwrap.dedent(_WORKER), port]
    workers = [
        subprocess.Popen([*command, str(k)], stderr=subprocess.PIPE, text=True)
        for k in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, error in zip(workers, errors, strict=True):
        assert worker.returncode == 0, error
