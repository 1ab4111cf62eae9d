"""Smaller networks: cut out what masks call dead, and prove that nothing changed.

In come a function, its `ChannelTrace` and masks of its groups; out come smaller trees,
the smaller function, and a certificate that both compute the same:

    trace_channels -> masks -> make_cut -> Cut.mask, take, function -> certify

Read in this order:

    cut          `Cut`: takes channels out of trees and of functions; `part` knows which
                 leaf belongs to which parameter
    function     the traced program done again on fewer channels, by `evaluator`, with
                 `rebuild` for operations whose parameters know sizes
    unroll       stacks of layers taken apart first, so that every layer has channels
                 of its own; `layers` finds and does the loops
    refit        what reads removed channels, fitted to those that stay
    certificate  how far a masked and a shrunk function are apart
    network      the same for the networks of this package
    cost         parameters, multiply-accumulates, bytes or seconds of what is left, for
                 `sparsity.targets` to solve with
    compare      a table of a network beside its shrunk form
"""

from prunex_jax.shrink.certificate import Certificate, certify, relative_error
from prunex_jax.shrink.cut import Cut, make_cut
from prunex_jax.shrink.network import (
    Network,
    certify_networks,
    shrink_error,
    trace_model,
)
from prunex_jax.shrink.refit import repair
from prunex_jax.shrink.unroll import Unrolled, unroll_stacks

__all__ = [
    "Certificate",
    "Cut",
    "Network",
    "Unrolled",
    "certify",
    "certify_networks",
    "make_cut",
    "relative_error",
    "repair",
    "shrink_error",
    "trace_model",
    "unroll_stacks",
]
