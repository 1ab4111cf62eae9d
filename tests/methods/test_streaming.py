"""Streaming rounds: laws of fragments that are sent beside steps and applied later."""

import jax
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.comm import Wire, wire_bytes
from prunex_jax.mesh import leave, vary
from prunex_jax.methods import make_method, method_config
from prunex_jax.methods.hsadmm import HsadmmParameters, preset
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.hsadmm.streaming import Streaming, fragments_of
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.method import RoundsConfig
from tests.helpers.common import make_mesh
from tests.helpers.consensus_cases import (
    AXES,
    FINAL,
    FULL,
    LEARNING_RATE,
    MOMENTUM,
    QUICK,
    START,
    block,
    make_core,
    quadratic,
    run_rounds,
    specs_for,
    targets_of,
)
from tests.helpers.consensus_reference import entry_masks
from tests.helpers.formulas.methods import formulas_of
from tests.methods import test_contract as contract

PERIOD, NUM_STEPS, SHAPE = 4, 10, (2, 2)
SYNC = SyncSchedule(PERIOD)
# Largest leaf first, each to the smallest fragment.
FRAGMENTS = {
    1: (("a/kernel", "b/kernel", "free"),),
    2: (("b/kernel",), ("a/kernel", "free")),
    3: (("b/kernel",), ("a/kernel",), ("free",)),
}
FORM = HsadmmParameters().replace(outer_step=0.8, outer_momentum=0.4)
# Streaming, level, and whether half of the channels are gone: at the end of a step,
# or beside it.
CASES = {
    "no delay": (Streaming(SYNC, 2, 0, 0.0), "gradient", True),
    "beside a step": (Streaming(SYNC, 3, 1, 0.5), "consensus", False),
    "beside a step of few channels": (Streaming(SYNC, 3, 1, 0.25), "gradient", True),
}


def run_steps(core, is_pruned, num_steps=NUM_STEPS, held=0.0):
    """(params, state) after a freeze, every step, and a last whole round.

    Hosts begin with errors of so much.
    """
    placements, specs = specs_for(core)
    counts = FINAL if is_pruned else FULL

    def body(start, target):
        target = jax.tree.map(lambda t: t[0, 0], target)
        params, state = core.copies.spread(start), core.init(start)
        kind = "freeze" if is_pruned else "frozen"
        params, state = core.exchange(params, state, keep_counts=counts, kind=kind)
        error = jax.tree.map(lambda x: x + held, state.sending.error)
        state = state._replace(sending=state.sending._replace(error=error))
        history = [leave(placements, (params, state))]
        for step in range(num_steps):
            grads = jax.grad(quadratic)(vary(params, AXES), target)
            updates, state = core.update(
                grads, state, params, sync=False, keep_counts=counts,
                **core.streaming.options_in(step),
            )  # fmt: skip
            params = optax.apply_updates(params, updates)
            history.append(leave(placements, (params, state)))
        last = core.exchange(params, state, keep_counts=counts, kind="frozen")
        return [*history, leave(placements, last)]

    run = jax.shard_map(
        body,
        mesh=make_mesh(*SHAPE),
        in_specs=(jax.P(), jax.P(*AXES)),
        out_specs=[specs] * (num_steps + 2),
    )
    fast = jax.jit(run, compiler_options=QUICK)
    return jax.tree.map(np.asarray, fast(START, targets_of(SHAPE)))


def streaming_core(streaming, level="gradient", form=FORM):
    return make_core(form, level, sync=SYNC, streaming=streaming)


def by_path(tree):
    return {k: np.asarray(v, np.float64) for k, v in flatten_by_path(tree).items()}


def hosts_mean(tree):
    """The mean over the leading axis of hosts, in float64, by path."""
    return {path: leaf.mean(0) for path, leaf in by_path(tree).items()}


