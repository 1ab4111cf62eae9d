"""Imports what settings name as `package.module:object`."""

import functools
import importlib
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
    except Exception as error:
        raise UserError(
            f"{setting}={name!r} cannot be imported as package.module:object: "
            f"{one_line(error)}"
        ) from error
