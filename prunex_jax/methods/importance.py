"""Importance-weighted pruning: few hosts choose positions, all hosts average there.

Every host adds up what it has not sent. In each exchange a few hosts, in turns that all
know, choose the entries whose held back gradient is large against the weight, and send
their positions to all. Everybody then sends its values there, so that an ordinary
all-reduce of a short dense buffer does the rest, in the backend's own way or on the
explicit ring of `comm.ring`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import Range, setting
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.comm import (
    FLOAT32,
    Wire,
    dense_size,
    gather_over_hosts,
    mean_over_hosts,
    refuse_biased,
    ring_mean_over_hosts,
    sum_over_hosts,
    sum_over_slices,
)
from prunex_jax.mesh import ALONE, MeshAxes, axis_size, position
from prunex_jax.methods.entries import Layout, is_named, mean_in_host, zeros_like
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.method import (
    Method,
    MethodRow,
    Recipe,
    StepOptions,
    Variant,
)
from prunex_jax.methods.momentum import (
    add_momentum,
    after_momentum,
    clip_of_host,
    momentum_of,
)
from prunex_jax.sparsity import entry_count, largest_entries

AllReduce = Literal["native", "ring"]
# Keeps scores finite where a whole layer is zero; far below any weight.
_TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class ImportanceConfig:
    """Importance-weighted pruning on a ring."""

    # Share of the entries of every layer that one host chooses.
    density: float = setting(0.01, above=0, at_most=1)
    # Hosts that choose in one step.
    num_choosers: int = setting(1, at_least=1)
    # Steps for which a choice is used.
    refresh_period: int = setting(1, at_least=1)
    # Weights below this share of the rms of their layer count as no smaller; 0 ranks by
    # gradient over weight, large values by the gradient alone.
    damping: float = setting(1.0, at_least=0)
    # native (the all-reduce of the backend) | ring (neighbour to neighbour).
    all_reduce: AllReduce = "native"


class ImportanceState(NamedTuple):
    """State of `importance`."""

    num_steps: jax.Array  # int32[], replicated
    num_choices: jax.Array  # int32[], replicated: sets of positions chosen so far
    # int32[num_choosers * chosen by one], replicated: positions in the buffer of all
    # leaves (see `entries.Layout`), from 1; 0 is none. See `_without_twins`.
    chosen: jax.Array
    momentum: PyTree  # float32, like the parameters, per_host: u
    # float32, like the parameters, per_host: r, held back; zeros of what is sent whole.
    residual: PyTree


# Where the parts of the state live.
_PLACES: Any = ("replicated", "replicated", "replicated", "per_host", "per_host")
IMPORTANCE_PLACEMENTS = ImportanceState(*_PLACES)


def importance(
    density: float,
    *,
    num_choosers: int = 1,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float = 0.0,
    damping: float = 1.0,
    all_reduce: AllReduce = "native",
    wire: Wire = FLOAT32,
    send_whole: Sequence[str] = (),
    axes: MeshAxes = ALONE,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Makes importance-weighted pruning an optax transformation.

    With g the mean gradient of a host, clipped, per host and entry:

        u = momentum u + g ;  r = r + u
        importance = |r| / (|w| + damping * rms of w in the layer)

    Of every layer each chooser takes the density * entries most important ones.
    At these positions the mean of r over hosts is the update, and u and r become zero;
    elsewhere the update is zero. What a host does not send it keeps in r. An inner
    optimizer comes after it and must have no momentum of its own; `methods.momentum`
    has `after_momentum` for that.

    Leaves of fewer than two axes (biases, norm scales and offsets: many start at zero,
    where every gradient is important) are sent whole: the mean of u is the update,
    which is ordinary momentum. So are leaves in which the choosers could take
    everything; density 1 is dense momentum SGD.

    Args:
      density: Share of the entries of every layer that one host chooses, in (0, 1].
      num_choosers: Hosts that choose at a time.
      momentum: Of u. With `nesterov`, r gains g + momentum u.
      nesterov: See there.
      clip_norm: Largest norm of the mean gradient of all hosts, if those of the hosts
        were independent: g is clipped to it times sqrt(hosts). 0 means no clipping.
      damping: Weights below this share of the rms of their layer count as no smaller
        than it. 0 divides by the weight alone; large values rank by |r|.
      all_reduce: "native" leaves the form of the all-reduce to the backend, "ring" is
        `comm.ring_mean_over_hosts`.
      wire: How values cross the host axis; buckets are for the native all-reduce.
        Positions are int32.
      send_whole: Leaves whose path contains one of these are sent whole, too.
      axes: Mesh axes of the caller. With a single host the update is that of ordinary
        momentum, and nothing is held back.
      seed: Of the rotation; the same on all hosts.
    Returns:
      A transformation of local gradients into one direction, replicated; `update` needs
      the parameters. It takes `refresh` as a further, static argument: False uses the
      positions of the last time again, and sends none.
    Raises:
      UserError: A setting outside its range; in `update`, more choosers than hosts or
        gradients that are summed over the mesh already.
    Collectives:
      As `comm.mean_over_devices` for all gradients. Then, with n entries chosen by one
      host, q choosers, M hosts and w entries sent whole: if `refresh`, int32 positions,
      as `comm.sum_over_hosts` for q n of them, or as `comm.gather_over_hosts` for n,
      whichever sends less (2 q < M: the sum); q n + w values as `comm.mean_over_hosts`
      or `comm.ring_mean_over_hosts`. Of slices, entries are chosen in every slice; as
      `comm.sum_over_slices` for one number per layer that is chosen from if `refresh`,
      and for one if gradients are clipped.
    Example:
      >>> tx = importance(0.25, momentum=0.0, axes=MeshAxes('host', None))
      >>> params = {'kernel': jnp.ones((2, 2))}
      >>> def step(grads):
      ...     return tx.update(grads, tx.init(params), params)
      >>> grads = {'kernel': jnp.array([[[9.0, 2.0], [3.0, 1.0]],
      ...                               [[5.0, 4.0], [6.0, 8.0]]])}
      >>> updates, state = jax.vmap(step, axis_name='host')(grads)
      >>> updates['kernel'][0].tolist()  # the first turn was that of the first host
      [[7.0, 0.0], [0.0, 0.0]]
      >>> state.residual['kernel'][1].tolist()
      [[0.0, 4.0], [6.0, 8.0]]

    References:
      Cheng and Xu, Bandwidth Reduction using Importance Weighted Pruning on Ring
      AllReduce, 2019, arXiv:1901.01544.
      Lin et al., Deep Gradient Compression, 2018, arXiv:1712.01887 (u and r).
    Differs from:
      The paper, of which little more than the ratio |g / w| is public. The ratio is
      taken of r, or what is held back would stay there; it is damped; a static number
      of entries per layer stands for thresholds; every host chooses equally often;
      positions travel as integers and are counted.
    """
    Range(above=0, at_most=1).check("density", density)
    Range(at_least=1).check("num_choosers", num_choosers)
    Range(at_least=0, below=1).check("momentum", momentum)
    Range(at_least=0).check("clip_norm", clip_norm)
    Range(at_least=0).check("damping", damping)
    core = _Importance(
        density, num_choosers, momentum, nesterov, clip_norm, damping, all_reduce,
        wire, tuple(send_whole), axes, seed,
    )  # fmt: skip
    return optax.GradientTransformationExtraArgs(core.init, core.update)


