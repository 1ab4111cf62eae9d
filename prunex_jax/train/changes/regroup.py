"""Fits the state of a run to another number of hosts, or of devices in a host.

Replicated parts of a state stay. Parts that every host, or every device, has of its own
have one copy per owner, and the owners share the line from 0 to 1: of M owners number i
has [i / M, (i + 1) / M). A new copy is the mean of the old ones, weighted by how much
of its own interval was theirs. So

- with twice as many owners each copy is there twice, with half as many each is the mean
  of two; hosts first, then the devices of each, so that the mean over the devices of a
  host is what the host has of the old hosts;
- the mean over all owners stays, whatever the numbers. Every method averages over
  owners: parameters to a consensus, duals in its update, what is held back in the
  direction that it sends. So the consensus stays, duals that add up to zero still do,
  and what parameters are still to gain from gradients that are held back is the same;
- what all copies have in common stays bit for bit, zeros outside of masks included.

This is so for every leaf, whatever it holds, and needs no table of them. Running
variances are averaged as mean squares, as for evaluation. Sums since the last report
keep their sum. Integers are counters, equal everywhere, and are handed on by the owner
at the start of the interval. So are all copies of a method whose hosts do not average
(`Placements.copies`).

Parts in slices are put together first, and cut again for the devices that there are.
How a leaf was saved follows from its shape, so a run may also change `topology.shard`.
What means something only in the slices that it was made in (`Placements.forgotten`)
starts as zeros in others.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from prunex_jax.base.trees import map_with_path, named_by, shapes_by_path
from prunex_jax.comm import part_shape, slices_of, whole_of
from prunex_jax.mesh import IN_SLICES, Placement, specs_of
from prunex_jax.methods import Method
from prunex_jax.models.base import from_moments, to_moments
from prunex_jax.train.steps.programs import placements_of
from prunex_jax.train.steps.state import FIRST_BAD_STEP, Totals, TrainState

# Hosts, devices per host.
MeshSizes = tuple[int, int]
# mean, own and sum: see above; least: the smallest of all.
Rule = Literal["mean", "own", "sum", "least"]
# A leaf that every state has once per device.
_LOSS = "totals/loss"


def shares_of(old: int, new: int) -> list[dict[int, float]]:
    """What each of the new owners has of the old ones; adds up to one.

    Example:
      >>> shares_of(4, 2)
      [{0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}]
      >>> shares_of(2, 3)
      [{0: 1.0}, {0: 0.5, 1: 0.5}, {1: 1.0}]
    """
    # In units of 1 / (old * new): old owners have `new` of them, new ones `old`.
    shares = []
    for owner in range(new):
        begin, end = owner * old, (owner + 1) * old
        overlaps = {
            i: min(end, (i + 1) * new) - max(begin, i * new)
            for i in range(begin // new, -(-end // new))
        }
        shares.append({i: overlap / old for i, overlap in overlaps.items()})
    return shares


def regroup_copies(copies: np.ndarray, new: int, rule: Rule = "mean") -> np.ndarray:
    """Makes [new owners, ...] of the [old owners, ...] copies of a leaf.

    Floats that are not to be averaged have another rule than "mean".

    Example:
      >>> regroup_copies(np.array([[1.0], [3.0], [5.0], [7.0]]), 2).tolist()
      [[2.0], [6.0]]
      >>> regroup_copies(np.array([1.0, 3.0]), 1, 'sum').tolist()
      [4.0]
    """
    old = len(copies)
    if rule == "least":
        return np.broadcast_to(copies.min(axis=0), (new, *copies.shape[1:]))
    if rule == "own" or not jax.numpy.issubdtype(copies.dtype, np.floating):
        return copies[[owner * old // new for owner in range(new)]]
    scale = old / new if rule == "sum" else 1.0
    made = [scale * _weighted(copies, shares) for shares in shares_of(old, new)]
    return np.stack(made).astype(copies.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Regrouping:
    """How the state of a run goes from one mesh to another, or into other slices."""

    method: Method  # Whose state it is, as it is to live on.
    wanted: TrainState  # Its shapes on the new mesh.
    saved: Mapping[str, tuple[int, ...]]  # Shape of every leaf by path, when saved.

    @functools.cached_property
    def new(self) -> MeshSizes:
        """The mesh that it is to live on."""
        hosts, devices = self.wanted.totals["loss"].shape
        return hosts, devices

    @functools.cached_property
    def old(self) -> MeshSizes:
        """The mesh that it was saved on."""
        return saved_mesh(self.saved) or self.new

    @property
    def changes(self) -> bool:
        """Whether anything has another shape on the new mesh."""
        return any(
            self.saved.get(path, shape) != shape
            for path, shape in shapes_by_path(self.wanted).items()
        )

    def stored(self) -> TrainState:
        """Shapes on the old mesh of what is wanted on the new one.

        Without sharding where they are to change: these are read into host memory.
        """

        def shape(place: _Place, rule: Rule, leaf: Any) -> Any:
            del rule
            if place.stays:
                return leaf
            return jax.ShapeDtypeStruct(place.old_shape, leaf.dtype)

        return self._map(shape, self.wanted)

    def regrouped(self, state: TrainState) -> TrainState:
        """The state on the new mesh; parts that have changed are arrays of numpy."""

        def regroup(place: _Place, rule: Rule, leaf: Any) -> Any:
            return leaf if place.stays else place.moved(np.asarray(leaf), rule)

        moments = jax.device_get(to_moments(state.statistics))
        found = self._map(regroup, state._replace(statistics=moments))
        return found._replace(statistics=jax.device_get(from_moments(found.statistics)))

    def _map(self, fn: Callable[..., Any], state: TrainState) -> TrainState:
        words = jax.tree.broadcast(placements_of(self.method), state)
        wanted = shapes_by_path(self.wanted)
        places = map_with_path(
            lambda path, word, leaf: self._place(
                path, word, wanted.get(path, leaf.shape)
            ),
            words,
            state,
        )
        rules = jax.tree.broadcast(_rules_of(self.method, state.totals), state)
        found: TrainState = jax.tree.map(fn, places, rules, state)
        return found

    def _place(self, path: str, word: Placement, shape: tuple[int, ...]) -> "_Place":
        whole, is_slice = shape[_num_axes(word) :], False
        placements = self.method.placements
        slicing = placements.slicing
        if word in IN_SLICES.values() and slicing is not None:
            owner = named_by(path, slicing.shapes)
            if owner is not None:
                whole, is_slice = slicing.shapes[owner], True
        saved = self.saved.get(path, ())
        name = path.rpartition("/")[2]
        anew = shape if name in placements.forgotten and saved != shape else None
        return _Place(word, self.old, self.new, whole, is_slice, saved, anew)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a leaf was, and where it is to be."""

    word: Placement  # Where it is to be.
    old: MeshSizes
    new: MeshSizes
    whole: tuple[int, ...]  # Shape of a copy, or of the array whose slice it is.
    # Whether devices are to have slices of it. Beside slices, such as for counts, they
    # have copies.
    is_slice: bool
    saved: tuple[int, ...]  # Shape that it was saved in.
    # Shape in which it starts as zeros, as it means nothing in other slices; None for
    # what goes on.
    anew: tuple[int, ...] | None

    @property
    def base(self) -> Placement:
        """Where it would be if nothing were in slices."""
        by_slices = {slices: word for word, slices in IN_SLICES.items()}
        return by_slices.get(self.word, self.word)

    @property
    def was_in_slices(self) -> bool:
        """Whether devices had slices of it, or copies beside slices, when saved."""
        in_slices = IN_SLICES.get(self.base)
        return in_slices is not None and self.saved == self._shape_on_old(in_slices)

    @property
    def stays(self) -> bool:
        """Whether it is the same on both meshes."""
        if self.anew is not None:
            return False
        return self.word == "replicated" and not self.was_in_slices

    @property
    def old_shape(self) -> tuple[int, ...]:
        """Shape in which it must have been saved."""
        if self.was_in_slices or self.anew is not None:
            return self.saved
        return self._shape_on_old(self.base)

    def moved(self, leaf: np.ndarray, rule: Rule) -> np.ndarray:
        """The leaf on the new mesh."""
        if self.anew is not None:
            return np.zeros(self.anew, leaf.dtype)
        if self.was_in_slices:
            leaf = self._per_host(lambda rows: whole_of(rows, self.whole), leaf)
        for axis, count in enumerate(self.new[: _num_axes(self.base)]):
            leaf = np.moveaxis(leaf, axis, 0)
            leaf = np.moveaxis(regroup_copies(leaf, count, rule), 0, axis)
        if self.word == self.base:
            return leaf
        return self._per_host(self._cut, leaf)

    def _cut(self, whole: np.ndarray) -> np.ndarray:
        """What the devices of a host have of an array."""
        devices = self.new[1]
        if self.is_slice:
            return slices_of(whole, devices)
        return np.broadcast_to(whole, (devices, *whole.shape))

    def _shape_on_old(self, word: Placement) -> tuple[int, ...]:
        hosts, devices = self.old
        if word in IN_SLICES.values():
            lead = (hosts,) if word == "slices_per_host" else ()
            return (*lead, devices, *part_shape(self.whole, devices))
        return (*self.old[: _num_axes(word)], *self.whole)

    def _per_host(
        self, fn: Callable[[np.ndarray], np.ndarray], leaf: np.ndarray
    ) -> np.ndarray:
        """Applies a function to what every host has, or to what all have."""
        if self.base == "per_host":
            return np.stack([fn(row) for row in leaf])
        return fn(leaf)


