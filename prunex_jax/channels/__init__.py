"""Channels of any JAX function: found by tracing, named as groups, cut by position.

In comes a function with its parameters, out comes a `ChannelTrace`: groups of channels
that can only go together, and why the others stay. Read in this order:

    groups       what a channel group is, and who owns which position of a leaf
    slicing      takes channels out of trees, puts them back, masks them
    trace        from a function to its groups
    walk         labels every value of a program, equation by equation, by the rules in
                 `rules`, with what `labels`, `numbers` and `derivatives` know
    resolve      which labels are one channel, and which channels form a group, with
                 `factors` for axes that are made of several
"""

from prunex_jax.channels.context import Context, Rule, freeze_all
from prunex_jax.channels.groups import (
    AxisLayout,
    ChannelGroup,
    ChannelSlice,
    Layouts,
    kept_shape,
    layouts_of,
    windowed,
)
from prunex_jax.channels.labels import Reason, Traced
from prunex_jax.channels.resolve import FrozenChannels
from prunex_jax.channels.rules import RULES
from prunex_jax.channels.slicing import (
    KeepIndices,
    Masks,
    mask_channels,
    mask_of,
    put_channels,
    sum_by_channel,
    sum_products_by_channel,
    sum_squares_by_channel,
    take_channels,
)
from prunex_jax.channels.trace import ChannelTrace, TraceOptions, trace_channels

__all__ = [
    "RULES",
    "AxisLayout",
    "ChannelGroup",
    "ChannelSlice",
    "ChannelTrace",
    "Context",
    "FrozenChannels",
    "KeepIndices",
    "Layouts",
    "Masks",
    "Reason",
    "Rule",
    "TraceOptions",
    "Traced",
    "freeze_all",
    "kept_shape",
    "layouts_of",
    "mask_channels",
    "mask_of",
    "put_channels",
    "sum_by_channel",
    "sum_products_by_channel",
    "sum_squares_by_channel",
    "take_channels",
    "trace_channels",
    "windowed",
]
