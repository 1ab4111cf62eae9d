"""Imports what settings name, and packages that only some runs need."""

import functools
import importlib
import importlib.util
from typing import Any

from prunex_jax.base.errors import UserError, one_line


def is_named(name: str) -> bool:
    """Whether a setting names an object to be imported.

    Example:
      >>> is_named('optax:lamb'), is_named('sgd')
      (True, False)
    """
    return ":" in name


def import_named(name: str, setting: str) -> Any:
    """Imports an object that a setting names.

    Args:
      name: `package.module:object`; the object may be an attribute of another.
      setting: Dotted path of the setting, for messages.
    Raises:
      UserError: It cannot be imported, or the module has no such object.
    Example:
      >>> import_named('flax.nnx:Linear', 'config.model.name').__name__
      'Linear'
    """
    module, _, attribute = name.partition(":")
    try:
        return functools.reduce(
            getattr, attribute.split("."), importlib.import_module(module)
        )
    # Also SystemExit: a module that exits must not end the command as if it were done.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{setting}={name!r} cannot be imported as package.module:object: "
            f"{one_line(error)}"
        ) from error


def need_package(package: str, extra: str, what: str) -> None:
    """Refuses what needs a package that is not installed.

    Args:
      package: As it is imported.
      extra: The extra of this package that brings it.
      what: What needs it, as the beginning of a sentence.
    Raises:
      UserError: With the command that installs it.
    Example:
      >>> need_package('numpy', 'none', 'This example')
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'prunex-jax[{extra}]'"
        )
