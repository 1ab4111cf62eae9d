"""Laws of H-SADMM; the equations themselves are in `consensus_reference`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import layouts_of, mask_channels
from prunex_jax.comm import Wire
from prunex_jax.methods import hsadmm
from prunex_jax.methods.hsadmm import preset, state_placements
from prunex_jax.methods.hsadmm.choose import agreed_scores
from prunex_jax.methods.hsadmm.round import Round
from prunex_jax.sparsity import project_channels
from tests.helpers.common import make_mesh
from tests.helpers.consensus_cases import (
    FINAL,
    FORMS,
    FULL,
    GROUPS,
    LEARNING_RATE,
    PLAIN,
    QUICK,
    ROUNDS,
    START,
    block,
    draw,
    history_of,
    make_core,
    run_rounds,
    targets_of,
)
from tests.helpers.consensus_reference import entry_masks, reference

# float32 against float64 over ten steps.
ROUNDING = 3e-6
# Every form at the level where it is most used, the rich ones at both.
CASES = (
    ("recommended", "gradient"),
    ("recommended", "consensus"),
    ("reset", "gradient"),
    ("leaky", "gradient"),
    ("leaky", "consensus"),
    ("flat", "consensus"),
    ("paper", "gradient"),
    ("paper", "consensus"),
    ("all", "gradient"),
    ("all", "consensus"),
    ("largest", "gradient"),
    ("largest paper", "consensus"),
    ("law", "gradient"),
    ("taylor", "gradient"),
    ("taylor leaky", "consensus"),
)
LAYOUTS = layouts_of(GROUPS, {k: v.shape for k, v in flatten_by_path(START).items()})


def assert_close(found, wanted, what, tolerance=ROUNDING):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=1e-6, err_msg=what)


def assert_same(found, wanted, what=""):
    assert_close(found, wanted, what, tolerance=0.0)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want, what)


def dead_part(tree, masks):
    """What a tree holds outside the masks; leading placement axes pass."""
    return jax.tree.map(lambda x, m: np.asarray(x) * (1 - m), tree, entry_masks(masks))


def assert_zero(tree, what):
    for leaf in jax.tree.leaves(tree):
        assert not np.any(leaf), what


@pytest.mark.parametrize(
    ("form", "level"),
    [
        # With all that a round can do; each of the others has an equation of its own.
        pytest.param(
            *case, marks=[] if case == ("all", "consensus") else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_rounds_follow_the_equations(form, level):
    shape = (2, 2)
    wanted = reference(FORMS[form], level, targets_of(shape))
    placed = state_placements(level)
    for number, (params, state) in enumerate(history_of(form, level, shape)):
        want = wanted[number]
        where = f"{form}, {level}, after round {number} {ROUNDS[number]}"
        for name, mask in want["masks"].items():
            np.testing.assert_array_equal(state.masks[name], mask, where)
        assert_close(state.global_consensus, want["z"], f"z, {where}")
        assert_close(
            (state.consensus.rho_device, state.consensus.rho_host),
            want["rho"],
            f"rho, {where}",
        )
        if state.consensus.momentum is not None:
            minus_o = jax.tree.map(np.negative, want["o"])
            assert_close(state.consensus.momentum, minus_o, f"o, {where}")
        if state.consensus.movements is not None:
            last, *cosines = state.consensus.movements
            minus_last = jax.tree.map(np.negative, want["last"])
            assert_close(last, minus_last, f"movement, {where}")
            count = 2 if FORMS[form].moving.outer == "law" else 1
            wanted_cosines = want["cosines"][:count]
            assert_close(cosines, wanted_cosines, f"cosines, {where}", 1e-5)
        for i, j in want["theta"]:
            copy = placed.inner_state
            assert_close(block(params, copy, i, j), want["theta"][i, j], where)
            trace = block(state.inner_state[0].trace, copy, i, j)
            assert_close(trace, want["b"][i, j], f"momentum, {where}", 1e-5)
            found = block(state.residuals, copy, i, j)
            assert_close(found, want["residuals"][i, j], f"residuals, {where}", 2e-5)
            found = block(state.health, copy, i, j)._asdict()
            assert_close(found, want["health"][i, j], f"health, {where}", 2e-5)
            if state.consensus.device_dual is not None:
                dual = block(state.consensus.device_dual, copy, i, j)
                assert_close(dual, want["u"][i, j], f"u, {where}")
            if state.consensus.host is not None:
                host_level = block(state.consensus.host.values, "per_host", i, j)
                assert_close(host_level, want["zi"][i], f"z_i, {where}")
                dual = block(state.consensus.host.dual, "per_host", i, j)
                assert_close(dual, want["v"][i], f"v, {where}", 1e-5)
            if state.sending.error is not None:
                error = block(state.sending.error, "per_host", i, j)
                assert_close(error, want["e"][i], f"e, {where}", 1e-5)
            if state.channels.gradient_scores is not None:
                seen = block(state.channels.gradient_scores, copy, i, j)
                assert_close(seen, want["seen"][i, j], f"scores, {where}", 1e-5)


def test_the_reference_run_exercises_what_it_should():
    """Masks shrink by choice."""
    history = history_of("all", "gradient", (2, 2))
    kept = [{n: int(m.sum()) for n, m in s.masks.items()} for _, s in history]
    assert kept == [counts for _, counts in ROUNDS]
    assert not np.all(history[-1][1].masks["a"][:4]), "chosen by position, not score"
    assert [int(s.channels.num_changed) for _, s in history] == [0, 3, 4, 0]
    assert [bool(s.channels.is_frozen) for _, s in history] == [
        False,
        False,
        True,
        True,
    ]
    final = history[-1][1]
    assert (int(final.num_steps), int(final.num_rounds)) == (8, 4)


@pytest.mark.slow
def test_another_criterion_keeps_other_channels():
    """Or the reference would say little of it."""
    forms = ("recommended", "taylor")
    kept = [history_of(form, "gradient", (2, 2))[2][1].masks for form in forms]
    assert any((kept[1][name] != mask).any() for name, mask in kept[0].items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "level"), CASES)
def test_consensus_is_zero_outside_the_masks(form, level):
    for number, (params, state) in enumerate(history_of(form, level, (2, 2))):
        where = f"dead entries are not zero after round {number}"
        assert_zero(dead_part(state.global_consensus, state.masks), f"z: {where}")
        parts = {"momentum": state.consensus.momentum, "error": state.sending.error}
        if state.consensus.host is not None:
            parts |= state.consensus.host._asdict()
        for name, part in parts.items():
            if part is not None:
                assert_zero(dead_part(part, state.masks), f"{name}: {where}")
        if state.consensus.movements is not None:
            last = dead_part(state.consensus.movements.last, state.masks)
            assert_zero(last, f"movement: {where}")
        if FORMS[form].moving.resets_copies or state.channels.is_frozen:
            assert_zero(dead_part(params, state.masks), f"copies: {where}")
            moments = state.inner_state[0].trace
            assert_zero(dead_part(moments, state.masks), f"moments: {where}")
            if state.consensus.device_dual is not None:
                assert_zero(
                    dead_part(state.consensus.device_dual, state.masks), f"u: {where}"
                )


@pytest.mark.parametrize("form", ["recommended", "leaky", "paper"])
def test_freeze_sets_every_copy_to_the_consensus_and_clears_the_duals(form):
    kinds = [kind for kind, _ in ROUNDS]
    params, state = history_of(form, "gradient", (2, 2))[kinds.index("freeze")]
    for host in range(2):
        assert_same(block(params, "per_host", host, 0), state.global_consensus)
        if state.consensus.host is not None:
            own = block(state.consensus.host.values, "per_host", host, 0)
            assert_same(own, state.global_consensus)
    host = state.consensus.host
    duals = state.consensus.device_dual, host and host.dual
    assert_zero(duals, "duals survive the freeze")


def test_duals_add_up_to_zero():
    """v over hosts everywhere; u over copies on kept channels where z_i = z."""
    for number, (_, state) in enumerate(history_of("paper", "consensus", (2, 2))):
        dual = state.consensus.host.dual
        total = jax.tree.map(lambda v: v.sum(0), dual)
        assert_close(total, jax.tree.map(np.zeros_like, total), f"v, round {number}")
        if not state.channels.is_frozen:
            assert max(np.abs(v).max() for v in jax.tree.leaves(dual)) > 0.01
    for number, (_, state) in enumerate(history_of("flat", "consensus", (2, 2))):
        total = jax.tree.map(
            lambda u, m: (u * m).sum((0, 1)), state.consensus.device_dual,
            entry_masks(state.masks),
        )  # fmt: skip
        zeros = jax.tree.map(np.zeros_like, total)
        assert_close(total, zeros, f"u, round {number}", 1e-5)


def test_hosts_with_different_scores_choose_the_same_channels():
    core = make_core()
    thetas = draw(5, (4,))

    def kept_by(core, theta):
        channels = core.init(START).channels
        this = Round(core.parameters, core.copies, LAYOUTS, FINAL)
        scores = agreed_scores(theta, START, channels, this)
        found = project_channels(
            theta, LAYOUTS, FINAL, scores=scores, alive=channels.masks
        )
        return found.keep_indices

    def choose(theta):
        kept = kept_by(core, jax.tree.map(lambda x: x[0], theta))
        return jax.tree.map(lambda x: x[None], kept)

    # Untyped, so that every host shows what it chose itself.
    run = jax.shard_map(
        choose, mesh=make_mesh(4, 1), in_specs=jax.P("host"),
        out_specs=jax.P("host"), check_vma=False,
    )  # fmt: skip
    together = jax.jit(run)(thetas)
    alone = make_core(on_mesh=False)
    for name, kept in together.items():
        assert np.all(kept == kept[:1]), f"hosts disagree on {name}"
        own = [
            kept_by(alone, jax.tree.map(lambda x, i=i: x[i], thetas))[name]
            for i in range(4)
        ]
        assert any(not np.array_equal(kept[0], k) for k in own), "hosts all agree alone"


def test_one_copy_without_pull_is_the_inner_optimizer_exactly():
    inner = optax.adam(0.01)
    core = make_core(PLAIN.replace(prox_strength=0.0), on_mesh=False, inner=inner)
    params, state = START, core.init(START)
    plain, plain_state = START, inner.init(START)
    target = draw(3)
    exchange = jax.jit(
        functools.partial(core.exchange, keep_counts=FULL), compiler_options=QUICK
    )
    for _ in range(3):
        grads = jax.tree.map(np.subtract, params, target)
        updates, state = core.local_update(grads, state, params)
        params, state = exchange(optax.apply_updates(params, updates), state)
        updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    assert_same(params, plain, "a lone copy left the path of the inner optimizer")
    assert_same(state.inner_state, plain_state)


def test_reset_after_every_plain_step_is_dense_averaging():
    core = make_core("reset", inner=optax.sgd(LEARNING_RATE), sync=SyncSchedule(1))
    targets = targets_of((4, 1))
    params, state = run_rounds(core, (4, 1), targets, [("frozen", FULL)] * 3)[-1]
    plain = START
    for _ in range(3):
        plain = jax.tree.map(
            lambda x, t: x - LEARNING_RATE * (x - t.mean((0, 1))), plain, targets
        )
    assert_close(state.global_consensus, plain, "not the mean gradient's path", 1e-6)
    assert_same(block(params, "per_host", 3, 0), state.global_consensus)


@pytest.mark.parametrize("form", ["recommended", "all"])
def test_a_round_changes_nothing_where_all_agree(form):
    """Equal feasible copies, duals zero: the round is a fixed point, bit for bit."""
    masks = {"a": np.arange(8) % 2 == 0, "b": np.arange(6) < 3}
    start = jax.tree.map(np.float32, mask_channels(START, LAYOUTS, masks))
    core = make_core(form, inner=optax.sgd(0.0))
    rounds = (("moving", FINAL),)
    params, state = run_rounds(core, (2, 2), targets_of((2, 2)), rounds, start)[0]
    assert_same(block(params, "per_host", 1, 0), start, "copies moved")
    assert_same(state.global_consensus, start, "z moved")
    assert_same(state.masks, masks, "the zero channels are not the ones removed")
    consensus = state.consensus
    duals = consensus.device_dual, consensus.host and consensus.host.dual
    assert_zero((duals, state.residuals), "not at rest")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["reset", "leaky"])
def test_no_channel_is_revived(form):
    """Growing counts do not fill up with the dead, even where theta is not zero."""
    core = make_core(form, on_mesh=False)
    exchange = jax.jit(core.exchange, compiler_options=QUICK)
    params, state = exchange(draw(3), core.init(START))
    first = state.masks
    # From now on dead channels are where the energy is.
    params = jax.tree.map(
        lambda x, m: jnp.asarray(np.where(m, x, 9.0)), params, entry_masks(first)
    )
    _, state = core.exchange(params, state, keep_counts=FULL)
    assert_same(state.masks, first, "a dead channel came back")
    assert_zero(dead_part(state.global_consensus, first), "z outside the masks")


@pytest.mark.slow
def test_frozen_round_keeps_the_masks_and_never_cuts_by_position():
    core = make_core("reset", on_mesh=False)
    six = {"a": 6, "b": 5}
    params, state = core.exchange(START, core.init(START), keep_counts=six)
    other = draw(9)
    _, same = core.exchange(other, state, keep_counts=six, kind="frozen")
    assert_same(same.masks, state.masks, "a frozen round moved the masks")
    assert int(same.channels.num_changed) == 0
    # Fewer than alive: the weakest of z go, not the last.
    strong = jax.tree.map(lambda x: x.copy(), state.global_consensus)
    weakest = np.flatnonzero(state.masks["a"])[:2]
    strong["a"]["kernel"] = strong["a"]["kernel"].at[:, weakest].mul(1e-3)
    strong["b"]["kernel"] = strong["b"]["kernel"].at[weakest].mul(1e-3)
    state = state._replace(consensus=state.consensus._replace(values=strong))
    _, fewer = core.exchange(params, state, kind="frozen")
    assert not np.any(fewer.masks["a"][weakest])
    assert int(fewer.masks["a"].sum()) == FINAL["a"]


def test_equal_data_on_the_devices_make_both_levels_equal():
    targets = targets_of((2, 2), same_on_devices=True)
    rounds = ROUNDS[1:2]
    runs = {
        level: run_rounds(make_core("leaky", level), (2, 2), targets, rounds)
        for level in ("gradient", "consensus")
    }
    for (one, one_state), (two, two_state) in zip(*runs.values(), strict=True):
        assert_close(two_state.global_consensus, one_state.global_consensus, "z")
        for i in range(2):
            for j in range(2):
                per_device = block(two, "per_device", i, j)
                assert_close(per_device, block(one, "per_host", i, j), f"copy {i, j}")


def test_reference_holds_on_a_long_mesh():
    shape = (4, 1)
    wanted = reference(FORMS["leaky"], "consensus", targets_of(shape))
    _, state = history_of("leaky", "consensus", shape)[-1]
    assert_close(state.global_consensus, wanted[-1]["z"], "z")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("wire_dtype", "error"),
    [("float16", 2e-3), ("bfloat16", 0.02), ("int8", 0.04)],
)
def test_narrow_on_the_wire_is_close_to_float32(wire_dtype, error):
    """In proportion to the steps of each format; differences to z are below 1."""
    form = preset("recommended", 2, wire=Wire(wire_dtype))
    _, narrow = run_rounds(make_core(form), (2, 2), targets_of((2, 2)))[-1]
    _, wide = history_of("recommended", "gradient", (2, 2))[-1]
    assert_same(narrow.masks, wide.masks)
    largest = max(
        np.abs(a - b).max()
        for a, b in zip(
            jax.tree.leaves(narrow.global_consensus),
            jax.tree.leaves(wide.global_consensus),
            strict=True,
        )
    )
    assert error / 50 < largest < error


def test_arguments_that_cannot_work_are_refused():
    sgd = optax.sgd(0.1)
    for match, make in (
        ("keep_counts and groups differ in b", lambda: hsadmm(sgd, GROUPS, {"a": 1})),
        ("outside", lambda: hsadmm(sgd, GROUPS, {"a": 9, "b": 1})),
        ("sync_period = 0", lambda: hsadmm(sgd, GROUPS, FINAL, sync_period=0)),
        ("sync_period=1.5 must", lambda: hsadmm(sgd, GROUPS, FINAL, sync_period=1.5)),
        ("=True must be", lambda: hsadmm(sgd, GROUPS, {"a": True, "b": 1})),
        ("freeze_round=-1 is", lambda: hsadmm(sgd, GROUPS, FINAL, freeze_round=-1)),
        ("freeze_round=0.5", lambda: hsadmm(sgd, GROUPS, FINAL, freeze_round=0.5)),
        ("device_level='host'", lambda: make_core(level="host")),
        ("learning_rate", lambda: hsadmm(sgd, GROUPS, FINAL, parameters="paper")),
        ("did you mean 'paper'", lambda: preset("papr", 4)),
        ("prox_strength=2", lambda: preset("reset", 4, prox_strength=2)),
        ("dual_decay=-1", lambda: PLAIN.replace(dual_decay=-1)),
        ("rho_device=inf", lambda: PLAIN.replace(rho_device=float("inf"))),
        ("rho_device=nan", lambda: PLAIN.replace(rho_device=float("nan"))),
        ("outer_step=0", lambda: PLAIN.replace(outer_step=0)),
        ("outer_momentum=1", lambda: PLAIN.replace(outer_momentum=1)),
        ("wire_dtype='int2'", lambda: PLAIN.replace(wire=Wire("int2"))),
        (
            "bucket_bytes=-1",
            lambda: PLAIN.replace(wire=Wire(bucket_bytes=-1)),
        ),
        ("wire_dtype='f7'", lambda: PLAIN.replace(wire=Wire("f7"))),
        ("needs rho_device", lambda: PLAIN.replace(rho_host=1.0)),
    ):
        with pytest.raises(UserError, match=match):
            make()
    with pytest.raises(UserError, match="needs params"):
        core = make_core(on_mesh=False)
        core.update(START, core.init(START))
