"""Local SGD and DiLoCo: some steps alone, then an outer step along the mean movement.

They are forms of the core of H-SADMM in which nothing is pruned: copies start every
round from the consensus, which moves along the mean of how far they went. H-SADMM's
presets `reset` and `recommended` are the same on compact channels.
"""

from prunex_jax.methods.base import Method
from prunex_jax.methods.hsadmm.method import consensus_method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.transforms import Hsadmm, HsadmmParameters


def make_local_sgd(recipe: Recipe) -> Method:
    """Builds local SGD: the mean of the copies every `sync_period` steps.

    With `sync_period` 1 and plain SGD inside, it is dense data parallelism.

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2018, arXiv:1805.09767.
    """
    return _averaging("local_sgd", recipe, outer_step=1.0, outer_momentum=0.0)


def make_diloco(recipe: Recipe) -> Method:
    """Builds DiLoCo: local steps, and an outer Nesterov step of the mean.

    Differs from the paper: the inner optimizer is that of the settings, AdamW only
    if they say so, and its state stays with the host, as there.

    References:
      Douillard et al., DiLoCo, 2023, arXiv:2311.08105, algorithm 1; outer step 0.7 and
      momentum 0.9 are those of its section 3.
    """
    return _averaging("diloco", recipe, outer_step=0.7, outer_momentum=0.9)


def _averaging(
    name: str, recipe: Recipe, outer_step: float, outer_momentum: float
) -> Method:
    config = recipe.config.local_sgd
    given = (config.outer_step, config.outer_momentum)
    step, momentum = (
        default if value is None else value
        for value, default in zip(given, (outer_step, outer_momentum), strict=True)
    )
    core = Hsadmm(
        recipe.inner,
        groups=(),
        keep_counts={},
        parameters=HsadmmParameters(
            outer_step=step,
            outer_momentum=momentum,
            wire=recipe.wire,
        ),
        sync_period=config.sync_period,
        axes=recipe.axes,
        learning_rate=recipe.learning_rate,
    )
    return consensus_method(name, core, recipe, prunes=False)
