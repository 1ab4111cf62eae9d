"""Simulates the devices of a mesh on one real device, where their blocks lie stacked.

Every operation then does the work of all simulated devices at once, and collectives are
sums and copies along the stack, so a laptop's GPU can train what several hosts would:
the same numbers up to rounding, and the same bytes, which are those of the program on
the mesh that is simulated. Programs reach a mesh of either kind by `map_over`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
)

from prunex_jax.base.trees import PyTree


@dataclasses.dataclass(frozen=True)
class SimulatedMesh:
    """A mesh of simulated devices, which one real device stands for."""

    axis_sizes: tuple[tuple[str, int], ...]  # Name and size, slow axis first.
    device: jax.Device

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size, as for a real mesh."""
        return dict(self.axis_sizes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, slow one first."""
        return tuple(name for name, _ in self.axis_sizes)

    @property
    def size(self) -> int:
        """Number of simulated devices."""
        return int(np.prod([size for _, size in self.axis_sizes]))

    @property
    def devices(self) -> np.ndarray:
        """The real device, alone."""
        return np.array([self.device])

    @property
    def local_devices(self) -> list[jax.Device]:
        """The real device, alone."""
        return [self.device]


AnyMesh = Mesh | SimulatedMesh
_REPLICATED = jax.P()


def sharding_on(mesh: AnyMesh, spec: jax.P) -> Sharding:
    """Where arrays live that are split over a mesh as the spec says."""
    if isinstance(mesh, SimulatedMesh):
        return SingleDeviceSharding(mesh.device)
    return NamedSharding(mesh, spec)


def placed(tree: PyTree, mesh: AnyMesh, spec: jax.P = _REPLICATED) -> PyTree:
    """Puts arrays on a mesh that every process has whole.

    Args:
      tree: Of numpy arrays.
      mesh: Real, or folded.
      spec: How they are split; by default all devices have all of them.
    Example:
      >>> mesh = SimulatedMesh((('host', 2), ('device', 1)), jax.devices()[0])
      >>> placed({'a': np.ones(2)}, mesh)['a'].shape
      (2,)
    """
    sharding = sharding_on(mesh, spec)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), tree
    )


def map_over(
    mesh: AnyMesh, fn: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """Makes a function of whole arrays from one of the blocks of a single device.

    Args:
      mesh: Real, or folded.
      fn: Works on blocks, and may communicate over the axes of the mesh.
      in_specs: Per argument, or for whole parts of it; as for `jax.shard_map`.
      out_specs: The same for the result.
    Returns:
      `jax.shard_map` of the function on a real mesh; the same computation on one device
      for a folded one. In that case `program_to_count` gives the program whose
      collectives are those of the mesh.
    Example:
      >>> mesh = SimulatedMesh((('host', 2), ('device', 1)), jax.devices()[0])
      >>> total = map_over(
      ...     mesh, lambda x: jax.lax.psum(x, 'host'), (jax.P('host'),), jax.P())
      >>> total(jnp.arange(4.0)).tolist()
      [2.0, 4.0]
    """
    if isinstance(mesh, Mesh):
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def run(*args: PyTree) -> PyTree:
        specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(args)
        stacks = tuple(
            _per_leaf(functools.partial(_stack, mesh), spec, arg)
            for spec, arg in zip(specs, args, strict=True)
        )
        results = _over_all(mesh, fn, specs)(*stacks)
        return _per_leaf(functools.partial(_unstack, mesh), out_specs, results)

    sizes, names = [size for _, size in mesh.axis_sizes], mesh.axis_names
    types = (AxisType.Auto,) * len(names)
    abstract = AbstractMesh(tuple(sizes), names, axis_types=types)
    run.unfolded = jax.shard_map(  # type: ignore[attr-defined]
        fn, mesh=abstract, in_specs=in_specs, out_specs=out_specs
    )
    return run


def program_to_count(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function whose trace has the collectives of `map_over`'s result."""
    return getattr(fn, "unfolded", fn)


def _over_all(
    mesh: SimulatedMesh, fn: Callable[..., PyTree], specs: tuple[PyTree, ...]
) -> Callable[..., PyTree]:
    """Runs a function for all simulated devices, whose blocks lead with their axes.

    What is the same along an axis is not repeated.
    """
    for name, size in reversed(mesh.axis_sizes):
        leads = jax.tree.map(
            lambda spec, name=name: 0 if name in _all_names(spec) else None,
            specs,
            is_leaf=lambda x: isinstance(x, jax.P),
        )
        fn = jax.vmap(fn, in_axes=leads, axis_name=name, axis_size=size)
    return fn


def _per_leaf(
    do: Callable[[jax.P, jax.Array], jax.Array], specs: PyTree, tree: PyTree
) -> PyTree:
    """Maps over leaves with the spec of the part they belong to."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda leaf: do(spec, leaf), part),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, jax.P),
    )


def _stack(mesh: SimulatedMesh, spec: jax.P, array: jax.Array) -> jax.Array:
    """Whole array -> blocks, [*sizes of the axes that the spec names, *block]."""
    split: list[int] = []
    sources: dict[str, int] = {}
    dims: list[int] = []
    for dim, size in enumerate(array.shape):
        names = _names(spec, dim)
        for name in names:
            sources[name] = len(split)
            split.append(mesh.shape[name])
            size //= mesh.shape[name]
        dims.append(len(split))
        split.append(size)
    order = [sources[name] for name in mesh.axis_names if name in sources]
    return jnp.transpose(jnp.reshape(array, split), (*order, *dims))


def _unstack(mesh: SimulatedMesh, spec: jax.P, blocks: jax.Array) -> jax.Array:
    """Blocks of all devices -> whole array; blocks along other axes are equal."""
    named = _all_names(spec)
    index = tuple(slice(None) if n in named else 0 for n in mesh.axis_names)
    blocks = blocks[index]
    left = [name for name in mesh.axis_names if name in named]
    shape, order = [], []
    for dim, size in enumerate(blocks.shape[len(left) :]):
        for name in _names(spec, dim):
            order.append(left.index(name))
            size *= mesh.shape[name]
        order.append(len(left) + dim)
        shape.append(size)
    return jnp.reshape(jnp.transpose(blocks, order), shape)


def _all_names(spec: jax.P) -> set[str]:
    return {name for dim in range(len(spec)) for name in _names(spec, dim)}


def _names(spec: jax.P, dim: int) -> tuple[str, ...]:
    """Mesh axes over which a dimension is split, slow one first."""
    entry = spec[dim] if dim < len(spec) else None
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
