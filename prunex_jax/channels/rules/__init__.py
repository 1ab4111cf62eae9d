"""What each jax primitive does to channels.

A rule receives the equation and what is known of its operands, joins or freezes labels,
and says what is known of the results. A primitive without a rule freezes everything it
touches, by name: it is never taken to be harmless. `channels.trace` walks the program.
"""

from collections.abc import Mapping

from prunex_jax.channels.context import Rule
from prunex_jax.channels.elementwise import (
    bitcast,
    convert,
    elementwise,
    integer_pow,
    select,
)
from prunex_jax.channels.numbers import ELEMENTWISE
from prunex_jax.channels.rules import axes, calls, lookup, sums

RULES: Mapping[str, Rule] = {
    **{name: elementwise for name in ELEMENTWISE},
    "argmax": sums.arg_reduce,
    "argmin": sums.arg_reduce,
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": axes.broadcast_in_dim,
    "concatenate": axes.concatenate,
    "cond": calls.cond,
    "conv_general_dilated": sums.conv,
    "convert_element_type": convert,
    "cumlogsumexp": sums.cumulative,
    "cummax": sums.cumulative,
    "cummin": sums.cumulative,
    "cumprod": sums.cumulative,
    "cumsum": sums.cumulative,
    "dot_general": sums.dot_general,
    "dynamic_slice": lookup.dynamic_slice,
    "dynamic_update_slice": lookup.dynamic_update_slice,
    "eq": lookup.compare,
    "gather": lookup.gather,
    "integer_pow": integer_pow,
    "iota": axes.made,
    "name": axes.passthrough,
    "ne": lookup.compare,
    "optimization_barrier": axes.passthrough,
    "pad": axes.pad,
    "pcast": axes.passthrough,
    "pmax": sums.over_mesh,
    "pmin": sums.over_mesh,
    "psum": sums.over_mesh,
    "psum_invariant": sums.over_mesh,
    "pvary": axes.passthrough,
    "random_bits": axes.made,
    "reduce_and": sums.reduce,
    "reduce_max": sums.reduce,
    "reduce_min": sums.reduce,
    "reduce_or": sums.reduce,
    "reduce_prod": sums.reduce,
    "reduce_sum": sums.reduce,
    "reduce_window": sums.reduce_window,
    "reduce_window_max": sums.reduce_window,
    "reduce_window_min": sums.reduce_window,
    "reduce_window_sum": sums.reduce_window,
    "reshape": axes.reshape,
    "rev": axes.rev,
    "scan": calls.scan,
    "scatter": lookup.scatter,
    "scatter-add": lookup.scatter,
    "scatter_add": lookup.scatter,
    "select_n": select,
    "sharding_constraint": axes.passthrough,
    "slice": axes.slice_,
    "sort": sums.sort,
    "split": axes.split,
    "squeeze": axes.squeeze,
    "stack": axes.stack,
    "threefry2x32": axes.made,
    "tile": axes.tile,
    "top_k": sums.top_k,
    "transpose": axes.transpose,
    "unstack": axes.unstack,
    "while": calls.while_loop,
}
