"""Finds the line of the caller's code that an equation comes from."""

import os
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
_CHANNELS_FOLDER = os.path.dirname(__file__) + os.sep
_SITE_FOLDER = os.path.dirname(os.path.dirname(jax.__file__)) + os.sep
_STDLIB_FOLDER = sysconfig.get_path("stdlib") + os.sep


def source_of(eqn: core.JaxprEqn) -> str:
    """`file:line` in the caller's code that an equation comes from.

    The innermost frame that belongs to no installed package; if there is none, the
    innermost one outside jax and the standard library.
    """
    traceback = eqn.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback is not None else ()
    installed = ""
    for frame in frames:
        name: str = frame.file_name
        if name.startswith(_CHANNELS_FOLDER):  # who asked for the trace
            break
        if name.startswith((_JAX_FOLDER, "<frozen", "<string")):
            continue
        if name.startswith(_SITE_FOLDER):
            installed = installed or f"{name}:{frame.line_num}"
        elif not name.startswith(_STDLIB_FOLDER):
            return f"{name}:{frame.line_num}"
    return installed


def is_of_jax(program: Any) -> bool:
    """Whether a program or function inside was written by jax, not by its caller.

    Such programs are cached, with the lines of whoever called them first.
    """
    info = getattr(program, "debug_info", None)
    return _JAX_FOLDER in str(getattr(info, "func_src_info", ""))
