"""Channels of any JAX function: found by tracing, named as groups, cut by position."""

from prunex_jax.channels.groups import (
    AxisLayout,
    ChannelGroup,
    ChannelSlice,
    Layouts,
    layouts_of,
)
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
    "AxisLayout",
    "ChannelGroup",
    "ChannelSlice",
    "ChannelTrace",
    "KeepIndices",
    "Layouts",
    "Masks",
    "keep_indices_of",
    "layouts_of",
    "mask_channels",
    "mask_of",
    "put_channels",
    "sum_squares_by_channel",
    "take_channels",
    "trace_channels",
]
