"""Programs compiled for GPUs that this machine has not, and what their text shows.

XLA compiles for a description of a device. What it makes is never run here: memory and
schedules are the compiler's word.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, described_topology, lacking_compiler
from prunex_jax.train.build.config import ExperimentConfig
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.commands.dry_run import bytes_per_device

NUM_HOSTS, DEVICES_PER_HOST = 2, 8
# Operations of compiled programs that communicate, and the kind of `Collective`.
_KINDS = {
    "all-reduce": "sum",
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-to-all": "exchange",
    "collective-permute": "shift",
}
_TYPES = {
    **{"f32": "float32", "f16": "float16", "bf16": "bfloat16", "pred": "bool"},
    **{f"{s}{n}": f"{t}{n}" for s, t in (("s", "int"), ("u", "uint")) for n in (8, 16)},
    **{"s32": "int32", "u32": "uint32"},
}
# %name = type operation(operands), attributes
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\(([^()]*)\)(.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


GPUS = f"h100:{NUM_HOSTS}x{DEVICES_PER_HOST}"


def needs_compiler(test: Callable[..., None]) -> Any:
    """Runs a test only where there is a compiler for GPUs, and in turn with others."""
    lacking = lacking_compiler()
    reason = f"{lacking}: `make test-gpu-programs` installs one"
    skipped = pytest.mark.skipif(bool(lacking), reason=reason)
    return pytest.mark.gpu_programs(pytest.mark.rotates(skipped(test)))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for these GPUs."""

    text: str  # As the compiler shows it.
    aliased: int  # Bytes on one device of outputs that lie where arguments were,
    state: int  # and of the state that it is given.
    sent: Mapping[str, float]  # What a host sends over an axis, from the trace.

    @property
    def collectives(self) -> list[Collective]:
        """What it sends, in the order of its text."""
        return list_compiled(self.text)

    @property
    def schedule(self) -> list[str]:
        """Operations of the program itself in their order, as its text names them."""
        return [line[1] for line in _lines(self.text[self.text.index("\nENTRY") :])]

    @property
    def copied(self) -> int:
        """Bytes on one device of arrays that it only copies to another place."""
        copies = (line[2] for line in _lines(self.text) if line[3] == "copy")
        arrays = (array for copy in copies for array in _arrays(copy))
        return sum(jnp.dtype(dtype).itemsize * count for dtype, count in arrays)


class GpuPrograms:
    """The programs of a run on GPUs that are not here.

    Args:
      config: The run.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.experiment: Experiment = make_experiment(config, described_topology(GPUS))
        self._programs = self.experiment.current.programs
        self._batch = self.experiment.batch_shapes()
        self._state = self._programs.abstract_state()

    def local_step(self, step: int = 0) -> Compiled:
        """The local step of full width."""
        options = self.experiment.current.step_options(
            step, self.experiment.channels.sizes
        )
        return self._compiled(
            self._programs.local_step, (self._state, self._batch), options
        )

    def exchange(self, options: Mapping[str, Any]) -> Compiled:
        """An exchange of full width."""
        return self._compiled(self._programs.exchange, (self._state,), options)

    def _compiled(
        self, program: Any, args: tuple[PyTree, ...], options: Mapping[str, Any]
    ) -> Compiled:
        compiled = program.compile(*args, **options)
        return Compiled(
            compiled.run.as_text(),
            compiled.run.memory_analysis().alias_size_in_bytes,
            bytes_per_device(self._state),
            compiled.sent,
        )


def _lines(text: str) -> Iterator[re.Match[str]]:
    return filter(None, map(_LINE.match, text.splitlines()))


def list_compiled(text: str) -> list[Collective]:
    """Lists what a compiled program sends, as `list_collectives` does for a traced one.

    Args:
      text: As the compiler shows a program for `GPUS`.
    Raises:
      AssertionError: Groups of a collective follow neither axis of the mesh.
    """
    return list(_listed(text))


def _listed(text: str) -> Iterator[Collective]:
    types = {line[1]: line[2] for line in _lines(text)}
    for line in _lines(text):
        kind = _KINDS.get(line[3].removesuffix("-start"))
        if kind is None:
            continue
        axes, sizes = _axes_of(line[5])
        names = [name.strip().lstrip("%") for name in line[4].split(",")]
        for dtype, count in (a for name in names for a in _arrays(types[name])):
            yield Collective(kind, axes, sizes, count, dtype)


def _arrays(text: str) -> Iterator[tuple[str, int]]:
    """Types and numbers of elements of what a type says."""
    for name, shape in _ARRAY.findall(text):
        sizes = [int(size) for size in shape.split(",") if size]
        yield _TYPES[name], int(np.prod(sizes, dtype=np.int64))


def _axes_of(attributes: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The mesh axes along which a collective runs.

    Raises:
      AssertionError: Its groups are neither hosts, nor devices with the same number on
        every host, nor everything.
    """
    mesh = np.arange(NUM_HOSTS * DEVICES_PER_HOST).reshape(NUM_HOSTS, -1)
    groups = _groups_of(attributes)
    both = ((HOST_AXIS, DEVICE_AXIS), mesh.shape)
    if "source_target_pairs" in attributes:
        rows = {len({i // DEVICES_PER_HOST for i in pair}) for pair in groups}
        columns = {len({i % DEVICES_PER_HOST for i in pair}) for pair in groups}
        if columns == {1}:
            return (HOST_AXIS,), (NUM_HOSTS,)
        return ((DEVICE_AXIS,), (DEVICES_PER_HOST,)) if rows == {1} else both
    found = {frozenset(group) for group in groups}
    if found == {frozenset(row.tolist()) for row in mesh}:
        return (DEVICE_AXIS,), (DEVICES_PER_HOST,)
    if found == {frozenset(column.tolist()) for column in mesh.T}:
        return (HOST_AXIS,), (NUM_HOSTS,)
    assert found == {frozenset(mesh.ravel().tolist())}, attributes
    return both


def _groups_of(attributes: str) -> list[list[int]]:
    if counted := _COUNTED.search(attributes):
        shape, sizes, order = (_numbers(x or "") for x in counted.groups())
        every = np.arange(np.prod(sizes)).reshape(sizes)
        return every.transpose(order or None).reshape(shape).tolist()
    listed = _LISTED.search(attributes)
    assert listed, f"no groups in {attributes}"
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
