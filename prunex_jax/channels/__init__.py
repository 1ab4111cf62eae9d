"""Channels of any JAX function: found by tracing, named as groups, cut by position."""

from prunex_jax.channels.components import FrozenChannels
from prunex_jax.channels.context import Context, Rule, freeze_all
from prunex_jax.channels.groups import (
    AxisLayout,
    ChannelGroup,
    ChannelSlice,
    Layouts,
    layouts_of,
)
from prunex_jax.channels.labelling import TraceOptions
from prunex_jax.channels.labels import Reason, Traced
from prunex_jax.channels.rules import RULES
from prunex_jax.channels.slicing import (
    KeepIndices,
    Masks,
    keep_indices_of,
    mask_channels,
    mask_of,
    put_channels,
    sum_squares_by_channel,
    take_channels,
)
from prunex_jax.channels.trace import (
    ChannelTrace,
    trace_channels,
)

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
    "keep_indices_of",
    "layouts_of",
    "mask_channels",
    "mask_of",
    "put_channels",
    "sum_squares_by_channel",
    "take_channels",
    "trace_channels",
]