@dataclasses.dataclass(frozen=True)
class _Importance:
    """The transformation; attributes are the arguments of `importance`."""

    density: float
    num_choosers: int
    momentum: float
    nesterov: bool
    clip_norm: float
    damping: float
    all_reduce: AllReduce
    wire: Wire
    send_whole: tuple[str, ...]
    axes: MeshAxes
    seed: int

    def layout_of(self, tree: PyTree) -> Layout:
        shapes = shapes_by_path(tree)
        counts = chosen_counts(shapes, self.density, self.num_choosers, self.send_whole)
        return Layout(tuple(shapes.values()), tuple(counts))

    def init(self, params: PyTree) -> ImportanceState:
        layout = self.layout_of(params)
        num_chosen = self.num_choosers * sum(layout.counts)
        return ImportanceState(
            num_steps=jnp.zeros((), jnp.int32),
            num_choices=jnp.zeros((), jnp.int32),
            chosen=jnp.zeros(num_chosen, jnp.int32),
            momentum=zeros_like(params),
            residual=zeros_like(params),
        )

    def update(
        self,
        grads: PyTree,
        state: ImportanceState,
        params: PyTree | None = None,
        *,
        refresh: bool = True,
        **extra: Any,
    ) -> tuple[PyTree, ImportanceState]:
        del extra
        if params is None:
            raise UserError(
                "importance is a matter of the parameters: call update(updates, state, "
                "params)"
            )
        own = mean_in_host(grads, self.axes)
        own = clip_of_host(own, self.clip_norm, self.axes)
        momentum, moved = add_momentum(
            own, state.momentum, self.momentum, self.nesterov
        )
        state = state._replace(momentum=momentum, num_steps=state.num_steps + 1)
        if axis_size(self.axes.host) == 1:
            mean = mean_over_hosts(moved, self.axes)
            return optax.tree.cast_like(mean, grads), state
        layout = self.layout_of(grads)
        sent, num_open = layout.join(moved), layout.num_open
        residual = layout.join(state.residual)[:num_open] + sent[:num_open]
        if refresh and num_open:
            chosen = self._choose(residual, params, layout, state.num_choices)
            state = state._replace(chosen=chosen, num_choices=state.num_choices + 1)
        nowhere = layout.num_entries
        at = jnp.where(state.chosen > 0, state.chosen - 1, nowhere)
        values = residual.at[at].get(mode="fill", fill_value=0.0)
        mean = self._mean(jnp.concatenate([values, sent[num_open:]]), state.num_steps)
        direction = jnp.zeros(num_open, jnp.float32)
        direction = direction.at[at].set(mean[: at.size], mode="drop")
        direction = jnp.concatenate([direction, mean[at.size :]])
        left = residual.at[at].set(0.0, mode="drop")
        left = jnp.concatenate([left, jnp.zeros(nowhere - num_open, left.dtype)])
        left_of_momentum = layout.join(momentum).at[at].set(0.0, mode="drop")
        found = optax.tree.cast_like(layout.split(direction, grads), grads)
        return found, state._replace(
            momentum=layout.split(left_of_momentum, grads),
            residual=layout.split(left, grads),
        )

    def _choose(
        self,
        residual: jax.Array,
        params: PyTree,
        layout: Layout,
        num_choices: jax.Array,
    ) -> jax.Array:
        """Positions of this turn's choosers, from 1, the same on every host."""
        num_hosts = axis_size(self.axes.host)
        if self.num_choosers > num_hosts:
            raise UserError(
                f"num_choosers={self.num_choosers} is more than the {num_hosts} hosts "
                "there are; lower it"
            )
        own = _most_important(residual, params, layout, self.damping, self.axes)
        choosers = choosers_of(num_choices, num_hosts, self.num_choosers, self.seed)
        if sums_positions(self.num_choosers, num_hosts):
            is_mine = choosers == position(self.axes.host)
            rows = jnp.where(is_mine[:, None], own[None], 0)
            rows = sum_over_hosts(rows, self.axes)
        else:
            rows = gather_over_hosts(own, self.axes)[choosers]
        if self.num_choosers == 1:
            return rows.ravel() + 1
        return _without_twins(rows.ravel() + 1, 0)

    def _mean(self, buffer: jax.Array, num_steps: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self.seed), num_steps)
        if self.all_reduce == "ring":
            return ring_mean_over_hosts(buffer, self.axes, self.wire, key)
        return mean_over_hosts(buffer, self.axes, self.wire, key)


