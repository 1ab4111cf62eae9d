"""What every method promises.

`ROWS` are settings for a small problem: each method in its forms, wires crossed with
one method. The variants of the table are held to their formulas, too.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import layouts_of
from prunex_jax.comm import FORMATS, Slicing, compact_size, wire_bytes
from prunex_jax.mesh import ALONE
from prunex_jax.methods import (
    METHODS,
    Recipe,
    all_variants,
    config_of,
    make_method,
    method_config,
)
from prunex_jax.methods.dense import DenseConfig
from prunex_jax.methods.dgc import DgcConfig
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.importance import ImportanceConfig
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.method import RoundsConfig
from prunex_jax.methods.pactrain import PactrainConfig
from prunex_jax.methods.powersgd import PowersgdConfig
from prunex_jax.methods.topk import TopkConfig
from prunex_jax.tasks import Classification
from prunex_jax.train.steps.compiled import Ledger
from prunex_jax.train.steps.programs import Programs
from tests.helpers.common import make_mesh
from tests.helpers.consensus_cases import (
    AXES,
    FINAL,
    FULL,
    GROUPS,
    START,
    draw,
)
from tests.helpers.consensus_reference import entry_masks
from tests.helpers.formulas.methods import formulas_of


def _hsadmm(wire_dtype="float32", bucket_bytes=0, rounds=None, **settings):
    return method_config(
        "hsadmm",
        hsadmm=HsadmmConfig(sync_period=2, **settings),
        rounds=rounds or RoundsConfig(),
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
    )


ROWS = {
    "dense": method_config("dense"),
    "dense flat": method_config("dense", dense=DenseConfig(levels="flat")),
    "none": method_config("none"),
    "local_sgd": method_config("local_sgd", local_sgd=LocalSgdConfig(sync_period=2)),
    # With 0.9, swinging in takes longer than these few rounds.
    "diloco": method_config(
        "diloco", local_sgd=LocalSgdConfig(sync_period=2, outer_momentum=0.6)
    ),
    "hsadmm": _hsadmm(),
    "hsadmm per device": _hsadmm(device_level="consensus"),
    "hsadmm reset float16": _hsadmm(preset="reset", wire_dtype="float16"),
    "hsadmm bfloat16": _hsadmm(wire_dtype="bfloat16", bucket_bytes=1),
    "hsadmm int8": _hsadmm(wire_dtype="int8"),
    "hsadmm int4": _hsadmm(wire_dtype="int4"),
    "hsadmm leaky": _hsadmm(preset="leaky"),
    "hsadmm leaky per device": _hsadmm(preset="leaky", device_level="consensus"),
    "hsadmm paper": _hsadmm(preset="paper"),
    "hsadmm paper per device": _hsadmm(preset="paper", device_level="consensus"),
}
ROWS |= {"hsadmm taylor": _hsadmm()}
# What rows are made from beside the settings of their method.
RECIPES = {"hsadmm taylor": {"criterion": "taylor"}}
# What is not sent, or is rounded away, is sent later.
ROWS |= {
    "dense int2": method_config("dense", wire_dtype="int2"),
    "dense int4 with error": method_config(
        "dense", dense=DenseConfig(error_decay=1.0), wire_dtype="int4"
    ),
    "local_sgd int2": method_config(
        "local_sgd",
        local_sgd=LocalSgdConfig(sync_period=2),
        wire_dtype="int2",
        rounds=RoundsConfig(error_decay=1.0),
    ),
    "diloco by law int8": method_config(
        "diloco",
        local_sgd=LocalSgdConfig(sync_period=2),
        rounds=RoundsConfig(outer="law"),
        wire_dtype="int8",
    ),
    "hsadmm int4 with error": _hsadmm(
        wire_dtype="int4", rounds=RoundsConfig(error_decay=1.0)
    ),
    "hsadmm top_k": _hsadmm(rounds=RoundsConfig(top_k=40)),
    "hsadmm top_k int2 per device": _hsadmm(
        device_level="consensus", wire_dtype="int2", rounds=RoundsConfig(top_k=40)
    ),
    "hsadmm top_k leaky": _hsadmm(preset="leaky", rounds=RoundsConfig(top_k=40)),
    "hsadmm top_k owners int8": _hsadmm(
        wire_dtype="int8", rounds=RoundsConfig(top_k=40, top_k_route="owners")
    ),
}
ROWS |= {
    "powersgd rank 1": method_config(
        "powersgd", powersgd=PowersgdConfig(rank=1, min_gain=0.0)
    ),
    "powersgd rank 2": method_config(
        "powersgd", powersgd=PowersgdConfig(rank=2, min_gain=1.2)
    ),
}
ROWS |= {
    "topk": method_config("topk", topk=TopkConfig(density=0.5)),
    "topk int8": method_config("topk", topk=TopkConfig(density=0.5), wire_dtype="int8"),
    "dgc": method_config("dgc", dgc=DgcConfig(density=0.5)),
}
ROWS |= {
    "topk chunks": method_config("topk", topk=TopkConfig(density=0.01, in_chunks=True)),
    "topk chunks int2": method_config(
        "topk", topk=TopkConfig(density=0.01, in_chunks=True), wire_dtype="int2"
    ),
    "dgc chunks int8": method_config(
        "dgc", dgc=DgcConfig(density=0.01, in_chunks=True), wire_dtype="int8"
    ),
}
# Of one kernel a part is sent, of the other everything.
ROWS |= {
    "topk one kernel whole": method_config(
        "topk", topk=TopkConfig(density=0.5), send_whole=("b/",)
    ),
    "dgc one kernel whole": method_config(
        "dgc", dgc=DgcConfig(density=0.5), send_whole=("b/",)
    ),
    "powersgd one kernel whole": method_config(
        "powersgd", powersgd=PowersgdConfig(rank=1, min_gain=0.0), send_whole=("b/",)
    ),
    "importance one kernel whole": method_config(
        "importance", importance=ImportanceConfig(density=0.6), send_whole=("b/",)
    ),
}
ROWS |= {
    "importance": method_config(
        "importance", importance=ImportanceConfig(density=0.6, refresh_period=3)
    ),
    "importance two choosers": method_config(
        "importance",
        importance=ImportanceConfig(density=0.4, num_choosers=2, damping=9.0),
    ),
    "importance ring": method_config(
        "importance", importance=ImportanceConfig(density=0.6, all_reduce="ring")
    ),
    "pactrain": method_config("pactrain"),
    "pactrain magnitude": method_config(
        "pactrain",
        pactrain=PactrainConfig(score="magnitude", stable_steps=0),
    ),
    "pactrain weights": method_config(
        "pactrain", pactrain=PactrainConfig(structure="weights", density=0.3)
    ),
    "pactrain ternary": method_config(
        "pactrain", pactrain=PactrainConfig(is_ternary=True)
    ),
}
# Settings under which a method must do what `dense` does, with plain SGD inside.
LIMITS = {
    f"{name}, all of it whole": method_config(
        name, topk=TopkConfig(0.01), dgc=DgcConfig(0.01), send_whole=("kernel", "free")
    )
    for name in ("topk", "dgc", "powersgd", "importance")
}
LIMITS |= {
    "topk": method_config("topk", topk=TopkConfig(density=1.0)),
    "topk chunks": method_config("topk", topk=TopkConfig(1.0, in_chunks=True)),
    "dgc": method_config("dgc", dgc=DgcConfig(density=1.0)),
    "importance": method_config(
        "importance", importance=ImportanceConfig(density=1.0, all_reduce="ring")
    ),
    "pactrain": method_config(
        "pactrain", pactrain=PactrainConfig(structure="weights", density=1.0)
    ),
    "powersgd": method_config(
        "powersgd", powersgd=PowersgdConfig(rank=99, min_gain=0.0)
    ),
    "local_sgd": method_config("local_sgd", local_sgd=LocalSgdConfig(sync_period=1)),
}


def variant_rows():
    """The variants of all registered methods."""
    return {variant.name: config_of(variant) for variant in all_variants()}


KINDS = ("moving", "freeze", "frozen")


SHAPES = {path: leaf.shape for path, leaf in flatten_by_path(START).items()}
LEARNING_RATE = 0.2
# Length of the run that methods are told: it decides their `step_options`.
TOTAL_STEPS = 40


def _targets(num_devices, seed=7):
    """A strong half of the channels, and a wish of every device's own."""
    strong = entry_masks({"a": np.arange(8) % 2 == 0, "b": np.arange(6) < 3})
    return jax.tree.map(
        lambda t, m, own: np.float32((0.05 + 2 * m) * np.sign(t) + 0.3 * own),
        draw(seed), strong, draw(seed + 1, (num_devices,)),
    )  # fmt: skip


