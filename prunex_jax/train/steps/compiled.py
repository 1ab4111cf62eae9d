"""Compiled programs that know what they send and how often they ran.

Every program that touches the mesh is a `Program`: its collectives are listed from its
own trace, its compilations and calls are counted, and a `Ledger` adds up bytes per axis
for the whole run. What is not run through here is not counted, so everything is.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent import futures
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.extend import core

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, list_collectives, wire_bytes
from prunex_jax.mesh import AnyMesh, program_to_count, sharding_on

# Of 0 to 3: without most passes over the code of each computation.
_QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 1}
# How XLA for GPUs fails that asks Triton for tiles a product does not have, and the way
# around: products by cuBLAS, for which it plans somewhat more memory.
_NO_TILES = "output tile sizes"
_WITHOUT_TILES: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass
class Ledger:
    """Running totals of a run; saved with its checkpoints."""

    # Axis -> bytes that one host has sent over it.
    wire_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    # Program name -> calls.
    num_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    num_compilations: int = 0  # Programs compiled.

    def record(self, name: str, sent: Mapping[str, float]) -> None:
        """Adds one call of a program."""
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        for axis, num_bytes in sent.items():
            self.wire_bytes[axis] = self.wire_bytes.get(axis, 0.0) + num_bytes

    def copy(self) -> Self:
        """The totals of now."""
        return copy.deepcopy(self)

    def go_on_from(self, earlier: Self) -> None:
        """Takes over the totals of a run that is resumed."""
        self.wire_bytes = dict(earlier.wire_bytes)
        self.num_calls = dict(earlier.num_calls)
        self.num_compilations = earlier.num_compilations


@dataclasses.dataclass(frozen=True)
class _Compiled:
    run: Callable[..., Any]
    collectives: list[Collective]
    sent: dict[str, float]


class Program:
    """A function compiled once per setting of its static arguments.

    Args:
      name: For the ledger.
      build: From static keyword arguments to the function to compile.
      mesh_shape: Axis name -> size, slow axis first.
      ledger: Where calls, compilations and bytes are added up.
      donate: Positions of arguments whose buffers the result may reuse.
      runs_once: Whether it is called once in a run, so that CPUs compile it quickly
        rather than well, in half of the time for the program that draws parameters.
    """

    def __init__(
        self,
        name: str,
        build: Callable[..., Callable[..., Any]],
        mesh_shape: Mapping[str, int],
        ledger: Ledger,
        donate: tuple[int, ...] = (),
        runs_once: bool = False,
    ) -> None:
        self.name = name
        self._build = build
        self._mesh_shape = mesh_shape
        self._ledger = ledger
        self._donate = donate
        is_hurried = runs_once and jax.default_backend() == "cpu"
        self._options = _QUICKLY if is_hurried else None
        # What calls have used, and what is compiled or being compiled, here or ahead.
        self._compiled: dict[Hashable, _Compiled] = {}
        self._builds: dict[Hashable, futures.Future[_Compiled]] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **static: Hashable) -> Any:
        """Runs the program, compiling it if these static arguments are new."""
        compiled = self.compile(*args, **static)
        self._ledger.record(self.name, compiled.sent)
        return compiled.run(*args)

    def is_compiled(self, **static: Hashable) -> bool:
        """Whether it was compiled for a call with these static arguments."""
        return tuple(sorted(static.items())) in self._compiled

    def sends_over(self, axis: str, **static: Hashable) -> bool:
        """Whether calls with these static arguments, once compiled, use an axis."""
        return self._compiled[tuple(sorted(static.items()))].sent.get(axis, 0.0) > 0

    def compile(self, *args: Any, **static: Hashable) -> _Compiled:
        """Compiles for these arguments, or finds what was compiled before."""
        key = tuple(sorted(static.items()))
        if key not in self._compiled:
            self._compiled[key] = self._built(args, static)
            self._ledger.num_compilations += 1
        return self._compiled[key]

    def compile_ahead(self, *args: Any, **static: Hashable) -> None:
        """Compiles what a later call will need, on another thread than that of calls.

        The ledger counts it with that call, which waits for it if it is not done.
        """
        self._built(args, static)

    def _built(
        self, args: tuple[Any, ...], static: Mapping[str, Hashable]
    ) -> _Compiled:
        """What is compiled for these arguments, by whichever thread comes first."""
        # Shapes too: what was foreseen wrongly is compiled again, not called.
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), shapes_of(args))
        key = (tuple(sorted(static.items())), str(shapes))
        with self._lock:
            build = self._builds.get(key)
            is_first = build is None
            if build is None:
                build = self._builds[key] = futures.Future()
        if is_first:
            try:
                build.set_result(self._build_now(args, static))
            except BaseException as error:
                del self._builds[key]
                build.set_exception(error)
        return build.result()

    def _build_now(
        self, args: tuple[Any, ...], static: Mapping[str, Hashable]
    ) -> _Compiled:
        traced, listed = self._trace(args, static)
        sent = wire_bytes(listed, self._mesh_shape)
        return _Compiled(self._compiled_by_xla(traced.lower()), listed, sent)

    def _compiled_by_xla(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        try:
            return lowered.compile(self._options)
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
            # Where no GPU is there to try kernels on, XLA gives some products tiles
            # that they cannot have.
            return lowered.compile({**(self._options or {}), **_WITHOUT_TILES})

    def collectives(self, *args: Any, **static: Hashable) -> list[Collective]:
        """Lists what one call sends, from its trace; arguments as for `compile`."""
        compiled = self._compiled.get(tuple(sorted(static.items())))
        if compiled is not None:
            return compiled.collectives
        return self._trace(args, static)[1]

    def _trace(
        self, args: tuple[Any, ...], static: Mapping[str, Hashable]
    ) -> tuple[Any, list[Collective]]:
        fn = self._build(**static)
        traced = jax.jit(fn, donate_argnums=self._donate).trace(*args)
        return traced, list_collectives(_counted(fn, args, traced.jaxpr))


def _counted(
    fn: Callable[..., Any], args: tuple[Any, ...], jaxpr: core.ClosedJaxpr
) -> core.ClosedJaxpr:
    """The program whose collectives count: on a folded mesh, that of the real one."""
    counted = program_to_count(fn)
    if counted is fn:
        return jaxpr
    plain = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes_of(args)
    )
    return jax.jit(counted).trace(*plain).jaxpr


def shapes_on(mesh: AnyMesh, spec: jax.P, tree: PyTree) -> PyTree:
    """Shapes and types of arrays, or shapes, as if they were placed over a mesh."""
    sharding = sharding_on(mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def shapes_of(tree: PyTree) -> PyTree:
    """Shapes, types and shardings of arrays, which outlive them.

    Example:
      >>> shapes_of({'a': jnp.ones(2)})['a'].shape
      (2,)
    """

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape_of, tree)
