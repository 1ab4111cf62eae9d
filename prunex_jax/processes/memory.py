"""Makes this process keep the memory that jax frees on CPU, for its next step.

`start_processes` calls it for the commands of this package: the allocator belongs to
the whole process, which is not ours where `train` is called by somebody's program.
"""

import ctypes
import os
from collections.abc import Mapping

# mallopt's names of what it sets, in malloc.h of glibc.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_PAD_BYTES = 2**28


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Lets buffers of a step come from memory that the last step has freed.

    XLA on CPU takes the temporary buffers of a step from malloc and frees them after
    it. glibc hands large ones back to the kernel each time, which then clears and maps
    the same pages again in every step, which takes an eighth of the step of a ResNet-20
    (`make benchmark-freed-memory`). The process keeps no more than it held at its peak,
    and 256 MiB that nobody touches. A second call changes nothing.

    Args:
      environ: Environment variables; where they set glibc's allocator, that stands.
    Returns:
      Whether memory is kept from now on; False where the user's settings stand or the C
      library is none that has them, as on macOS.

    >>> keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    False
    """
    if _user_sets_malloc(environ):
        return False
    # No other C library has these names, or gives them this meaning.
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST),
        (_TRIM_THRESHOLD, _LARGEST),
        (_TOP_PAD, _PAD_BYTES),
    )
    return all(library.mallopt(name, value) == 1 for name, value in settings)


def _user_sets_malloc(environ: Mapping[str, str]) -> bool:
    return "glibc.malloc." in environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in environ
    )