class Problem(NamedTuple):
    """The quadratic problem as a network that answers with the gaps to a wish."""

    is_random = False

    def init(self, key):
        del key
        return jax.tree.map(jnp.asarray, START), {}

    def apply_train(self, params, statistics, wishes, axis_name=None, key=None):
        del axis_name, key
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])
        return flat[None] - wishes, statistics


class HalfSquare(Classification):
    """A loss whose gradient is the gap; one row per device."""

    def loss(self, outputs, batch):
        del batch
        return jnp.sum(outputs**2) / 2


class Runner:
    """A method on a mesh, in the trainer's own programs."""

    def __init__(self, row, shape, shard="none", param_dtype="float32", **recipe):
        self.shape = shape
        config = ROWS[row] if isinstance(row, str) else row
        slicing = None if shard == "none" else Slicing(SHAPES, shape[1])
        made_from = recipe_of(config, **recipe)
        self.method = make_method(made_from, slicing, shard)
        self.formulas = formulas_of(made_from, slicing, shard, param_dtype)
        self.ledger = Ledger()
        self.programs = Programs(
            Problem(), self.method, make_mesh(*shape), self.ledger,
            layouts={}, objective=HalfSquare(), param_dtype=param_dtype,
        )  # fmt: skip

    def init(self):
        return self.programs.init(jax.random.key(0))

    def prepare(self, batch):
        """A state for the first step of the method."""
        if self.method.preparation is None:
            return self.init()
        batches = (batch,) * self.method.preparation.num_batches
        return self.programs.prepare(self.init(), batches)

    def step(self, state, batch):
        return self.programs.local_step(state, batch)[0]

    def exchange(self, state, kind, counts):
        counts = tuple(sorted(counts.items()))
        return self.programs.exchange(state, keep_counts=counts, kind=kind)

    def sent_by_step(self, **options):
        """What a step sends, from its trace."""
        state = self.programs.abstract_state()
        batch = batch_of(_targets(self.shape[0] * self.shape[1]))
        return self.programs.local_step.collectives(state, batch, **options)

    def sent_by_exchange(self, kind, counts):
        counts, state = tuple(sorted(counts.items())), self.programs.abstract_state()
        return self.programs.exchange.collectives(state, keep_counts=counts, kind=kind)

    def round(self, state, batch, kind, counts):
        state = jax.tree.map(jnp.copy, state)  # the trainer's programs take theirs over
        for _ in range(self.method.sync.period if self.method.sync else 2):
            state = self.step(state, batch)
        if self.method.rounds is None:
            return state
        return self.exchange(state, kind, counts)


