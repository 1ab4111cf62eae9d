"""What each jax primitive does to channels.

A rule receives the equation and what is known of its operands, joins or freezes labels,
and says what is known of the results. A primitive without a rule freezes everything it
touches, by name: it is never taken to be harmless. `channels.trace` walks the program.
"""

from collections.abc import Mapping

from prunex_jax.base.jaxprs import OWN_CASTS
from prunex_jax.channels.context import Rule
from prunex_jax.channels.numbers import ELEMENTWISE
from prunex_jax.channels.rules import (
    axes,
    batched,
    calls,
    elementwise,
    lookup,
    sums,
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise.elementwise),
    "bitcast_convert_type": elementwise.bitcast,
    "convert_element_type": elementwise.convert,
    "integer_pow": elementwise.integer_pow,
    "select_n": elementwise.select,
    # What moves, makes, cuts or joins axes.
    **dict.fromkeys(
        ("device_put", "name", "optimization_barrier", *OWN_CASTS, "pcast", "pvary"),
        axes.passthrough,
    ),
    "sharding_constraint": axes.passthrough,
    **dict.fromkeys(("iota", "random_bits", "threefry2x32"), axes.made),
    "broadcast_in_dim": axes.broadcast_in_dim,
    "concatenate": axes.concatenate,
    "pad": axes.pad,
    "reshape": axes.reshape,
    "rev": axes.rev,
    "slice": axes.slice_,
    "split": axes.split,
    "squeeze": axes.squeeze,
    "stack": axes.stack,
    "tile": axes.tile,
    "transpose": axes.transpose,
    "unstack": axes.unstack,
    # What adds up, or compares, along axes.
    **dict.fromkeys(("argmax", "argmin"), sums.arg_reduce),
    **dict.fromkeys(
        ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), sums.cumulative
    ),
    **dict.fromkeys(("pmax", "pmin", "psum", "psum_invariant"), sums.over_mesh),
    **dict.fromkeys(
        ("reduce_and", "reduce_or", "reduce_max", "reduce_min"), sums.reduce
    ),
    **dict.fromkeys(("reduce_prod", "reduce_sum"), sums.reduce),
    **dict.fromkeys(("reduce_window", "reduce_window_max"), sums.reduce_window),
    **dict.fromkeys(("reduce_window_min", "reduce_window_sum"), sums.reduce_window),
    "conv_general_dilated": sums.conv,
    "dot_general": sums.dot_general,
    "ragged_dot_general": sums.ragged_dot,
    "reduce": sums.reduce_by_program,
    "sort": sums.sort,
    **dict.fromkeys(("approx_top_k", "top_k"), sums.top_k),
    # What mixes some axes and leaves the others apart.
    **dict.fromkeys(batched.BATCHED, batched.apart),
    # What reads and writes at positions that are numbers.
    **dict.fromkeys(("eq", "ne"), lookup.compare),
    **dict.fromkeys(lookup.SCATTERS, lookup.scatter),
    "dynamic_slice": lookup.dynamic_slice,
    "dynamic_update_slice": lookup.dynamic_update_slice,
    "gather": lookup.gather,
    # Programs in the program.
    "cond": calls.cond,
    "custom_linear_solve": calls.linear_solve,
    "linear_call": calls.linear_call,
    "scan": calls.scan,
    "while": calls.while_loop,
}
