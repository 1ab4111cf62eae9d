"""Refits what reads removed channels to those that stay, in mid-run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, sum_over_mesh
from prunex_jax.mesh import MeshAxes, map_over, specs_of, vary
from prunex_jax.shrink import Cut, repair
from prunex_jax.shrink.cost import first_kept
from prunex_jax.tasks import Batch
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.changes.transitions import full_cut, program_of
from prunex_jax.train.steps.programs import mean_statistics
from prunex_jax.train.steps.state import TrainState

_AXES = MeshAxes()
_BATCH = jax.P(_AXES.names)


def repaired(
    experiment: Experiment, before: tuple[PyTree, PyTree], state: TrainState, step: int
) -> TrainState:
    """Moves a network that has just lost channels to where it reads the rest best.

    What the round before has left is refitted, as it was with all channels and as it is
    without; the difference is added to the network and to all copies of it.

    Collectives:
      Sums over the mesh as `shrink.repair` says, and of the running statistics.
    """
    found = experiment.current.method.pruning.masks(state.opt_state)
    masks = {name: np.asarray(mask) for name, mask in found.items()}
    cut = full_cut(experiment, masks)
    program = program_of("repair", _repairer, experiment, cut)
    count = experiment.config.sparsity.repair_batches
    with experiment.batches(step) as batches:
        looked_at = tuple(itertools.islice(batches, count))
    changed: TrainState = program(state, *before, looked_at)
    return changed


def repairs(experiment: Experiment) -> bool:
    """Whether a run refits what reads channels when its method removes them."""
    is_asked = experiment.config.sparsity.repair_batches > 0
    return is_asked and experiment.current.method.pruning.moved is not None


def sent_by_repair(
    experiment: Experiment, keep_counts: Mapping[str, int]
) -> list[Collective]:
    """What a repair sends that leaves so many channels, by its trace."""
    network = jax.eval_shape(experiment.current.model.init, jax.random.key(0))
    cut = first_kept(experiment.channels.trace, keep_counts, *network)
    batches = (experiment.batch_shapes(),) * experiment.config.sparsity.repair_batches
    state = experiment.current.programs.abstract_state()
    program = program_of("repair", _repairer, experiment, cut)
    return program.collectives(state, *network, batches)


def _repairer(run: Experiment, cut: Cut) -> Callable[..., TrainState]:
    """The program that does it."""
    current, objective = run.current, run.task.objective
    stored, method = current.programs.stored, current.method
    model = current.model.in_float32()

    def total(sums: PyTree) -> PyTree:
        return sum_over_mesh(sums, _AXES)

    def fn(
        state: TrainState, params: PyTree, statistics: PyTree, batches: Sequence[Batch]
    ) -> TrainState:
        state = stored.read(state)
        parts = [objective.inputs(batch) for batch in batches]
        inputs = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
        if jax.tree.leaves(statistics):  # A mean of networks has none of its own.
            seen = model.reestimate(params, statistics, inputs, jnp.int32(0))
            statistics = mean_statistics(vary(seen, _AXES.names))
        fitted = repair(
            model.apply, params, cut, inputs, statistics=statistics, total=total
        )
        change = optax.tree.sub(fitted, cut.mask(params))
        places = method.placements
        own = change if places.slicing is None else places.slicing.take(change)
        assert method.pruning.moved is not None, "checked with the settings"
        after = state._replace(
            params=optax.tree.add(state.params, places.own_params(change)),
            opt_state=method.pruning.moved(state.opt_state, own),
        )
        return stored.write(after)

    specs: Any = specs_of(stored.placements)
    return map_over(run.mesh, fn, (specs, jax.P(), jax.P(), _BATCH), specs)
