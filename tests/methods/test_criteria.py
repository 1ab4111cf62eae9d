"""H-SADMM with criteria beside the norm; `test_hsadmm` holds them to the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import layouts_of, mask_channels
from prunex_jax.methods.hsadmm import HsadmmParameters
from prunex_jax.methods.hsadmm.choose import agreed_scores, network_scores
from prunex_jax.methods.hsadmm.round import Round
from prunex_jax.methods.hsadmm.streaming import Streaming
from prunex_jax.sparsity import project_channels
from tests.helpers.common import make_mesh
from tests.helpers.consensus_cases import (
    FINAL,
    FORMS,
    FULL,
    GROUPS,
    QUICK,
    ROUNDS,
    SIZES,
    START,
    block,
    draw,
    make_core,
    run_rounds,
    targets_of,
)

LAYOUTS = layouts_of(GROUPS, {k: v.shape for k, v in flatten_by_path(START).items()})
CRITERIA = ("taylor", "scale")


def form_of(criterion, **changes):
    return HsadmmParameters().replace(criterion=criterion, **changes)


def seen_by_copies(shape):
    """Scores of gradients, [hosts, devices, size] per group."""
    rng = np.random.default_rng(0)
    return {
        name: rng.exponential(size=(*shape, size)).astype(np.float32)
        for name, size in SIZES.items()
    }


def assert_equal(found, wanted, what=""):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want, what)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("criterion", "level"), [("taylor", "gradient"), ("taylor", "consensus")]
)
def test_devices_with_the_same_data_change_nothing(criterion, level):
    """2x1 and 2x2: scores and masks are those of the hosts."""
    targets = targets_of((2, 2), same_on_devices=True)
    of_one = jax.tree.map(lambda t: t[:, :1], targets)
    core = make_core(form_of(criterion), level)
    rounds = ROUNDS[1:3]
    _, one = run_rounds(core, (2, 1), of_one, rounds)[-1]
    _, two = run_rounds(core, (2, 2), targets, rounds)[-1]
    assert_equal(two.masks, one.masks)
    placed = "per_host" if level == "gradient" else "per_device"
    for i in range(2):
        wanted = block(one.channels.gradient_scores, placed, i, 0)
        found = block(two.channels.gradient_scores, placed, i, 1)
        for name, score in wanted.items():
            np.testing.assert_allclose(found[name], score, rtol=1e-5, err_msg=name)
    hosts = [block(two.channels.gradient_scores, placed, i, 0)["a"] for i in range(2)]
    assert not np.allclose(*hosts), "hosts see the same"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    ("level", "shape"), [("gradient", (4, 1)), ("consensus", (2, 2))]
)
def test_copies_that_see_other_things_keep_the_same(criterion, level, shape):
    core = make_core(form_of(criterion), level)
    thetas, seen = draw(5, shape[:1]), seen_by_copies(shape)

    def choose(theta, seen):
        channels = core.init(START).channels
        if channels.gradient_scores is not None:
            own = jax.tree.map(lambda x: x[0, 0], seen)
            channels = channels._replace(gradient_scores=own)
        theta = jax.tree.map(lambda x: x[0], theta)
        this = Round(core.parameters, core.copies, LAYOUTS, FINAL)
        scores = agreed_scores(theta, START, channels, this)
        found = project_channels(theta, LAYOUTS, FINAL, scores=scores)
        of_z = network_scores(START, channels, LAYOUTS, core.copies, criterion)
        return jax.tree.map(lambda x: x[None, None], (found.keep_indices, scores, of_z))

    # Untyped, so that every device shows what it found itself.
    everywhere = jax.P("host", "device")
    run = jax.shard_map(
        choose, mesh=make_mesh(*shape), in_specs=(jax.P("host"), everywhere),
        out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    kept, scores, of_z = jax.jit(run, compiler_options=QUICK)(thetas, seen)
    for name in SIZES:
        for found in (kept[name], scores[name], of_z[name]):
            assert np.all(found == found[:1, :1]), f"copies disagree on {name}"
        best = np.argsort(-scores[name][0, 0], kind="stable")[: FINAL[name]]
        np.testing.assert_array_equal(kept[name][0, 0], np.sort(best))
        if criterion == "taylor":
            of_hosts = seen[name].mean(1)
            np.testing.assert_allclose(scores[name][0, 0], of_hosts.sum(0), rtol=1e-5)
            np.testing.assert_allclose(of_z[name][0, 0], of_hosts.mean(0), rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_frozen_round_keeps_the_masks(criterion):
    """Whatever gradients say; and with fewer counts, the weakest of z go."""
    core = make_core(form_of(criterion), on_mesh=False)
    params, state = core.exchange(START, core.init(START), keep_counts=FULL)
    masks = {"a": np.arange(8) >= 2, "b": np.arange(6) >= 1}
    z = mask_channels(state.global_consensus, LAYOUTS, masks)
    channels = state.channels._replace(masks=masks)
    if channels.gradient_scores is not None:  # the living look worst
        worst = {n: jnp.where(m, 0.0, 9.0) for n, m in masks.items()}
        channels = channels._replace(gradient_scores=worst)
    consensus = state.consensus._replace(values=z)
    state = state._replace(channels=channels, consensus=consensus)
    counts = {"a": 6, "b": 5}
    for kind in ("frozen", "moving"):
        _, after = core.exchange(params, state, keep_counts=counts, kind=kind)
        assert_equal(after.masks, masks, f"a dead channel came back, {kind}")
    wanted = project_channels(z, LAYOUTS, FINAL, alive=masks).masks
    _, fewer = core.exchange(params, state, keep_counts=FINAL, kind="frozen")
    assert_equal(fewer.masks, wanted, "not the weakest")


@pytest.mark.parametrize("criterion", ["norm", *CRITERIA])
def test_the_state_holds_one_number_per_channel_where_it_must(criterion):
    """Nothing otherwise, so that older checkpoints fit."""
    state = make_core(form_of(criterion), on_mesh=False).init(START)
    if criterion in ("norm", "scale"):
        assert state.channels.gradient_scores is None
        assert "gradient_scores" not in str(flatten_by_path(state).keys())
    else:
        scores = state.channels.gradient_scores
        shapes = {name: x.shape for name, x in scores.items()}
        assert shapes == {name: (size,) for name, size in SIZES.items()}
        assert all(x.dtype == jnp.float32 for x in scores.values())


def test_streaming_counts_every_step_once():
    """Steps that send and steps that do not add to the same mean."""
    streaming = Streaming(SyncSchedule(2), num_fragments=2, delay=1)
    cores = [
        make_core(form_of("taylor"), on_mesh=False, streaming=given)
        for given in (None, streaming)
    ]
    target, ends = draw(3), []
    for core in cores:
        params, state = START, core.init(START)
        for step in range(4):
            grads = jax.tree.map(np.subtract, START, target)
            options = {} if core is cores[0] else streaming.options_in(step)
            _, state = core.update(
                grads, state, params, sync=False, keep_counts=FULL, **options
            )
        assert int(state.num_steps) == 4
        ends.append(state.channels.gradient_scores)
    for name, score in ends[0].items():
        np.testing.assert_allclose(ends[1][name], score, rtol=1e-6, err_msg=name)
        assert score.max() > 0


def test_criteria_that_are_none_are_refused():
    with pytest.raises(UserError, match="'loss' is not one of norm, taylor, scale"):
        form_of("loss")
    assert {form.choosing.criterion for form in FORMS.values()} >= {"taylor"}