def format_of(row):
    """How the values of a row cross hosts."""
    config = ROWS[row]
    is_ternary = config.name == "pactrain" and config.pactrain.is_ternary
    return "ternary" if is_ternary else config.wire_dtype


def recipe_of(config, **changes):
    plain = {"optimizer": OptimizerConfig(momentum=0.0, weight_decay=0.0)}
    return Recipe(
        config=config,
        inner=optax.sgd(LEARNING_RATE),  # as `plain`
        learning_rate=optax.constant_schedule(LEARNING_RATE),
        groups=GROUPS,
        keep_counts=FINAL,
        shapes=SHAPES,
        total_steps=TOTAL_STEPS,
        **(plain | changes),
    )


def batch_of(targets):
    """One example for every device: where it would like its copy to be."""
    leaves = [t.reshape(len(t), -1) for t in jax.tree.leaves(targets)]
    rows = np.concatenate(leaves, axis=1)
    return {"image": rows, "label": np.zeros(len(rows), np.int32)}


@functools.cache
def runner_of(row, shape=(2, 2)):
    return Runner(row, shape, **RECIPES.get(row, {}))


def train(runner, targets):
    """Dense until settled, then sparse; all kinds of rounds."""
    state = runner.prepare(targets)
    schedule = [("frozen", FULL)] * 8 + [("moving", FINAL)] * 2
    schedule += [("freeze", FINAL)] + [("frozen", FINAL)] * 8
    for kind, counts in schedule:
        # One round at a time: with many programs waiting, devices that outnumber the
        # cores can keep each other from the threads that a sum needs.
        state = jax.block_until_ready(runner.round(state, targets, kind, counts))
    return state


@functools.cache
def trained(row):
    runner = runner_of(row)
    return train(runner, batch_of(_targets(4)))


def options_of(method, opt_state):
    """Every combination of options in a run, and none at all."""
    found = [{}]
    if method.step_options.early is not None:
        found.append(method.step_options.early(opt_state))
    for step in range(TOTAL_STEPS):
        options = method.step_options.at(step)
        if options not in found:
            found.append(options)
    return found


def pairs_of(found, wanted):
    return zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)