def _most_important(
    residual: jax.Array,
    params: PyTree,
    layout: Layout,
    damping: float,
    axes: MeshAxes,
) -> jax.Array:
    """Positions that one host would choose, int32[sum of counts], layer by layer."""
    leaves = jax.tree.leaves(params)
    weights = {
        i: jnp.abs(leaves[i].astype(jnp.float32).ravel())
        for i in layout.order
        if layout.counts[i]
    }
    squares = {i: jnp.sum(jnp.square(weight)) for i, weight in weights.items()}
    squares = sum_over_slices(squares, axes)
    positions, start = [], 0
    for i, weight in weights.items():
        size = weight.size * axis_size(axes.slices)
        least = damping * jnp.sqrt(squares[i] / size) + _TINY
        score = jnp.abs(residual[start : start + weight.size]) / (weight + least)
        positions.append(largest_entries(score, layout.counts[i]) + start)
        start += weight.size
    return jnp.concatenate(positions)


def chosen_counts(
    shapes: Mapping[str, Sequence[int]],
    density: float,
    num_choosers: int,
    send_whole: Sequence[str] = (),
) -> list[int]:
    """Entries that one host chooses of every leaf; 0 where it is sent whole.

    Example:
      >>> chosen_counts({'kernel': (3, 100), 'bias': (100,), 'tiny': (2, 2)}, 0.01, 4)
      [3, 0, 0]
    """
    counts = []
    named = is_named(shapes, send_whole)
    for shape, is_sent_whole in zip(shapes.values(), named, strict=True):
        size = math.prod(shape)
        count = entry_count(density, size)
        is_whole = is_sent_whole or len(shape) < 2 or num_choosers * count >= size
        counts.append(0 if is_whole else count)
    return counts


