"""Laws of channel rounds: what is sent is shared, and what is not stays where it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import ChannelGroup, ChannelSlice, layouts_of
from prunex_jax.comm import TopK, Wire, compact_size
from prunex_jax.mesh import ALONE, leave
from prunex_jax.methods.hsadmm import Hsadmm, HsadmmParameters
from prunex_jax.methods.hsadmm.channel_rounds import (
    groups_of_entries,
    make_channel_rounds,
)
from tests.helpers.common import MESH, make_mesh
from tests.helpers.consensus_cases import (
    AXES,
    GROUPS,
    LEARNING_RATE,
    MOMENTUM,
    QUICK,
    START,
    SYNC_PERIOD,
    block,
    draw,
    run_rounds,
    specs_for,
    targets_of,
)

SHAPES = {path: leaf.shape for path, leaf in flatten_by_path(START).items()}
DILOCO = HsadmmParameters(outer_step=0.7, outer_momentum=0.4)


def make_core(share=0.5, choice="moved", form=None, level="gradient", on_mesh=True):
    """Local SGD whose rounds send a share of the channels; None: plain rounds."""
    rounds = share and make_channel_rounds(GROUPS, SHAPES, share, choice)
    return Hsadmm(
        optax.sgd(LEARNING_RATE, MOMENTUM),
        (),
        {},
        form or HsadmmParameters(),
        SYNC_PERIOD,
        level,
        MESH if on_mesh else ALONE,
        channel_rounds=rounds,
    )


def entries(chosen):
    """What is sent, as 0/1 arrays: along the last axis; "free" is in no group."""
    a, b = np.asarray(chosen["a"]), np.asarray(chosen["b"])
    return {
        "a": {"kernel": np.broadcast_to(a, (3, 8))},
        "b": {"kernel": np.broadcast_to(b, (8, 6))},
        "free": np.ones(2, bool),
    }


def exchange_once(core, thetas, kind="frozen", **parts):
    """(params, state) after one round of copies that are there, from z = START."""
    placements, specs = specs_for(core)

    def body(thetas, parts):
        own = jax.tree.map(lambda x: x[0, 0], thetas)
        if core.device_level == "gradient":
            own = jax.lax.pmean(own, "device")
        parts = jax.tree.map(lambda x: x[0], parts)
        state = core.init(START)._replace(**parts)
        return leave(placements, core.exchange(own, state, keep_counts={}, kind=kind))

    run = jax.shard_map(
        body, mesh=make_mesh(2, 2), in_specs=(jax.P(*AXES), jax.P("host")),
        out_specs=specs,
    )  # fmt: skip
    fast = jax.jit(run, compiler_options=QUICK)
    return jax.tree.map(np.asarray, fast(thetas, parts))


def copies(seed=5):
    """Thetas of 2 hosts, the same on both devices, [2, 2, ...]."""
    return jax.tree.map(lambda x: np.stack([x, x], 1), draw(seed, (2,)))


def sent_of(state):
    """Where z has moved in a round from START; nothing moves by exactly zero."""
    return jax.tree.map(lambda z, x: np.asarray(z != x), state.global_consensus, START)


def assert_same(found, wanted, what=""):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b, what)


def assert_close(found, wanted, what="", tolerance=3e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, err_msg=what)


def reference(choice, form, level, targets, rounds):
    """Rounds in numpy, from the equations: float64, one copy after the other."""

    def tree(fn, *trees):
        return jax.tree.map(fn, *trees)

    def mean(trees):
        return tree(lambda *xs: sum(xs) / len(xs), *trees)

    z, beta = tree(np.float64, START), form.outer_momentum
    trace = tree(np.zeros_like, z)
    where = [(i, j) for i in range(2) for j in range(2)]
    theta, momentum = dict.fromkeys(where, z), dict.fromkeys(where, trace)
    history = []
    for number in range(rounds):
        for _ in range(SYNC_PERIOD):
            grads = {
                (i, j): tree(lambda x, t, i=i, j=j: x - t[i, j], theta[i, j], targets)
                for i, j in where
            }
            for i, j in where:
                g = grads[i, j]
                if level == "gradient":
                    g = mean([grads[i, 0], grads[i, 1]])
                momentum[i, j] = tree(lambda m, g: MOMENTUM * m + g, momentum[i, j], g)
                theta[i, j] = tree(
                    lambda x, m: x - LEARNING_RATE * m, theta[i, j], momentum[i, j]
                )
        hosts = [mean([theta[i, 0], theta[i, 1]]) for i in range(2)]
        moved = [tree(np.subtract, x, z) for x in hosts]
        if choice == "moved":
            scores = {
                k: sum((x[k]["kernel"] ** 2).sum(0) for x in moved) for k in ("a", "b")
            }
            chosen = {k: s >= np.sort(s)[len(s) // 2] for k, s in scores.items()}
        else:
            chosen = {"a": np.arange(8) // 4 == number % 2}
            chosen["b"] = np.arange(6) // 3 == number % 2
        sent = entries(chosen)
        d = mean(moved)
        new_trace = tree(lambda o, d: beta * o + d, trace, d)
        step = tree(lambda d, o: form.outer_step * (d + beta * o), d, new_trace)
        trace = tree(np.where, sent, new_trace, trace)
        z = tree(lambda m, z, s: np.where(m, z + s, z), sent, z, step)
        theta = {at: tree(np.where, sent, z, x) for at, x in theta.items()}
        history.append((chosen, z, trace, dict(theta)))
    return history


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("choice", "form", "level"),
    [
        ("moved", HsadmmParameters(), "gradient"),
        ("rotation", DILOCO, "gradient"),
        ("moved", DILOCO, "consensus"),
    ],
)
def test_rounds_follow_the_equations(choice, form, level):
    targets = targets_of((2, 2))
    wanted = reference(choice, form, level, targets, 3)
    core = make_core(0.5, choice, form, level)
    history = run_rounds(core, (2, 2), targets, [("frozen", {})] * 3)
    placed = {"gradient": "per_host", "consensus": "per_device"}[level]
    for number, (params, state) in enumerate(history):
        chosen, z, trace, theta = wanted[number]
        assert [int(x.sum()) for x in chosen.values()] == [4, 3]
        assert_close(state.global_consensus, z, f"z after round {number}")
        if form.outer_momentum:
            assert_close(state.outer_trace, trace, f"momentum after round {number}")
        for (i, j), own in theta.items():
            assert_close(block(params, placed, i, j), own, f"copy {i, j}, {number}")
    firsts = wanted[0][0], wanted[1][0]
    assert any(np.any(firsts[0][k] != firsts[1][k]) for k in "ab"), "always the same"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("form", "tolerance"),
    [
        (HsadmmParameters(), 1e-6),
        (HsadmmParameters(wire=Wire("int8")), 0.03),
        (HsadmmParameters(wire=Wire("int2"), error_decay=1.0), 1e-5),
        (HsadmmParameters(wire=Wire("int4"), error_decay=1.0, top=TopK(10)), 1e-5),
    ],
)
def test_what_is_sent_is_shared_and_the_rest_stays(form, tolerance):
    """Mean of theta + e = z + mean of e where sent; nothing else has changed at all."""
    thetas, parts = copies(), {}
    if form.error_decay:
        parts["error"] = draw(8, (2,))
    params, state = exchange_once(make_core(form=form), thetas, **parts)
    gaps = jax.tree.map(lambda x, z: (x[:, 0] - z).astype(np.float64), thetas, START)
    if form.error_decay:
        gaps = jax.tree.map(np.add, gaps, parts["error"])
    scores = {k: (gaps[k]["kernel"] ** 2).sum((0, 1)) for k in ("a", "b")}
    sent = entries({k: s >= np.sort(s)[len(s) // 2] for k, s in scores.items()})
    wanted = jax.tree.map(lambda gap, z: z + gap.mean(0), gaps, START)
    found = state.global_consensus
    if form.error_decay:
        found = jax.tree.map(lambda z, e: z + e.mean(0), found, state.error)
        stays = jax.tree.map(lambda m, e: e[:, ~m], sent, state.error)
        assert_same(stays, jax.tree.map(lambda m, e: e[:, ~m], sent, parts["error"]))
    else:
        assert_same(sent_of(state), sent, "z has moved elsewhere")
    inside = jax.tree.map(lambda m, x: x[m], sent, found)
    wanted = jax.tree.map(lambda m, x: x[m], sent, wanted)
    assert_close(inside, wanted, "something is lost", tolerance)
    for host in range(2):
        own = block(params, "per_host", host, 0)
        now = jax.tree.map(
            lambda m, z, x, i=host: np.where(m, z, x[i, 0]), sent,
            state.global_consensus, thetas,
        )  # fmt: skip
        assert_same(own, now, "copies are not z where sent, or have changed elsewhere")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_all_of_the_channels_are_a_plain_round_bit_for_bit(wire):
    # Without momentum: where it is fused otherwise, a multiplication rounds or not.
    form = HsadmmParameters(wire=Wire(wire))
    plain = exchange_once(make_core(None, form=form), copies())
    for choice in ("moved", "rotation"):
        found = exchange_once(make_core(1.0, choice, form), copies())
        assert_same(found, plain, choice)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_whole_round_is_a_plain_round_bit_for_bit(wire):
    form = dataclasses.replace(DILOCO, wire=Wire(wire))
    found = exchange_once(make_core(form=form), copies(), "whole")
    assert_same(found, exchange_once(make_core(None, form=form), copies()))
    params, state = found
    assert_same(block(params, "per_host", 1, 0), state.global_consensus)


def test_a_whole_round_sends_all_that_was_held_back():
    """Not even the largest numbers only, which leaves a rest in e."""
    form = HsadmmParameters(wire=Wire("int8"), error_decay=0.9, top=TopK(4))
    params, state = exchange_once(make_core(form=form), copies(), "whole")
    mean = jax.tree.map(lambda x: x.mean((0, 1)), copies())
    assert_close(state.global_consensus, mean, tolerance=0.03)
    assert_same(block(params, "per_host", 1, 0), state.global_consensus)


def test_all_hosts_choose_the_same_channels():
    core = make_core()

    def choose(theta):
        own = jax.tree.map(lambda x: x[0, 0], theta)
        sent = core.channel_rounds.choose(own, jnp.int32(0), core.axes)
        return jax.tree.map(lambda x: x[None], sent.keep_indices)

    # Untyped, so that every host shows what it chose itself.
    run = jax.shard_map(
        choose, mesh=make_mesh(4, 1), in_specs=jax.P(*AXES),
        out_specs=jax.P("host"), check_vma=False,
    )  # fmt: skip
    thetas = draw(5, (4, 1))
    together = jax.jit(run)(thetas)
    differs = []
    for name, chosen in together.items():
        assert np.all(chosen == chosen[:1]), f"hosts disagree on {name}"
        for i in range(4):
            own = jax.tree.map(lambda x, i=i: x[i, 0], thetas)
            alone = core.channel_rounds.choose(own, jnp.int32(0), ALONE)
            differs.append(not np.array_equal(alone.keep_indices[name], chosen[0]))
    assert any(differs), "hosts all agree alone"


@pytest.mark.parametrize(
    ("size", "share"), [(20, 0.25), (20, 0.3), (30, 0.1), (6, 0.4), (6, 1.0), (1, 0.1)]
)
def test_rotation_sends_every_channel_as_often(size, share):
    kernel = ChannelSlice("x", 0, np.arange(size)[:, None])
    group = ChannelGroup("g", size, (kernel,))
    rounds = make_channel_rounds([group], {"x": (size,)}, share, "rotation")
    tree = {"x": jnp.ones(size)}
    choose = jax.jit(lambda number: rounds.choose(tree, number, ALONE).keep_indices)
    count, times = rounds.counts["g"], np.zeros(size, int)
    cycle = int(np.ceil(1 / share))
    assert count == max(1, int(np.ceil(round(share * size, 6))))
    for number in range(2 * cycle):
        chosen = np.asarray(choose(number)["g"])
        assert chosen.size == len(set(chosen)) == count
        times[chosen] += 1
        assert times.max() - times.min() <= 1, "one waits while another goes again"
        if (number + 1) * count % size == 0:
            assert times.max() == times.min(), "not once per cycle"
        if number + 1 == cycle:
            assert times.min() >= 1, "a cycle has left one out"
    # After so many rounds that their product with the count does not fit.
    late = np.asarray(choose(2**31 - 1)["g"])
    wanted = ((2**31 - 1) * count + np.arange(count)) % size
    np.testing.assert_array_equal(late, np.sort(wanted))


def test_an_entry_belongs_to_one_channel():
    """Also where an axis is made of several groups, and in part of none."""
    heads, features = np.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4).T
    out = np.arange(5)[:, None]
    groups = (
        ChannelGroup(
            "head", 3, (ChannelSlice("q", 1, heads), ChannelSlice("o", 0, heads))
        ),
        ChannelGroup(
            "feature",
            4,
            (ChannelSlice("q", 1, features), ChannelSlice("o", 0, features)),
        ),
        ChannelGroup("out", 5, (ChannelSlice("o", 1, out), ChannelSlice("v", 0, out))),
        ChannelGroup("in", 2, (ChannelSlice("q", 0, np.arange(2)[:, None]),)),
    )
    shapes = {"q": (2, 14), "o": (12, 5), "v": (6,), "alone": (3,)}
    own = groups_of_entries(groups, shapes)
    assert [group.name for group in own] == ["feature", "out"]
    layouts = layouts_of(own, shapes)
    assert {path: tuple(axes) for path, axes in layouts.items()} == {
        "q": (1,), "o": (1,), "v": (0,),
    }  # fmt: skip
    half = compact_size(shapes, layouts, {"feature": 2, "out": 2})
    # 2 of 14 columns, 1 of 6 numbers and 3 more are in no group.
    assert half == 2 * (6 + 2) + 12 * 2 + (2 + 1) + 3


def test_what_cannot_work_is_refused():
    rounds = make_channel_rounds(GROUPS, SHAPES, 0.5, "moved")
    sgd = optax.sgd(0.1)
    counts = {"a": 4, "b": 3}
    for match, make in (
        ("channel_share=0.5 needs channels", lambda: make_channel_rounds(
            (), SHAPES, 0.5, "moved")),
        ("channel_share=0 must", lambda: make_channel_rounds(
            GROUPS, SHAPES, 0, "moved")),
        ("channel_choice='best'", lambda: make_channel_rounds(
            GROUPS, SHAPES, 0.5, "best")),
        ("2 channel groups to prune", lambda: Hsadmm(
            sgd, GROUPS, counts, HsadmmParameters(), channel_rounds=rounds)),
        ("dual_decay=0.5", lambda: Hsadmm(
            sgd, (), {}, HsadmmParameters(dual_decay=0.5), channel_rounds=rounds)),
        ("prox_strength=0.5", lambda: Hsadmm(
            sgd, (), {}, HsadmmParameters(prox_strength=0.5), channel_rounds=rounds)),
    ):  # fmt: skip
        with pytest.raises(UserError, match=match):
            make()
