"""The methods that can be compared, by name: the whole list."""

from collections.abc import Callable, Mapping

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.methods.base import Method
from prunex_jax.methods.dense import make_dense
from prunex_jax.methods.dgc import make_dgc
from prunex_jax.methods.hsadmm.method import make_hsadmm, parameters_of
from prunex_jax.methods.importance import make_importance
from prunex_jax.methods.local_sgd import make_diloco, make_local_sgd
from prunex_jax.methods.none import make_none
from prunex_jax.methods.pactrain import make_pactrain
from prunex_jax.methods.powersgd import make_powersgd
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.topk import make_topk
from prunex_jax.methods.transforms import average_gradients

METHODS: Mapping[str, Callable[[Recipe], Method]] = {
    "dense": make_dense,
    "hsadmm": make_hsadmm,
    "local_sgd": make_local_sgd,
    "diloco": make_diloco,
    "none": make_none,
    "topk": make_topk,
    "dgc": make_dgc,
    "powersgd": make_powersgd,
    "importance": make_importance,
    "pactrain": make_pactrain,
}


def check_method(name: str, setting: str = "config.method.name") -> None:
    """Raises UserError if there is no method of that name, which a setting gives."""
    if name not in METHODS:
        raise UserError(
            f"{setting}={name!r} is not a method{suggest(name, METHODS)} "
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
