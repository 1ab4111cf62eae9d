"""What a network costs: parameters, multiply-accumulates, bytes, seconds.

`count_params` and `count_macs` count one network. A `Cost` is a function from kept
counts to a number, for `sparsity.targets` to solve with; those here shrink any traced
function, and `model_budget` has those of a run.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.base.jaxprs import inner_programs, open_program
from prunex_jax.base.timing import time_in_turn
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelTrace, layouts_of
from prunex_jax.comm import compact_size
from prunex_jax.shrink.cut import Cut, make_cut
from prunex_jax.sparsity.counts import CountLimits
from prunex_jax.sparsity.settings import SparsityConfig
from prunex_jax.sparsity.targets import Budget, Cost, KeepCounts, Memoised, limits_of

if TYPE_CHECKING:
    from prunex_jax.models import Model


def count_params(params: PyTree) -> int:
    """Number of trainable parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> count_params({'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)})
      16
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def count_macs(apply: Callable[..., Any], *args: Any) -> int:
    """Counts multiply-accumulates of one call.

    What padding multiplies by zero counts, what the dilation of an image (a transposed
    convolution) does not. Of branches the most expensive counts; a loop whose length is
    not part of the program counts as one turn.

    Args:
      apply: Any traceable function.
      *args: Its arguments, or their shapes; one example if the result is to be "for
        one example".
    Example:
      >>> import jax.numpy as jnp
      >>> count_macs(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 5)))
      30
    """
    return sum(_macs(jax.make_jaxpr(apply)(*args).jaxpr))


def _macs(jaxpr: core.Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            yield _dot_macs(eqn)
        elif name == "conv_general_dilated":
            yield _conv_macs(eqn)
        elif name == "cond":
            yield max(sum(_macs(branch)) for branch in inner_programs(eqn))
        elif name == "custom_linear_solve":  # the rest is for derivatives
            yield from _macs(open_program(eqn.params["jaxprs"].solve))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in inner_programs(eqn):
                yield times * sum(_macs(inner))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _dot_macs(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = _shape(eqn.invars[0])
    return math.prod(_shape(eqn.outvars[0])) * math.prod(left[i] for i in contracted)


def _conv_macs(eqn: core.JaxprEqn) -> int:
    out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
    kernel = _shape(eqn.invars[1])
    per_output = math.prod(kernel[:out_axis] + kernel[out_axis + 1 :])
    total = math.prod(_shape(eqn.outvars[0])) * per_output
    return total // math.prod(eqn.params["lhs_dilation"])


def size_costs(trace: ChannelTrace, itemsize: int = 4) -> dict[str, Cost]:
    """Costs that follow from shapes alone: channels, params and bytes.

    Returns:
      Costs by unit; bytes are those of the array that one exchange averages.
    """
    shapes, layouts = trace.shapes, layouts_of(trace.groups, trace.shapes)
    return {
        "channels": lambda counts: sum(counts.values()),
        "params": lambda counts: compact_size(shapes, layouts, counts),
        "bytes": lambda counts: itemsize * compact_size(shapes, layouts, counts),
    }


def macs_cost(
    apply: Callable[..., Any],
    trace: ChannelTrace,
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
) -> Cost:
    """Multiply-accumulates of any traced function, by kept counts.

    Counted in the program of the small function; nothing is compiled. Every set of
    counts is counted once.

    Example:
      >>> import jax.numpy as jnp
      >>> from prunex_jax.channels import trace_channels
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> params = {'in': jnp.ones((3, 8)), 'out': jnp.ones((8, 2))}
      >>> x = jnp.ones((1, 3))
      >>> macs = macs_cost(apply, trace_channels(apply, params, x), params, x)
      >>> macs({'in': 8}), macs({'in': 2})
      (40, 10)
    """

    def cost(keep_counts: KeepCounts) -> int:
        cut = first_kept(trace, keep_counts, params, statistics)
        small = [jax.eval_shape(cut.take, params)]
        if statistics is not None:
            small.append(jax.eval_shape(cut.take_statistics, statistics))
        return count_macs(cut.function(apply), *small, *inputs)

    return Memoised(cost)


def first_kept(
    trace: ChannelTrace, keep_counts: KeepCounts, params: PyTree, statistics: PyTree
) -> Cut:
    """Keeps the first channels of every group; which ones costs the same."""
    masks = {g.name: np.arange(g.size) < keep_counts[g.name] for g in trace.groups}
    return make_cut(trace, masks, params, statistics)


def small_calls(
    apply: Callable[..., Any],
    trace: ChannelTrace,
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
) -> Callable[[KeepCounts], Callable[[], Any]]:
    """What `latency_cost` calls for any traced function, on these inputs."""

    def make_call(keep_counts: KeepCounts) -> Callable[[], Any]:
        cut = first_kept(trace, keep_counts, params, statistics)
        small = [cut.take(params)]
        if statistics is not None:
            small.append(cut.take_statistics(statistics))
        given = jax.device_put((*small, *inputs))
        compiled = jax.jit(cut.function(apply))
        return lambda: compiled(*given)

    return make_call


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
        call; what it returns is waited for. See `small_calls`.
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


def model_budget(config: SparsityConfig, model: "Model", trace: ChannelTrace) -> Budget:
    """The budget of a run with one of our models."""
    costs = size_costs(trace)
    if config.unit == "macs":
        params, statistics = jax.eval_shape(model.init, jax.random.key(0))
        costs["macs"] = macs_cost(
            model.apply, trace, params, model.example(), statistics=statistics
        )
    return Budget(config, trace_limits(config, trace), costs)


def trace_limits(config: SparsityConfig, trace: ChannelTrace) -> CountLimits:
    """What settings say of kept counts of a traced function; see `limits_of`."""
    sizes = {group.name: group.size for group in trace.groups}
    inner = {group.name for group in trace.groups if group.is_inner}
    return limits_of(config, sizes, inner)