class Reference:
    """Streaming DiLoCo in plain numpy, float64, with loops over copies and leaves."""

    def __init__(self, streaming, level, masks):
        self.streaming, self.masks = streaming, by_path(entry_masks(masks))
        self.is_consensus = level == "consensus"
        self.ij = [(i, j) for i in range(SHAPE[0]) for j in range(SHAPE[1])]
        self.z = {p: x * self.masks[p] for p, x in by_path(START).items()}
        self.o = {p: np.zeros_like(x) for p, x in self.z.items()}
        self.theta = {c: {p: x.copy() for p, x in self.z.items()} for c in self.ij}
        self.b = {c: {p: np.zeros_like(x) for p, x in self.z.items()} for c in self.ij}
        self.flights = {}  # fragment -> (step from which on it is due, means)
        self.steps_done = 0

    def sent(self, paths):
        thetas = self.theta.values()
        return {p: sum(t[p] - self.z[p] for t in thetas) / len(thetas) for p in paths}

    def apply(self, means, mixing):
        for p, mean in means.items():
            self.o[p] = 0.4 * self.o[p] + mean
            self.z[p] = self.z[p] + 0.8 * (mean + 0.4 * self.o[p])
            for theta in self.theta.values():
                theta[p] = mixing * theta[p] + (1 - mixing) * self.z[p]

    def local_steps(self, targets):
        """Gradients of the quadratic problem; momentum; dead entries stay zero."""
        grads = {}
        for i, j in self.ij:
            target = by_path(block(targets, "per_device", i, j))
            grads[i, j] = {p: x - target[p] for p, x in self.theta[i, j].items()}
        if not self.is_consensus:
            for i in range(SHAPE[0]):
                own = [grads[i, j] for j in range(SHAPE[1])]
                mean = {p: sum(g[p] for g in own) / len(own) for p in self.z}
                grads |= {(i, j): mean for j in range(SHAPE[1])}
        for copy in self.ij:
            for p, grad in grads[copy].items():
                step = MOMENTUM * self.b[copy][p] + grad * self.masks[p]
                self.b[copy][p] = step
                self.theta[copy][p] = self.theta[copy][p] - LEARNING_RATE * step

    def step(self, targets):
        s, done = self.streaming, self.steps_done
        fragments = FRAGMENTS[s.num_fragments]
        if s.delay:
            self.send(fragments, done)
        self.local_steps(targets)
        self.steps_done = done = done + 1
        if not s.delay:
            self.send(fragments, done)
        for number, (due, _) in list(self.flights.items()):
            if due == done:
                self.apply(self.flights.pop(number)[1], s.mixing)

    def send(self, fragments, done):
        for number, paths in enumerate(fragments):
            offset = (number + 1) * PERIOD // len(fragments)
            if done and (done - offset) % PERIOD == 0:
                self.flights[number] = done + self.streaming.delay, self.sent(paths)

    def finish(self):
        for _, means in self.flights.values():
            self.apply(means, self.streaming.mixing)
        self.apply(self.sent(self.z), 0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_fragments_follow_the_equations(case):
    streaming, level, is_pruned = CASES[case]
    core = streaming_core(streaming, level)
    history, targets = run_steps(core, is_pruned), targets_of(SHAPE)
    wanted = Reference(streaming, level, history[0][1].masks)
    for number, (params, state) in enumerate(history):
        if 0 < number <= NUM_STEPS:
            wanted.step(targets)
        elif number:
            wanted.finish()
        for path, leaf in by_path(state.global_consensus).items():
            where = f"z of {path}, step {number}"
            np.testing.assert_allclose(leaf, wanted.z[path], atol=3e-6, err_msg=where)
        for copy in wanted.ij:
            found = by_path(block(params, "per_host" if level == "gradient" else
                                  "per_device", *copy))  # fmt: skip
            for path, leaf in found.items():
                np.testing.assert_allclose(
                    leaf, wanted.theta[copy][path], atol=3e-6,
                    err_msg=f"copy {copy} of {path}, step {number}",
                )  # fmt: skip
    last, state = history[-1]
    z = by_path(state.global_consensus)
    for path, copies in by_path(last).items():
        assert np.all(copies == z[path]), "the last round leaves copies apart"


@pytest.mark.slow
def test_the_last_fragment_is_sent_as_whole_rounds_are():
    """Leaves do not interact here, so they go as without streaming."""
    core = streaming_core(Streaming(SYNC, 2, 0, 0.0))
    found = run_steps(core, is_pruned=False, num_steps=2 * PERIOD)
    whole = make_core(FORM, sync=SYNC)
    rounds = run_rounds(whole, SHAPE, targets_of(SHAPE), [("frozen", FULL)] * 2)
    for number, (_, state) in enumerate(rounds, 1):
        z = flatten_by_path(state.global_consensus)
        streamed = flatten_by_path(found[number * PERIOD][1].global_consensus)
        for path in FRAGMENTS[2][1]:
            np.testing.assert_allclose(streamed[path], z[path], atol=1e-6)
        assert np.abs(streamed["b/kernel"] - z["b/kernel"]).max() > 1e-3


@pytest.mark.slow
def test_what_narrow_formats_round_away_is_sent_later():
    """z and what hosts still hold add up to what copies were when they were sent."""
    streaming = Streaming(SYNC, 2, delay=1, mixing=0.5)
    form = HsadmmParameters().replace(wire=Wire("int4"), error_decay=1.0)
    core = streaming_core(streaming, form=form)
    history = run_steps(core, is_pruned=False, held=0.01)
    # Right after a whole round, copies have nothing to send that would be applied.
    for path, holds in by_path(history[1][1].sending.error).items():
        np.testing.assert_allclose(holds, 0.01, err_msg=f"{path} gives away its error")
    landed = []
    for step in range(1, NUM_STEPS + 1):
        options = streaming.options_in(step - 1)
        if "sends" not in options or step == streaming.delay:
            continue
        landed.append(options["sends"])
        (params, before), (_, after) = history[step - streaming.delay], history[step]
        thetas, held = hosts_mean(params), hosts_mean(before.sending.error)
        z, holds = by_path(after.global_consensus), hosts_mean(after.sending.error)
        for path in FRAGMENTS[2][landed[-1]]:
            wanted = thetas[path] + held[path]
            np.testing.assert_allclose(z[path] + holds[path], wanted, atol=1e-5)
            assert np.abs(holds[path]).max() > 1e-4, "nothing was rounded away"
    assert landed == [0, 1, 0, 1]
    # The last round: all that is left is sent.
    (params, state), (_, last) = history[-2:]
    thetas, held = hosts_mean(params), hosts_mean(state.sending.error)
    ends, holds = by_path(last.global_consensus), hosts_mean(last.sending.error)
    for path, mean in thetas.items():
        wanted = mean + held[path]
        np.testing.assert_allclose(ends[path] + holds[path], wanted, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("level", "wire", "rounds"),
    [
        ("consensus", "int8", {}),
        ("gradient", "int2", {"top_k": 40}),
        ("gradient", "float32", {"delay": 1}),
        ("gradient", "int8", {"top_k": 40, "delay": 1}),
    ],
)
def test_formula_bytes_of_fragments_are_traced_bytes(level, wire, rounds):
    config = method_config(
        "hsadmm",
        hsadmm=HsadmmConfig(sync_period=PERIOD, device_level=level),
        rounds=RoundsConfig(fragments=3, **rounds),
        wire_dtype=wire,
    )
    contract.check_formula_bytes(contract.Runner(config, (2, 2)))


def test_a_step_sends_a_fragment_of_the_bytes_of_a_round():
    """And once in a period each: together as much as a whole round."""

    def method_of(**rounds):
        config = method_config(
            "local_sgd",
            local_sgd=LocalSgdConfig(sync_period=PERIOD),
            rounds=RoundsConfig(**rounds),
        )
        recipe = contract.recipe_of(config)
        return make_method(recipe), formulas_of(recipe)

    mesh_shape = {"host": 2, "device": 1}
    (whole, in_rounds), (parts, in_steps) = method_of(), method_of(fragments=2, delay=1)
    exchange = wire_bytes(in_rounds.exchange(mesh_shape, FULL, "frozen"), mesh_shape)
    steps = [
        wire_bytes(in_steps.step(mesh_shape, **parts.step_options.at(step)), mesh_shape)
        for step in range(PERIOD)
    ]
    sent = [step["host"] for step in steps]
    assert sum(sent) == exchange["host"]
    # 48 of 74 numbers are one array.
    assert max(sent) == exchange["host"] * 48 / 74
    assert parts.payload.elements(FULL) == 48 and whole.payload.elements(FULL) == 74


def test_what_is_beside_a_step_does_not_wait_for_its_gradients():
    """The sum over hosts may begin at once: no number of it depends on a gradient."""

    def is_poisoned(delay):
        core = streaming_core(Streaming(SYNC, 1, delay, 0.5))
        placements, specs = specs_for(core)

        def step(start):
            params, state = core.copies.spread(start), core.init(start)
            # Copies have moved since the last whole round, so that a mean is applied.
            state = state._replace(num_steps=state.num_steps + 1)
            grads = jax.tree.map(lambda x: x * np.float32("nan"), params)
            _, state = core.update(
                vary(grads, AXES), state, params, sync=False, keep_counts=FULL,
                sends=0,
            )  # fmt: skip
            return leave(placements[1], state)

        run = jax.shard_map(
            step, mesh=make_mesh(*SHAPE), in_specs=jax.P(), out_specs=specs[1]
        )
        state = jax.jit(run, compiler_options=QUICK)(START)
        z = jax.tree.leaves(state.global_consensus)
        return any(np.isnan(leaf).any() for leaf in z)

    assert is_poisoned(0) and not is_poisoned(1)


def test_fragments_are_balanced():
    shapes = {f"block{i}/kernel": (3, 3, 8, 8 + i) for i in range(9)}
    shapes |= {f"block{i}/scale": (8,) for i in range(9)}
    found = fragments_of(shapes, 4)
    assert sorted(sum(found, ())) == sorted(shapes), "every leaf once"
    totals = [sum(int(np.prod(shapes[p])) for p in paths) for paths in found]
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    assert max(totals) - min(totals) <= largest


@pytest.mark.parametrize(
    ("rounds", "match"),
    [
        ({"fragments": 5}, "fragments=5 is more than sync_period=4"),
        ({"delay": 2}, r"delay=2 must lie in \[0, 1\]"),
        ({"mixing": 0.5}, "mixing=0.5 is for streaming"),
        ({"fragments": 4}, "fragments=4 is more than the 3 arrays"),
    ],
)
def test_what_has_no_room_in_a_period_is_refused(rounds, match):
    config = method_config(
        "local_sgd",
        local_sgd=LocalSgdConfig(sync_period=PERIOD),
        rounds=RoundsConfig(**rounds),
    )
    with pytest.raises(UserError, match=match):
        make_method(contract.recipe_of(config))


@pytest.mark.parametrize("name", ["leaky", "paper"])
def test_forms_with_duals_are_refused(name):
    with pytest.raises(UserError, match="needs whole rounds"):
        streaming_core(Streaming(SYNC, 2), form=preset(name, PERIOD))