def assert_same(found, wanted, what):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b, what)


def test_every_method_has_a_row():
    assert {config.name for config in ROWS.values()} == set(METHODS)
    with pytest.raises(UserError, match="did you mean 'hsadmm'"):
        make_method(Recipe(method_config("hsadm"), None, None, (), {}, {}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", ROWS)
def test_finds_the_best_feasible_point(row):
    """Hosts want different things, but agree on which channels matter."""
    runner = runner_of(row)
    state = trained(row)
    # Without exchanges every host goes its own way; that of the first is shown.
    seen = 2 if ROWS[row].name == "none" else 4
    mean = jax.tree.map(lambda t: t[:seen].mean(0), _targets(4))
    masks = runner.method.pruning.masks(state.opt_state)
    if runner.method.preparation is not None:
        alive = runner.prepare(batch_of(_targets(4))).params
        pairs = pairs_of(alive, state.params)
        assert all(np.all((x != 0) == (y != 0)) for x, y in pairs)
        mean = jax.tree.map(lambda t, x: np.where(x != 0, t, 0), mean, alive)
    elif masks:
        wanted = {"a": np.arange(8) % 2 == 0, "b": np.arange(6) < 3}
        if row in RECIPES:  # Gradients vanish at the best point, and say nothing there.
            counts = {name: int(mask.sum()) for name, mask in masks.items()}
            assert counts == {name: int(mask.sum()) for name, mask in wanted.items()}
            wanted = {name: np.asarray(mask) for name, mask in masks.items()}
        assert_same(masks, wanted, "not the strong channels")
        mean = jax.tree.map(np.multiply, mean, entry_masks(wanted))
    found, _ = runner.programs.network(state)
    # Where hosts disagree, what is drawn, or sent later, goes on being noise.
    noise = {"ternary": 0.15, "int4": 0.06, "int2": 0.5}
    tolerance = noise.get(format_of(row), 0.02)
    for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(leaf, want, atol=tolerance)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS)
def test_one_trace_serves_all_calls_and_types_never_change(row):
    runner = runner_of(row)
    state = trained(row)
    before = runner.ledger.num_compilations
    targets = batch_of(_targets(4, seed=20))

    def kinds_of(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves]

    fresh = runner.init()
    for kind in KINDS:
        after = runner.round(state, targets, kind, FINAL)
        assert kinds_of(after) == kinds_of(state) == kinds_of(fresh)
        state = after
    assert runner.ledger.num_compilations == before, "a second call compiled again"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS)
def test_a_restored_state_continues_identically(row):
    runner = runner_of(row)
    state = trained(row)
    saved = jax.tree.map(np.asarray, state)
    restored = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), saved, state)
    targets = batch_of(_targets(4, seed=30))
    for kind in ("frozen", "moving"):
        state = runner.round(state, targets, kind, FINAL)
        restored = runner.round(restored, targets, kind, FINAL)
    assert_same(restored, state, "something is not in the state")


@pytest.mark.sampled(32)
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("row", ROWS)
def test_formula_bytes_are_traced_bytes(row, shape):
    check_formula_bytes(runner_of(row, shape))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", variant_rows())
def test_formula_bytes_of_every_variant_of_the_table(variant):
    """At the settings of studies and tables; the rows above are for a small problem."""
    check_formula_bytes(Runner(variant_rows()[variant], (2, 4)))


@pytest.mark.parametrize("criterion", ["taylor", "scale"])
@pytest.mark.parametrize(
    "config",
    [
        _hsadmm(preset="paper", device_level="consensus"),
        _hsadmm(rounds=RoundsConfig(top_k=40, fragments=2, delay=1)),
    ],
    ids=["per device", "top_k, streaming"],
)
def test_formula_bytes_of_criteria(config, criterion):
    """Scores of gradients are one number per channel, also over devices."""
    check_formula_bytes(Runner(config, (2, 4), criterion=criterion))


def check_formula_bytes(runner):
    """Holds the formulas of a method against the traces of its programs."""
    method, shape = runner.method, runner.shape
    mesh_shape = dict(zip(AXES, shape, strict=True))
    pairs = []
    # No step has been counted yet.
    nothing = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), runner.programs.abstract_state().opt_state
    )
    for options in options_of(method, nothing):
        formula = runner.formulas.step(mesh_shape, **options)
        pairs.append((runner.sent_by_step(**options), formula))
    if method.rounds is not None:
        for kind in KINDS:
            formula = runner.formulas.exchange(mesh_shape, FINAL, kind)
            pairs.append((runner.sent_by_exchange(kind, FINAL), formula))
    for listed, formula in pairs:
        found = wire_bytes(listed, mesh_shape)
        assert found == wire_bytes(formula, mesh_shape)
        assert shape[0] > 1 or found["host"] == 0, "a single host sends to itself"
        assert shape[1] > 1 or found["device"] == 0


