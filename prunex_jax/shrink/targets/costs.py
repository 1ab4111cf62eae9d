"""What a set of kept counts costs: from shapes, from a traced program, or measured.

A cost is a function from kept counts to a number. Those of our own models come from
`Model.with_widths_of`, those of any other function from `shrink.make_cut`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.timing import time_in_turn
from prunex_jax.base.trees import PyTree, map_with_path, shapes_by_path
from prunex_jax.channels import ChannelGroup, ChannelTrace, Layouts, layouts_of
from prunex_jax.comm import compact_size
from prunex_jax.models import Model
from prunex_jax.shrink import Cut, make_cut
from prunex_jax.shrink.cost import count_macs

Unit = Literal["channels", "params", "macs", "bytes", "latency"]
KeepCounts = Mapping[str, int]
# Kept counts -> what they cost; does not fall when counts grow.
Cost = Callable[[KeepCounts], float]


class Memoised:
    """A cost that is computed once per set of counts.

    Attributes:
      cost: What computes it.
      known: What was computed, by sorted counts.
    """

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.known: dict[tuple[tuple[str, int], ...], float] = {}

    def __call__(self, keep_counts: KeepCounts) -> float:
        """The cost of these counts."""
        key = tuple(sorted(keep_counts.items()))
        if key not in self.known:
            self.known[key] = self.cost(keep_counts)
        return self.known[key]


def size_costs(
    shapes: Mapping[str, tuple[int, ...]], layouts: Layouts, itemsize: int = 4
) -> dict[str, Cost]:
    """Costs that follow from shapes alone: channels, params and bytes.

    Args:
      shapes: Shape of every parameter by path.
      layouts: From `channels.layouts_of` for these shapes.
      itemsize: Bytes per element of what an exchange averages over hosts.
    Returns:
      Costs by unit; bytes are those of the array that one exchange averages.
    """
    return {
        "channels": lambda counts: sum(counts.values()),
        "params": lambda counts: compact_size(shapes, layouts, counts),
        "bytes": lambda counts: itemsize * compact_size(shapes, layouts, counts),
    }


def shrunk_shapes(tree: PyTree, layouts: Layouts, keep_counts: KeepCounts) -> PyTree:
    """Shapes that a tree has after its channels were cut.

    Args:
      tree: Leaves have a shape and a dtype.
      layouts: From `channels.layouts_of` for this tree.
      keep_counts: Kept channels of every group.
    Returns:
      A tree of `jax.ShapeDtypeStruct`.
    """

    def cut(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        axes = layouts.get(path, {})
        shape = tuple(
            axes[axis].kept_size(keep_counts) if axis in axes else size
            for axis, size in enumerate(leaf.shape)
        )
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return map_with_path(cut, tree)


def shrunk_model(
    model: Model, groups: Sequence[ChannelGroup]
) -> Callable[[KeepCounts], tuple[Model, PyTree, PyTree]]:
    """Makes one of our models with fewer channels, and the shapes of its two trees.

    Args:
      model: At full width.
      groups: Its channel groups.
    Returns:
      Kept counts -> the small model, shapes of its parameters and of its statistics.
    """
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    layouts = layouts_of(groups, shapes_by_path(params))
    running = layouts_of(groups, shapes_by_path(statistics), "statistics")

    def shrink(keep_counts: KeepCounts) -> tuple[Model, PyTree, PyTree]:
        small = shrunk_shapes(params, layouts, keep_counts)
        return (
            model.with_widths_of(small),
            small,
            shrunk_shapes(statistics, running, keep_counts),
        )

    return shrink


def model_macs(model: Model, groups: Sequence[ChannelGroup]) -> Cost:
    """Multiply-accumulates of one of our models for one example, by kept counts.

    Counted in the traced program of the small network; nothing is compiled.

    Args:
      model: At full width.
      groups: Its channel groups.
    """
    shrink = shrunk_model(model, groups)
    image = jax.ShapeDtypeStruct((1, *model.image_shape), np.float32)

    def cost(keep_counts: KeepCounts) -> int:
        small, params, statistics = shrink(keep_counts)
        return count_macs(small.apply, params, statistics, image)

    return cost


def function_macs(
    apply: Callable[..., Any],
    trace: ChannelTrace,
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
) -> Cost:
    """Multiply-accumulates of any traced function, by kept counts.

    Counted in the program of the small function; nothing is compiled.

    Args:
      apply: The function that was traced.
      trace: Its channel groups.
      params: Its parameters, or their shapes.
      *inputs: Its inputs, or their shapes: one example for a count per example.
      statistics: Its running statistics, if it takes any.
    Example:
      >>> from prunex_jax.channels import trace_channels
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> params = {'in': jnp.ones((3, 8)), 'out': jnp.ones((8, 2))}
      >>> x = jnp.ones((1, 3))
      >>> macs = function_macs(apply, trace_channels(apply, params, x), params, x)
      >>> macs({'in': 8}), macs({'in': 2})
      (40, 10)
    """
    trees = (params,) if statistics is None else (params, statistics)

    def cost(keep_counts: KeepCounts) -> int:
        cut = _cut(trace, keep_counts, *trees)
        small = [shrunk_shapes(params, cut.layouts(), keep_counts)]
        if statistics is not None:
            layouts = cut.statistics_layouts()
            small.append(shrunk_shapes(statistics, layouts, keep_counts))
        return count_macs(cut.function(apply), *small, *inputs)

    return cost


def function_call(
    apply: Callable[..., Any],
    trace: ChannelTrace,
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
) -> Callable[[KeepCounts], Callable[[], Any]]:
    """What `latency_cost` calls for any traced function, on these inputs.

    Args:
      apply: The function that was traced.
      trace: Its channel groups.
      params: Its parameters.
      *inputs: Its inputs, as many examples as one call is to have.
      statistics: Its running statistics, if it takes any.
    """
    trees = (params,) if statistics is None else (params, statistics)

    def make_call(keep_counts: KeepCounts) -> Callable[[], Any]:
        cut = _cut(trace, keep_counts, *trees)
        small = [cut.take(params)]
        if statistics is not None:
            small.append(cut.take_statistics(statistics))
        given = jax.device_put((*small, *inputs))
        compiled = jax.jit(cut.function(apply))
        return lambda: compiled(*given)

    return make_call


def _cut(trace: ChannelTrace, keep_counts: KeepCounts, *trees: PyTree) -> Cut:
    """Keeps the first channels of every group; which ones costs the same."""
    masks = {g.name: np.arange(g.size) < keep_counts[g.name] for g in trace.groups}
    return make_cut(trace, masks, *trees)


def latency_cost(
    make_call: Callable[[KeepCounts], Callable[[], Any]],
    sizes: Mapping[str, int],
    num_calls: int = 20,
    warm_up: int = 2,
    now: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Seconds of one call on this machine, by kept counts; measured.

    Every set of counts is compiled once and timed in turn with the dense network. The
    median is corrected by how much slower or faster the dense one has become since it
    was first timed, so that counts measured minutes apart compare.

    Args:
      make_call: Kept counts -> a function that computes once, compiled at its first
        call; what it returns is waited for.
      sizes: Counts of the dense network.
      num_calls: Times each is measured.
      warm_up: Calls before, not measured.
      now: Seconds from any origin; a test passes its own.
    """
    dense_calls: list[Callable[[], Any]] = []
    dense_seconds: list[float] = []

    def cost(keep_counts: KeepCounts) -> float:
        if not dense_calls:
            dense_calls.append(make_call(sizes))
        calls = {"dense": dense_calls[0]}
        if dict(keep_counts) != dict(sizes):
            calls["small"] = make_call(keep_counts)
        timings = time_in_turn(calls, num_calls, warm_up, now)
        dense_seconds.append(timings["dense"].median)
        drift = dense_seconds[0] / dense_seconds[-1]
        return timings["small" if "small" in calls else "dense"].median * drift

    return cost


def model_call(
    model: Model, groups: Sequence[ChannelGroup], batch_size: int = 1
) -> Callable[[KeepCounts], Callable[[], Any]]:
    """What `latency_cost` calls for one of our models: inference on one batch.

    Values do not matter to the time, so parameters are drawn for the small widths.

    Args:
      model: At full width.
      groups: Its channel groups.
      batch_size: Images per call.
    """

    shrink = shrunk_model(model, groups)

    def make_call(keep_counts: KeepCounts) -> Callable[[], Any]:
        small, _, _ = shrink(keep_counts)
        params, statistics = jax.jit(small.init)(jax.random.key(0))
        images = jnp.zeros((batch_size, *model.image_shape))
        apply = jax.jit(small.apply)
        return lambda: apply(params, statistics, images)

    return make_call
