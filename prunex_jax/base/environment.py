"""Describes what a program runs on: versions, devices, source revision, command."""

import hashlib
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

_PACKAGE = Path(__file__).parents[1]
_DISTRIBUTIONS = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "numpy": "numpy",
    "prunex_jax": "prunex-jax",
}


def environment(topology: Mapping[str, Any]) -> dict[str, Any]:
    """Describes what a run ran on; `topology` is the host x device table as plain
    values.
    """
    kinds = Counter(device.device_kind for device in jax.devices())
    return {
        "versions": versions(),
        "platform": jax.default_backend(),
        "device_kinds": dict(sorted(kinds.items())),
        "num_processes": jax.process_count(),
        "topology": dict(topology),
        "source": source_revision(_PACKAGE),
        "operating_system": platform.platform(),
        "command": shlex.join(sys.orig_argv),
    }


def source_revision(folder: Path) -> dict[str, Any] | None:
    """The git revision of the Python files in a folder, and whether something differs.

    None where git does not track the folder, as for an installed package. Never fails.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        # A package may be installed below a checkout that does not contain it.
        if not git("ls-files", "--", "*.py"):
            return None
        revision = git("rev-parse", "HEAD")
        return {"revision": revision, "is_dirty": bool(git("status", "--short", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def source_digest() -> str:
    """A digest of the Python files of this package, wherever they come from."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str | None]:
    """Versions of python and of what decides a result; None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None  # Run from its source, without installation.
    return found
