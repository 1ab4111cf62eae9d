"""Runs under criteria beside the norm: what they hold, compare, refuse and cut."""

import jax
import numpy as np
import pytest

import tests.helpers.tiny_network  # noqa: F401
from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.changes.transitions import hand_over, network_of
from tests.helpers.tiny_runs import settings


def experiment_of(criterion="taylor", method="hsadmm", **sparsity):
    values = settings(
        data={"batch_size": 8},
        method={"name": method},
        sparsity={
            "criterion": criterion,
            "start_share": 0.1,
            "freeze_share": 0.2,
            "shrink_share": 0.5,
            "num_stairs": 1,
            **sparsity,
        },
        run={"steps": 40},
    )
    topology = make_topology("2", devices=jax.devices()[:4])
    return make_experiment(resolve_config(values), topology)


def test_the_state_is_that_of_before_unless_gradients_are_asked_for():
    """So that checkpoints of runs that rank by the norm fit."""
    paths = {
        criterion: flatten_by_path(
            experiment_of(criterion).current.programs.abstract_state()
        )
        for criterion in ("norm", "scale", "taylor")
    }
    assert paths["scale"].keys() == paths["norm"].keys()
    assert not any("gradient_scores" in path for path in paths["norm"])
    sizes = experiment_of().channels.sizes
    more = {
        f"opt_state/channels/gradient_scores/{name}": size
        for name, size in sizes.items()
    }
    found = paths["taylor"]
    assert found.keys() - paths["norm"].keys() == more.keys()
    for path, size in more.items():
        assert found[path].shape == (2, size), "one float per channel and host"


@pytest.mark.slow
def test_a_global_budget_ranks_what_hosts_have_seen():
    experiment = experiment_of(budget="global")
    programs, sizes = experiment.current.programs, experiment.channels.sizes
    rng = np.random.default_rng(0)
    seen = {  # few strong channels in every second group
        name: np.float32(rng.exponential(size=(2, size)) ** (6 if i % 2 else 0.1))
        for i, (name, size) in enumerate(sizes.items())
    }
    state = programs.init(jax.random.key(0))
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        seen,
        state.opt_state.channels.gradient_scores,
    )
    channels = state.opt_state.channels._replace(gradient_scores=placed)
    opt_state = state.opt_state._replace(channels=channels)
    scores = jax.device_get(programs.scores(state._replace(opt_state=opt_state)))
    for name, score in scores.items():
        np.testing.assert_allclose(score, seen[name].mean(0), rtol=1e-5)
    counts = experiment.channels.budget.keep_counts_at(0.5, scores, sizes)
    assert counts != experiment.channels.keep_counts, "not the uniform ones"


@pytest.mark.slow
def test_what_gradients_said_is_left_behind_by_a_cut():
    experiment = experiment_of("taylor")
    programs = experiment.current.programs
    state = programs.init(jax.random.key(0))
    counts = tuple(sorted(experiment.channels.keep_counts.items()))
    state = programs.exchange(state, keep_counts=counts, kind="freeze")
    before = network_of(experiment, state)
    small, after, handover = hand_over(experiment, state, 20, 0.25)
    assert after.opt_state.channels.gradient_scores == {}
    wanted = small.current.programs.abstract_state()
    assert flatten_by_path(after).keys() == flatten_by_path(wanted).keys()
    assert handover.max_abs_error < 1e-5
    assert before.model != small.current.model


def test_methods_with_scores_of_their_own_refuse_another_criterion():
    with pytest.raises(UserError, match=r"criterion='taylor' is not known to .*'norm'"):
        experiment_of(method="pactrain", shrink_share=1.0)
    # What prunes nothing has no use for it, as for other settings of sparsity.
    experiment_of(method="dense", shrink_share=1.0)
