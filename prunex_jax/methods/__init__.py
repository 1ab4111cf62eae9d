"""The methods that can be compared, by name: the whole list."""

from collections.abc import Callable, Mapping

from prunex_jax.config import suggest
from prunex_jax.errors import UserError
from prunex_jax.methods.base import Method
from prunex_jax.methods.dense import average_gradients, make_dense
from prunex_jax.methods.hsadmm import make_hsadmm, parameters_of
from prunex_jax.methods.recipe import Recipe

METHODS: Mapping[str, Callable[[Recipe], Method]] = {
    "dense": make_dense,
    "hsadmm": make_hsadmm,
}


def check_method(name: str) -> None:
    """Raises UserError if there is no method of that name."""
    if name not in METHODS:
        raise UserError(
            f"config.method.name={name!r} is not a method{suggest(name, METHODS)} "
            f"(known: {', '.join(METHODS)})"
        )


def make_method(recipe: Recipe) -> Method:
    """Builds the method that the settings name.

    Raises:
      UserError: No such method.
    """
    check_method(recipe.config.name)
    return METHODS[recipe.config.name](recipe)


__all__ = [
    "METHODS",
    "Method",
    "Recipe",
    "average_gradients",
    "check_method",
    "make_method",
    "parameters_of",
]