@pytest.mark.sampled(30)
@pytest.mark.parametrize("row", ROWS)
def test_payload_is_what_the_largest_message_carries(row):
    """Each of four devices carries a quarter of the payload, rounded up.

    In narrow formats, to whole blocks for every host.
    """
    runner = runner_of(row, (2, 4))
    method = runner.method
    counts = FINAL if method.pruning.in_rounds else FULL
    elements = method.payload.elements(counts)
    if top_k := ROWS[row].rounds.top_k:
        assert elements == top_k, "one chunk"
    elif method.pruning.in_rounds:
        layouts = layouts_of(GROUPS, SHAPES)
        assert elements == compact_size(SHAPES, layouts, counts)
    if method.rounds is None:
        listed = runner.sent_by_step()
    else:
        listed = runner.sent_by_exchange("frozen", counts)
    sent = [c for c in listed if "host" in c.axes]
    if not elements:
        assert not sent
        return
    # Positions aside.
    values = [c for c in sent if c.dtype not in ("int32", "uint8")]
    # In so small a network, what is sent whole beside the largest may be more.
    largest = values[0] if top_k else max(values, key=lambda c: c.num_elements)
    # A ring over two hosts cuts every share in two; over both axes, nobody shares.
    parts = 8 if largest.kind == "shift" else 4 if largest.axes == ("host",) else 1
    of_integers = dict.fromkeys(("int8", "int4", "int2", "ternary"), "int8")
    carriers = {"float32": "float32", **of_integers}
    carrier = carriers.get(format_of(row), "uint16")
    assert largest.dtype == carrier
    if format_of(row) in ("float32", "ternary"):
        assert largest.num_elements == -(-elements // parts)
    elif largest.kind == "gather":  # few entries: cut anywhere, blocks are whole here
        payload = method.payload.bytes_of(elements)
        itemsize = np.dtype(carrier).itemsize
        assert largest.num_elements == -(-payload // itemsize // parts)
    else:
        several = ROWS[row].bucket_bytes > 0
        num_messages = sum(c.kind == largest.kind for c in values) if several else 1
        carried = parts * largest.payload_bytes
        block_bytes = FORMATS[format_of(row)].block_bytes
        room = 8 * block_bytes
        assert carried % block_bytes == 0
        assert 0 <= num_messages * carried - method.payload.num_bytes(counts)
        assert carried - method.payload.num_bytes(counts) < room


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", ROWS)
def test_health_is_scalar_and_finite(row):
    runner = runner_of(row)

    report = runner.programs.report(trained(row))
    for name, value in flatten_by_path(report.health).items():
        assert value.shape == () and np.isfinite(value), name


@pytest.mark.parametrize("name", METHODS)
def test_arguments_for_other_transforms_pass(name):
    """In a chain, every transform is given the extra arguments of all."""
    method = make_method(
        dataclasses.replace(recipe_of(method_config(name)), axes=ALONE)
    )

    def update(params):
        state = method.transform.init(params)
        more = {"value": jnp.zeros(()), "unheard_of": None}
        return method.transform.update(params, state, params, **more)

    updates, _ = jax.eval_shape(update, START)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, START)


def test_dense_is_the_same_on_every_mesh():
    """The same four batches on 1x4, 2x2 and 4x1: equal to rounding."""
    ends = []
    for shape in ((1, 4), (2, 2), (4, 1)):
        runner = runner_of("dense", shape)
        state, targets = runner.init(), batch_of(_targets(4))
        for _ in range(5):
            state = runner.step(state, targets)
        ends.append(runner.programs.network(state)[0])
    for end in ends[1:]:
        for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(ends[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("name", LIMITS)
def test_in_the_limit_a_method_is_dense(name, shape):
    ends = []
    for row in ("dense", LIMITS[name]):
        runner = runner_of(row, shape)
        state, targets = runner.init(), batch_of(_targets(4))
        for _ in range(5):
            for _ in range(runner.method.sync.period if runner.method.sync else 1):
                state = runner.step(state, targets)
            if runner.method.rounds is not None:
                state = runner.exchange(state, "frozen", FULL)
        ends.append(runner.programs.network(state)[0])
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
