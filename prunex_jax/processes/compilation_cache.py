"""Keeps compiled programs on disk, so that the next process need not build them again.

jax has the cache. Here is where it lies and how large it becomes, that every process of
a run writes to it, and that nothing about it can end a run. `start_processes` calls it
for the commands of this package: settings of jax belong to the whole process.

    <cache folder>/prunex_jax/compiled/     what `keep_compiled("auto")` makes
      x86_64-1f0c2a9be35d/                  programs for one kind of processor
        jit_fn-<key>-cache                  a program, as jax stores it
"""

import contextlib
import hashlib
import inspect
import logging
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.files import cache_folder

AUTO, OFF = "auto", "off"
# Programs that were not used for longest go first. Small ones count as more than they
# are, which bounds their number too: all are looked at when a process starts.
_MAX_BYTES = 2**30
_LEAST_BYTES = 2**16
# jax's warnings about entries that it cannot read or write; it compiles then.
_WARNING = "Error (reading|writing) persistent compilation cache entry"
# What jax's function that writes is called with; in 0.10 host callbacks follow.
_WRITTEN = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
_logger = logging.getLogger(__name__)
_settings: Any = jax.config


def keep_compiled(
    where: str = AUTO, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """Makes jax keep what it compiles from now on, and look there first.

    Programs are found again by their code, the version of jaxlib, XLA's flags and the
    kind of device. Every set of instructions that a processor may have is a folder of
    its own, so that a home folder may be shared by unlike machines.

    Args:
      where: `auto` for the folder that jax was told (`JAX_COMPILATION_CACHE_DIR`), used
        as its own settings say, and without one for `prunex_jax/compiled` in the user's
        cache folder; `off` for nowhere; or another folder. Whoever can write there can
        run code here.
      environ: Environment variables.
    Returns:
      The folder; None where nothing is kept, which a warning explains if it was to be.
    """
    if where == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    told = _settings.jax_compilation_cache_dir
    try:
        if where == AUTO and told:
            folder = Path(told)
        else:
            root = cache_folder(environ) / "compiled" if where == AUTO else Path(where)
            folder = _prepare(root)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environ:
                # A run has hundred small programs, of a second or two together.
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder.
        _logger.warning("compiled programs are not kept: %s", error)
        return None
    warnings.filterwarnings("ignore", _WARNING, UserWarning)
    _write_on_every_process(folder)
    return folder


def _prepare(root: Path) -> Path:
    """The folder for this kind of processor, which can be written.

    Raises:
      OSError: It cannot.
    """
    root = root.expanduser().absolute()
    folder = root / _processor()
    # For nobody else: what lies there is run.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    _trim(root)
    return folder


def _processor() -> str:
    """Names the instructions of this machine; other machines may not know them all."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = ("flags", "Features")
        features = next((line for line in lines if line.startswith(names)), features)
    digest = hashlib.sha256(features.encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _trim(root: Path, limit: int = _MAX_BYTES) -> None:
    """Removes the programs that were not used for longest, down to a total in bytes."""
    found: list[tuple[float, int, Path]] = []
    for path in root.glob("*/*-cache"):
        with contextlib.suppress(OSError):  # Another process removes it, too.
            stat = path.stat()
            size = max(stat.st_size, _LEAST_BYTES)
            found.append((max(stat.st_atime, stat.st_mtime), size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


def _write_on_every_process(folder: Path) -> None:
    """Lets all processes of a run store what they compile, and replace what is damaged.

    jax lets process 0 alone write, and never over an entry. But the devices of a CPU
    process are part of the key, so that no other process finds what process 0 wrote;
    and an entry whose writing was cut short would stay. jax has no setting for either,
    so its function that writes is replaced, where it is the one of jax 0.10 to 0.12.
    """
    try:
        from jax._src import compilation_cache, compiler, distributed

        jax_compiler: Any = compiler
        write = jax_compiler._cache_write
        put = compilation_cache.put_executable_and_time
        state = distributed.global_state
    except (ImportError, AttributeError):
        return
    if tuple(inspect.signature(write).parameters)[: len(_WRITTEN)] != _WRITTEN:
        return  # Unknown, or replaced before.
    started = time.time()

    def replacement(
        key: str, seconds: float, name: str, backend: Any, program: Any, *rest: Any
    ) -> None:
        entry = folder / f"{key}-cache"
        with contextlib.suppress(OSError):
            # It was there, and yet had to be compiled.
            if entry.stat().st_mtime < started:
                entry.unlink()
        if state.process_id == 0:
            write(key, seconds, name, backend, program, *rest)
        elif (
            seconds >= _settings.jax_persistent_cache_min_compile_time_secs
            and not any(rest)  # Host callbacks, which belong to this process.
        ):
            with contextlib.suppress(Exception):  # jax warns, and goes on, too.
                put(key, name, program, backend, int(seconds))

    jax_compiler._cache_write = replacement