def saved_shapes_of(leaves: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes by path, from what a manifest says of leaves.

    Example:
      >>> saved_shapes_of({'totals/loss': 'float32[4,2]', 'step': 'int32[]'})
      {'totals/loss': (4, 2), 'step': ()}
    """
    return {
        path: tuple(int(size) for size in re.findall(r"\d+", text.partition("[")[2]))
        for path, text in leaves.items()
    }


def saved_mesh(shapes: Mapping[str, tuple[int, ...]]) -> MeshSizes | None:
    """The mesh of a checkpoint, from the shapes of its leaves.

    Example:
      >>> saved_mesh({'totals/loss': (4, 2)})
      (4, 2)
    """
    shape = shapes.get(_LOSS, ())
    return (shape[0], shape[1]) if len(shape) == 2 else None


def placed_like(state: TrainState, wanted: TrainState) -> TrainState:
    """Puts arrays of numpy where they are wanted; each process makes its own parts."""

    def place(leaf: Any, like: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        part = leaf.__getitem__
        return jax.make_array_from_callback(like.shape, like.sharding, part)

    found: TrainState = jax.tree.map(place, state, wanted)
    return found


def describe_regrouping(old: MeshSizes, new: MeshSizes) -> str:
    """Says in one line on what a run goes on.

    Example:
      >>> describe_regrouping((4, 1), (2, 1))[:40]
      'continues on 2 hosts instead of 4: conse'
    """
    here, there = _hosts(new[0]), str(old[0])
    if old[1] != new[1]:
        here, there = f"{here} x {new[1]} devices", f"{old[0]} x {old[1]}"
    return (
        f"continues on {here} instead of {there}: consensus, masks and data position "
        "stay, copies of hosts and devices are merged or spread"
    )


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"


def _num_axes(placement: Placement) -> int:
    return len(specs_of(placement))


def _rules_of(method: Method, totals: Totals) -> TrainState:
    """What becomes of the copies of every part."""
    sums = {name: "least" if name == FIRST_BAD_STEP else "sum" for name in totals}
    rules: Any = TrainState(
        step="mean",  # type: ignore[arg-type]
        params=method.placements.copies,
        statistics="mean",
        opt_state=method.placements.copies,
        totals=sums,  # type: ignore[arg-type]
    )
    return rules


def _weighted(copies: np.ndarray, shares: Mapping[int, float]) -> np.ndarray:
    """A weighted mean that is exact where all copies are equal."""
    first, *others = shares
    wide = np.promote_types(copies.dtype, np.float32)
    start = copies[first].astype(wide)
    total = start.copy()
    for i in others:
        total += wide.type(shares[i]) * (copies[i].astype(wide) - start)
    return total
