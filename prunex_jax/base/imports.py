"""Imports what settings name, and packages that only some runs need."""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from prunex_jax.base.errors import UserError, one_line


def is_named(name: str) -> bool:
    """Whether a setting names an object to be imported, as `optax:lamb` does."""
    return ":" in name


def import_named(name: str, setting: str) -> Any:
    """Imports `package.module:object`, which a setting or a flag names.

    Modules of the working directory are found, too, as `python -m` finds them; the
    object may be an attribute of another.

    Example:
      >>> import_named('flax.nnx:Linear', 'config.model.name').__name__
      'Linear'
    """
    module, _, attribute = name.partition(":")
    try:
        with _here_on_path():
            found = importlib.import_module(module)
        return functools.reduce(getattr, attribute.split("."), found)
    # Also SystemExit: a module that exits must not end the command as if it were done.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{setting}={name!r} cannot be imported as package.module:object: "
            f"{one_line(error)}"
        ) from error


@contextlib.contextmanager
def _here_on_path() -> Iterator[None]:
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def need_package(package: str, extra: str, what: str) -> None:
    """Refuses what needs a package that is not installed, and says what installs it.

    `extra` is that of this package which brings it; `what` begins a sentence.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'prunex-jax[{extra}]'"
        )
