"""Flags for what was brought to a run in Python, of which its folder has only names."""

from typing import Any

from prunex_jax.base.command import Flag, Values
from prunex_jax.base.imports import import_named
from prunex_jax.tasks import Own

OWN_FLAGS = (
    Flag("data", "", "Examples that were brought to the run: MODULE:OBJECT."),
    Flag("loss", "", "Its loss, if that was brought: MODULE:OBJECT."),
    Flag("inputs", "", "What the network reads of examples, if that was brought."),
)


def named_object(values: Values, flag: str) -> Any:
    """The object that a flag names, as package.module:object; None if it is not given.

    Raises:
      UserError: It cannot be imported.
    """
    name = getattr(values, flag)
    return import_named(name, f"--{flag}") if name else None


def given_own(values: Values, model: Any = None) -> Own | None:
    """What the flags of a command line name; None where they name nothing.

    Raises:
      UserError: As `named_object`.
    """
    given = [named_object(values, flag.name) for flag in OWN_FLAGS]
    if model is None and all(part is None for part in given):
        return None
    return Own(model, *given)
