"""Puts host-local batches onto the mesh."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import map_with_path
from prunex_jax.data.order import Positions
from prunex_jax.data.splits import Batch
from prunex_jax.mesh import AnyMesh, sharding_on


def batch_rows(
    mesh: AnyMesh, batch_size: int, setting: str = "data.batch_size"
) -> Positions:
    """Returns the rows of a global batch that this process must produce.

    Rows are dealt to devices in contiguous blocks, along the mesh axes in their order
    (slow axis first), so a host's rows do not depend on how many processes it runs.

    Args:
      mesh: AnyMesh of any number of axes, over all processes.
      batch_size: Rows of the global batch.
      setting: Name of the setting that holds the size, for the message.
    Returns:
      int64[local], ascending.
    Raises:
      UserError: If the batch cannot be divided evenly over the devices.

    Example:
      >>> devices = np.array(jax.devices()[:1]).reshape(1, 1)
      >>> mesh = jax.sharding.Mesh(devices, ("host", "device"))
      >>> batch_rows(mesh, 4).tolist()
      [0, 1, 2, 3]
    """
    if batch_size < 1 or batch_size % mesh.size:
        lower = batch_size // mesh.size * mesh.size
        nearest = [str(size) for size in (lower, lower + mesh.size) if size > 0]
        raise UserError(
            f"{setting}={batch_size} does not divide evenly over {mesh.size} devices: "
            f"use {' or '.join(nearest)}"
        )
    blocks = _batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    rows = np.arange(batch_size)
    return np.sort(np.concatenate([rows[block] for block in blocks.values()]))


def place_batch(batch: Batch, mesh: AnyMesh, rows: Positions) -> dict[str, Any]:
    """Makes global arrays, split over all devices along the first axis.

    Each row goes from the host's memory straight to the one device that owns it. On
    CPU the device may use the numpy memory itself, so the batch must not be written
    to afterwards.

    Args:
      batch: A tree of host-local arrays whose first axis is that of `rows`.
      mesh: The mesh given to `batch_rows`.
      rows: int64[local], the value of `batch_rows`.
    Returns:
      The same tree of arrays of the global batch, sharded over all mesh axes on axis 0.
    Raises:
      ValueError: If an array has another number of rows.
    """
    num_local_devices = len(mesh.local_devices)
    batch_size = len(rows) // num_local_devices * mesh.devices.size
    sharding = _batch_sharding(mesh)

    def place(name: str, local: np.ndarray) -> jax.Array:
        if len(local) != len(rows):
            raise ValueError(f"{name!r} has {len(local)} rows instead of {len(rows)}")

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            start, stop, _ = (index or (slice(None),))[0].indices(batch_size)
            first = int(np.searchsorted(rows, start))
            return local[first : first + stop - start]

        shape = (batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, sharding, block)

    placed: dict[str, Any] = map_with_path(place, batch)
    return placed


def placed_shapes(batch: Batch, mesh: AnyMesh, batch_size: int) -> dict[str, Any]:
    """What `place_batch` makes, as shapes, types and shardings; nothing is placed.

    Args:
      batch: A tree of host-local arrays, of one example or more.
      mesh: The mesh; its devices need not be here.
      batch_size: Rows of the global batch.
    Example:
      >>> devices = np.array(jax.devices()[:1]).reshape(1, 1)
      >>> mesh = jax.sharding.Mesh(devices, ("host", "device"))
      >>> placed_shapes({"x": np.zeros((1, 3))}, mesh, 8)["x"].shape
      (8, 3)
    """
    sharding = _batch_sharding(mesh)

    def shape_of(local: np.ndarray) -> jax.ShapeDtypeStruct:
        # As jax would place it: its types, not numpy's.
        dtype = jax.dtypes.canonicalize_dtype(local.dtype)
        shape = (batch_size, *local.shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    shapes: dict[str, Any] = jax.tree.map(shape_of, batch)
    return shapes


def _batch_sharding(mesh: AnyMesh) -> Sharding:
    return sharding_on(mesh, jax.P(tuple(mesh.axis_names)))
