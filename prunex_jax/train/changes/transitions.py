"""Hands a run over in mid-run: to the small network, or to the next method.

Once the masks are frozen, dead channels are zero in everything that training reads, so
they can be cut out of parameters, moments, consensus, duals and running statistics at
once, and the run goes on as that of an ordinary smaller network: small local steps, and
exchanges without choosing or gathering. The next method starts from the network that
the last one stands for, with the inner optimizer's state where both have the same.

`loop` says when this happens; `position` keeps what a checkpoint must say of it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    named_by,
)
from prunex_jax.comm import sum_over_mesh
from prunex_jax.data import evaluation_batches
from prunex_jax.mesh import MeshAxes, axis_size, map_over, settle, specs_of, vary
from prunex_jax.shrink import Cut, Network, make_cut, shrink_error
from prunex_jax.shrink.cost import count_params
from prunex_jax.tasks import Task
from prunex_jax.train.build.experiment import (
    Experiment,
    with_method,
    with_small_network,
)
from prunex_jax.train.changes.means import shapes_of_mean
from prunex_jax.train.steps.compiled import Program
from prunex_jax.train.steps.position import Handover, RunPosition
from prunex_jax.train.steps.state import SavedRun, TrainState

# Examples on which masked and shrunk networks are compared.
_NUM_COMPARED = 64


def foresee_small(experiment: Experiment, keep_counts: Mapping[str, int]) -> Experiment:
    """Builds the run as it will go on after a cut of which only counts are known."""
    kept = {name: tuple(range(count)) for name, count in keep_counts.items()}
    return _after(experiment, Handover(0, kept, 0.0, 0.0))


def hand_over(
    experiment: Experiment,
    state: TrainState,
    step: int,
    seconds_per_step_median: float,
    *,
    foreseen: Experiment | None = None,
) -> tuple[Experiment, TrainState, Handover]:
    """Cuts the dead channels out of a run.

    Every process calls it at the same step; masks are equal on all hosts, so that all
    of them cut the same. What `foresee_small` gave, whose programs may be compiled
    already, is taken if its network is the one that is left.

    Returns:
      The run and its state with the small network, and what to keep of the event.
    Raises:
      UserError: The state has a part that cannot be cut.
    Collectives:
      Those of `programs.Programs.network`.
    """
    _, masks, error = cut_out(experiment, state)
    everything = {
        n: np.ones(size, bool) for n, size in experiment.channels.sizes.items()
    }
    kept = {
        name: tuple(np.flatnonzero(mask).tolist())
        for name, mask in {**everything, **masks}.items()
    }
    handover = Handover(step, kept, error, seconds_per_step_median)
    small = _after(experiment, handover)
    if foreseen is not None and foreseen.current.model == small.current.model:
        small = foreseen
    program = program_of("shrink", _cutter, experiment, small, masks)
    try:
        return small, program(state), handover
    except UserError as error:
        share = experiment.config.sparsity.shrink_share
        raise UserError(
            f"sparsity.shrink_share = {share:g}: dead channels cannot be cut out of "
            f"this run ({error}); set it to 1 to cut them out at the end"
        ) from error


def experiment_at(experiment: Experiment, position: RunPosition) -> Experiment:
    """Builds the run as it was when a checkpoint was saved."""
    phase = experiment.phases[position.phase]
    if phase.method != experiment.current.method.name:
        experiment = with_method(experiment, phase.method)
    if position.handover is None:
        return experiment
    return _after(experiment, position.handover)


def saved_shapes(then: Experiment, position: RunPosition) -> SavedRun:
    """Shapes, types and shardings of what a checkpoint holds, for restoring it."""
    own = None
    if then.teaching is not None and then.teaching.holds_own_after(position.step):
        own = shapes_of_mean(then)
    return SavedRun(*then.current.programs.abstract_state(), own)


def change_method(
    experiment: Experiment, state: TrainState, name: str
) -> tuple[Experiment, TrainState]:
    """Goes on with another method, from the network that the last one stands for.

    Running statistics and the step stay. The inner optimizer's state stays too, as the
    mean of the copies, where both methods have the same one; a method that keeps
    momentum elsewhere starts it from zero.

    Collectives:
      Those of `programs.Programs.network`, and a sum over the mesh of the inner state.
    """
    after = with_method(experiment, name)
    return after, program_of("change_method", _changer, experiment, after)(state)


def network_of(experiment: Experiment, state: TrainState) -> Network:
    """The network that a state stands for; host arrays.

    Collectives:
      Those of `programs.Programs.network`.
    """
    params, statistics = experiment.current.programs.network(state)
    return on_host(Network(experiment.current.model, params, statistics))


def on_host(network: Network) -> Network:
    """The network with host arrays."""
    params, statistics = jax.device_get((network.params, network.statistics))
    return Network(network.model, params, statistics)


def cut_out(
    experiment: Experiment, state: TrainState
) -> tuple[Network, dict[str, np.ndarray], float]:
    """Cuts the dead channels out of the network of a state.

    Returns:
      The small network, host arrays; the masks, bool[size] per group, {} where the
      method prunes none; and the largest difference between masked and shrunk logits.
    Collectives:
      Those of `programs.Programs.network`.
    """
    found = experiment.current.method.pruning.masks(state.opt_state)
    masks = {name: np.asarray(mask) for name, mask in found.items()}
    whole = network_of(experiment, state)
    cut = full_cut(experiment, masks)
    shrunk = whole.shrunk(cut)
    inputs = comparison_inputs(experiment.task)
    error = shrink_error(whole.masked(cut), shrunk, inputs)
    return on_host(shrunk), masks, error


def describe(experiment: Experiment, handover: Handover) -> str:
    """Says in one line what a cut has done to a run, which goes on after it."""
    params, _ = jax.eval_shape(experiment.current.model.init, jax.random.key(0))
    return (
        f"goes on with {count_params(params):,} of {experiment.num_params:,} "
        "parameters; masked and shrunk network differ by at most "
        f"{handover.max_abs_error:.1e}"
    )


def comparison_inputs(task: Task) -> PyTree:
    """Inputs that no test number depends on: from validation, or else training."""
    dataset = task.dataset
    split = dataset.validation if len(dataset.validation) else dataset.train
    rows = np.arange(min(_NUM_COMPARED, len(split)))
    with evaluation_batches(split, len(rows), rows) as batches:
        return task.objective.inputs(next(batches))


def program_of(
    name: str, build: Callable[..., Any], run: Experiment, *to: Any
) -> Program:
    """A program that takes the state of a run to that of the run after it."""
    build = functools.partial(build, run, *to)
    return Program(name, build, dict(run.mesh.shape), run.ledger, runs_once=True)


def _after(experiment: Experiment, handover: Handover) -> Experiment:
    """The run as it goes on after its cut, from settings and positions alone."""
    cut = full_cut(experiment, handover.masks(experiment.channels.sizes))
    return with_small_network(experiment, experiment.task.model.after(cut))


def full_cut(experiment: Experiment, masks: Mapping[str, np.ndarray]) -> Cut:
    """What goes from the network of a run at full width."""
    shapes = jax.eval_shape(experiment.task.model.init, jax.random.key(0))
    return make_cut(experiment.channels.trace, masks, *shapes)


def _cutter(
    before: Experiment, after: Experiment, masks: Mapping[str, np.ndarray]
) -> Callable[[TrainState], TrainState]:
    """The program that makes the state of the small network.

    Collectives:
      None; where state lies in slices, those of `Placements.whole`.
    """
    cut = full_cut(before, masks)
    places = before.current.method.placements
    small_places = after.current.method.placements
    stored, small_stored = before.current.programs.stored, after.current.programs.stored
    kept = {name: np.flatnonzero(mask) for name, mask in masks.items()}

    def group_of(path: str, leaf: jax.Array) -> str | None:
        """The group whose mask or scores a leaf is: it loses what the group loses."""
        name = named_by(path, kept)
        return name if name and leaf.shape == masks[name].shape else None

    def cut_opt_state(tree: PyTree) -> PyTree:
        # A group may have the name of a parameter, which has another shape.
        rest = map_with_path(lambda p, x: None if group_of(p, x) else x, tree)
        shaped = flatten_by_path(cut.take(rest))

        def small(path: str, leaf: jax.Array) -> jax.Array:
            name = group_of(path, leaf)
            found: jax.Array = leaf[kept[name]] if name else shaped[path]
            return found

        return map_with_path(small, tree)

    def cut_copy(state: TrainState) -> TrainState:
        state = stored.read(state)
        params = cut.take(places.whole_params(state.params))
        opt_state = cut_opt_state(places.whole(state.opt_state))
        small = state._replace(
            params=small_places.own_params(params),
            statistics=cut.take_statistics(state.statistics),
            opt_state=small_places.sliced(opt_state),
        )
        return small_stored.write(small)

    specs = specs_of(stored.placements)
    run = map_over(before.mesh, cut_copy, (specs,), specs)
    wanted = after.current.programs.abstract_state()
    return lambda state: _fitted(run(state), wanted)


def _changer(
    before: Experiment, after: Experiment
) -> Callable[[TrainState], TrainState]:
    """The program that makes the state of the next method."""
    method, next_method = before.current.method, after.current.method
    places = next_method.placements
    stored, next_stored = before.current.programs.stored, after.current.programs.stored

    def change(state: TrainState) -> TrainState:
        state = stored.read(state)
        params = method.network(state.params, state.opt_state)
        fresh = places.whole(next_method.transform.init(params))
        inner = _inner_state(
            method.inner.get(method.placements.whole(state.opt_state)),
            next_method.inner.get(fresh),
            state.step,
        )
        opt_state = places.sliced(next_method.inner.put(fresh, inner))
        changed = state._replace(params=places.own_params(params), opt_state=opt_state)
        return settle(next_stored.placements, next_stored.write(changed))

    specs, next_specs = specs_of(stored.placements), specs_of(next_stored.placements)
    return map_over(before.mesh, change, (specs,), next_specs)


def _inner_state(old: PyTree, fresh: PyTree, step: jax.Array) -> PyTree:
    """The old state, as the mean of its copies, if it fits; else a fresh one."""

    def forms(tree: PyTree) -> Any:
        return jax.tree.structure(tree), [
            (x.shape, x.dtype) for x in map(jnp.asarray, jax.tree.leaves(tree))
        ]

    if forms(old) != forms(fresh):
        # Schedules count steps, and go on.
        return optax.tree.set(fresh, count=step)
    axes = MeshAxes()
    count = axis_size(axes.names)
    total = sum_over_mesh(vary(old, axes.names), axes)
    return jax.tree.map(lambda x, like: (x / count).astype(like.dtype), total, old)


def _fitted(state: TrainState, wanted: TrainState) -> TrainState:
    """Picks the parts that the small run has; masks of the full one are left behind.

    Raises:
      UserError: A part has no counterpart of the right shape.
    """
    found = flatten_by_path(state)
    leaves = []
    for path, leaf in flatten_by_path(wanted).items():
        part = found.get(path)
        if part is None or (part.shape, part.dtype) != (leaf.shape, leaf.dtype):
            raise UserError(
                f"{path} of the small network is {leaf.dtype}{leaf.shape}, and nothing "
                "of the full one becomes that"
            )
        leaves.append(part)
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)
