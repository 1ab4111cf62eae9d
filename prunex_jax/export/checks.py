"""Looks at a folder of somebody else's before anything in it is used.

Files are regular, in the folder and no larger than they should be; the manifest is
strict; the program calls nothing outside of itself but what computes numbers.
"""

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.shrink.compare import program_bytes

# Bytes beyond which a manifest is none, a program is refused, and that a file of arrays
# may have beside them.
MOST_OF_MANIFEST = 2**26
MOST_OF_PROGRAM = 2**31
_MOST_OF_HEADER = 2**26
# What programs may call: factorisations and the like of the platforms' own libraries,
# sizes that are compared, and where arrays lie. No callbacks into a process, which are
# addresses in it, and no kernels that a program brings along.
_LIBRARIES = (
    *("lapack_", "cusolver_", "cusparse_", "hipsolver_", "cu_threefry2x32"),
    *("hip_threefry2x32", "cu_lu_pivots_to_", "hip_lu_pivots_to_"),
    *("__cublas$", "__cudnn$"),
)
_CALLS = frozenset(
    (
        *("ApproxTopK", "Eigh", "LuDecomposition", "Qr", "Sharding"),
        *("ProductOfElementaryHouseholderReflectors", "SPMDFullToShardShape"),
        *("SPMDShardToFullShape", "annotate_device_placement", "shape_assertion"),
        *("stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_reduce_window"),
        *("stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_top_k"),
        *("mhlo.topk", "mhlo.erf"),
    )
)
# A call, as StableHLO is printed, and its target.
_CALL = re.compile(r"\bcustom_call\b")
_TARGET = re.compile(r'\bcustom_call\s*@(?:"([^"]*)"|([\w.$-]+))')
# Operations that wait for somebody outside of the program.
_WAITS = re.compile(r"\bstablehlo\.(send|recv|infeed|outfeed)\b")
_SHAPE = re.compile(r"([a-z0-9_]+)\[([0-9,]*)\]")


def check_file(file: Path, most: float, *, links: bool = False) -> None:
    """Refuses what is no regular file, or too large, before it is opened.

    A link may lead anywhere, a pipe waits for ever, and a file with holes in it may
    promise more than memory.

    Args:
      file: The file.
      most: Bytes that it may have.
      links: Whether it may be a link to such a file.

    Raises:
      UserError: It is one of these; a missing file is nobody's fault here.
    """
    try:
        found = os.stat(file) if links else os.lstat(file)
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{file} is no regular file; copy or export the folder again, or read it "
            "with trusted=True if it is a link and you know who made it"
        )
    if found.st_size > most:
        raise UserError(
            f"{file} has {found.st_size:,} bytes, and at most {most:,.0f} are "
            "expected; copy or export the folder again"
        )


def most_of_arrays(described: Mapping[str, Any]) -> float:
    """Bytes that a file of the described arrays may have.

    Raises:
      ValueError: One is not described as in `float32[3,4]`.
    Example:
      >>> most_of_arrays({'w': 'float32[3,4]'}) - most_of_arrays({})
      48
    """
    return _MOST_OF_HEADER + sum(map(_bytes_of, described.values()))


def _bytes_of(word: Any) -> int:
    match = _SHAPE.fullmatch(word) if isinstance(word, str) else None
    if match is None:
        raise ValueError(f"{word!r} describes no array")
    sizes = [int(size) for size in match[2].split(",") if size]
    return math.prod(sizes) * _itemsize(match[1])


def _itemsize(name: str) -> int:
    # numpy knows bfloat16 only where jax has taught it.
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def check_memory(compiled: Any, device: Any) -> None:
    """Refuses a compiled program that needs more memory than its device has.

    Args:
      compiled: As `jax.stages.Compiled`.
      device: Where it would run; CPUs have the memory of their machine.
    Raises:
      UserError: It says how much.
    """
    known = device.memory_stats() or {}  # CPUs tell nothing.
    most = known.get("bytes_limit") or (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    needed = program_bytes(compiled) or 0
    if needed > most:
        raise UserError(
            f"the program needs {needed / 1e9:.3g} GB for such inputs, and there are "
            f"{most / 1e9:.3g} GB; give it fewer examples at once, or leave it alone "
            "if somebody else has made it"
        )


def check_calls(program: str) -> None:
    """Refuses a program that calls more than libraries that compute numbers.

    Raises:
      UserError: It names what the program calls.
    Example:
      >>> check_calls('%0 = stablehlo.custom_call @lapack_spotrf_ffi(%arg0)')
      >>> check_calls('%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback()')
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: the program calls xla_ffi_python_cpu_callback, \
which could run anything; read it with trusted=True if you know who made it
    """
    targets = [quoted or plain for quoted, plain in _TARGET.findall(program)]
    hidden = len(_CALL.findall(program)) - len(targets)
    others = [
        name
        for name in targets
        if name not in _CALLS and not name.startswith(_LIBRARIES)
    ]
    others += _WAITS.findall(program)
    if others or hidden:
        what = others[0] if others else "something that cannot be read"
        raise UserError(
            f"the program calls {what}, which could run anything; read it with "
            "trusted=True if you know who made it"
        )