def choosers_of(
    num_choices: jax.Array, num_hosts: int, num_choosers: int, seed: int = 0
) -> jax.Array:
    """Says whose turn it is, int32[num_choosers], the same on every host.

    Hosts are shuffled, take their turns, and are shuffled again.

    Example:
      >>> turns = [choosers_of(jnp.int32(i), 4, 2).tolist() for i in range(2)]
      >>> sorted(turns[0] + turns[1])
      [0, 1, 2, 3]
    """
    turns_per_cycle = -(-num_hosts // num_choosers)
    cycle, turn = num_choices // turns_per_cycle, num_choices % turns_per_cycle
    key = jax.random.fold_in(jax.random.key(seed), cycle)
    order = jax.random.permutation(key, num_hosts)
    places = (turn * num_choosers + jnp.arange(num_choosers)) % num_hosts
    return order[places].astype(jnp.int32)


def sums_positions(num_choosers: int, num_hosts: int) -> bool:
    """Whether a sum, to which the others add zeros, sends less than a gather."""
    return 2 * num_choosers < num_hosts


def _without_twins(positions: jax.Array, nowhere: int) -> jax.Array:
    """Sorts positions; those that occur again point nowhere instead."""
    ordered = jnp.sort(positions)
    is_again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.where(is_again, nowhere, ordered)


def make_importance(recipe: Recipe) -> Method:
    """Builds the method of importance-weighted pruning, which needs SGD inside.

    It takes over clipping and momentum of the inner optimizer, which keeps its weight
    decay and learning rate.
    """
    refuse_biased(recipe.wire, "importance")
    config: ImportanceConfig = recipe.settings
    exchange = importance(
        config.density,
        num_choosers=config.num_choosers,
        **momentum_of(recipe),
        damping=config.damping,
        all_reduce=config.all_reduce,
        wire=recipe.wire,
        send_whole=recipe.config.send_whole,
        axes=recipe.axes,
    )
    num_values, position_bytes = _sizes_of(recipe)

    def step_options(step: int) -> dict[str, Any]:
        if config.refresh_period == 1:
            return {}
        return {"refresh": step % config.refresh_period == 0}

    return gradient_method(
        recipe,
        exchange,
        placement=ImportanceState(
            *_PLACES[:2], *(recipe.placed(place) for place in _PLACES[2:])
        ),
        forgotten=("chosen",),
        payload_elements=num_values,
        position_bytes=position_bytes,
        inner=after_momentum(recipe.inner, recipe.learning_rate),
        step_options=StepOptions(step_options),
    )


def _sizes_of(recipe: Recipe) -> tuple[int, int]:
    """Values that a step averages over hosts, and bytes of positions on average."""
    config: ImportanceConfig = recipe.settings
    shapes = recipe.own_shapes
    counts = chosen_counts(
        shapes, config.density, config.num_choosers, recipe.config.send_whole
    )
    pairs = zip(shapes.items(), counts, strict=True)
    whole = {path: shape for (path, shape), count in pairs if not count}
    num_chosen = config.num_choosers * sum(counts)
    position_bytes = round(4 * num_chosen / config.refresh_period)
    return num_chosen + dense_size(whole), position_bytes


ROW = MethodRow(
    "importance",
    make_importance,
    ImportanceConfig,
    takes_slices=True,
    variants=(
        Variant(
            "importance",
            "importance, 1 %, one choice in 4 steps",
            {"method.importance.refresh_period": 4},
            period=4,
        ),
    ),
)
