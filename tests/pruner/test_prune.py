"""The one call: all kinds of networks, targets, criteria, rounds, states, exports."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from prunex_jax import UserError, prune, prune_iteratively, read_model
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.sparsity import Target

KEYS = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(KEYS[0], (48, 6))
LABELS = (X[:, 0] > 0).astype(jnp.int32)
TREE = {
    "in": jax.random.normal(KEYS[1], (6, 32)),
    "mid": jax.random.normal(KEYS[2], (32, 16)) / 4,
    "out": jax.random.normal(KEYS[3], (16, 3)) / 4,
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def apply(params, x):
    return jnp.tanh(jnp.tanh(x @ params["in"]) @ params["mid"]) @ params["out"]


def apply_with_statistics(params, statistics, x):
    mean, var = statistics["mean"][None], statistics["var"][None]
    h = (x @ params["in"] - mean) / jnp.sqrt(var + 1e-5)
    return jnp.tanh(jnp.tanh(h) @ params["mid"]) @ params["out"]


STATISTICS = {"mean": X.mean(0) @ TREE["in"], "var": jnp.var(X @ TREE["in"], 0)}


def kept(small):
    return {name: int(mask.sum()) for name, mask in small.cut.masks.items()}


def masked_answers(small, *inputs):
    """Of the whole network with zeros: what the small one must answer."""
    full = small.full
    running = () if full.statistics is None else (full.statistics,)
    return full.apply(small.cut.put(small.params), *running, *inputs)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(6, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x)))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(32, kernel_init=init)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(nn.relu(x))


def linen():
    return LinenNet(), LinenNet().init(KEYS[4], X), X


NETWORKS = {
    "function": lambda: (apply, TREE, X),
    "nnx": lambda: (NnxNet(nnx.Rngs(0)), X),
    "linen": linen,
    "equinox": lambda: (eqx.nn.MLP(6, 3, 32, 1, key=KEYS[4]), X),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_networks_of_all_kinds_become_small(kind):
    network, *given = NETWORKS[kind]()
    small = prune(network, *given, sparsity=0.5)
    assert small.certificate.is_equal
    before, after = small.num_params
    assert after < 0.6 * before
    np.testing.assert_allclose(small(X), masked_answers(small, X), atol=1e-5)
    # Other batch sizes, gradients: it is a function like any other.
    trees = (small.params, *(() if small.statistics is None else (small.statistics,)))
    grads = jax.grad(lambda p: small.apply(p, *trees[1:], X[:5]).sum())(small.params)
    assert jax.tree.structure(grads) == jax.tree.structure(small.params)


def test_several_inputs_and_statistics():
    def two(params, statistics, x, mask):
        return apply_with_statistics(params, statistics, x) * mask

    mask = jnp.ones((48, 1))
    batches = [((X, mask), LABELS)]
    small = prune(
        *(two, TREE, X, mask),
        statistics=STATISTICS,
        sparsity=0.5,
        criterion="taylor",
        loss=cross_entropy,
        batches=batches,
        repair=True,
    )
    assert small.statistics["mean"].shape == (16,)
    np.testing.assert_allclose(
        small(X, mask), masked_answers(small, X, mask), atol=1e-5
    )


@pytest.mark.parametrize("budget", ["uniform", "global"])
@pytest.mark.parametrize("unit", ["params", "macs", "bytes"])
def test_what_remains_is_at_most_the_share(unit, budget):
    small = prune(apply, TREE, X, budget=budget, **{unit: 0.6})
    before, after = small.macs if unit == "macs" else small.num_params
    assert after <= 0.6 * before
    # One step of 8 channels more of any group is too much, or that group is whole.
    if budget == "uniform":
        sizes = {group.name: group.size for group in small.trace.groups}
        more = {n: min(c + 8, sizes[n]) for n, c in kept(small).items()}
        larger = prune(apply, TREE, X, keep=more)
        assert (larger.macs if unit == "macs" else larger.num_params)[1] > 0.6 * before


def test_latency_is_measured_and_amounts_are_targets():
    assert kept(prune(apply, TREE, X, latency=1.0)) == {"in": 32, "mid": 16}
    amount = prune(apply, TREE, X, target=Target("params", at_most=400))
    assert amount.num_params[1] <= 400


def test_a_table_says_what_groups_keep():
    assert kept(prune(apply, TREE, X, keep={"in": 5, "*": 0.5})) == {"in": 5, "mid": 8}
    assert kept(prune(apply, TREE, X, keep={"mid": 8})) == {"in": 32, "mid": 8}


def test_criteria_rank_by_what_they_say():
    """Channels that the loss does not see go first; those without weight, by norm."""
    unseen = np.arange(32) % 2 == 0
    tree = {**TREE, "mid": TREE["mid"].at[unseen].set(0.0)}
    given = {"loss": cross_entropy, "batches": [(X, LABELS), (-X, LABELS)]}
    for criterion in ("taylor", "fisher"):
        small = prune(
            apply, tree, X, keep={"in": 16}, criterion=criterion, check=False, **given
        )
        assert not small.cut.masks["in"][unseen].any(), criterion
    large = {**TREE, "in": TREE["in"].at[:, unseen].set(0), "mid": tree["mid"]}
    small = prune(apply, large, X, keep={"in": 16})
    assert not small.cut.masks["in"][unseen].any()
    own = prune(
        *(apply, TREE, X),
        keep={"in": 16},
        criterion=lambda params, trace: {
            g.name: np.arange(g.size) for g in trace.groups
        },
    )
    assert own.cut.masks["in"].tolist() == (np.arange(32) >= 16).tolist()


def test_random_scores_follow_the_seed():
    one, same, other = (
        prune(apply, TREE, X, sparsity=0.5, criterion="random", seed=seed)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one.cut.masks["in"], same.cut.masks["in"])
    assert (one.cut.masks["in"] != other.cut.masks["in"]).any()


def test_gradient_scores_are_those_of_the_loss():
    """First order: |<theta, g>| is what the loss changes by, along the way to zero."""
    from prunex_jax.pruner.networks import full_network
    from prunex_jax.pruner.ranking import scores_of

    full = full_network(apply, (TREE, X), None)
    small = prune(apply, TREE, X, sparsity=0.5)
    arguments = (full, TREE, None, small.trace, cross_entropy, [(X, LABELS)], 0)
    taylor, fisher = (scores_of(name, *arguments) for name in ("taylor", "fisher"))

    def loss(share, channel):
        tree = {**TREE, "mid": TREE["mid"].at[channel].mul(share)}
        tree["in"] = TREE["in"].at[:, channel].mul(share)
        return cross_entropy(apply(tree, X), LABELS).mean()

    for channel in (0, 7):
        slope = float(jax.grad(loss)(1.0, channel))
        np.testing.assert_allclose(taylor["in"][channel], abs(slope), rtol=1e-4)
        np.testing.assert_allclose(fisher["in"][channel], slope**2 / 2, rtol=1e-3)


def test_repair_is_nearer_to_the_whole_network():
    whole = apply(TREE, X)
    errors = [
        float(
            jnp.abs(
                prune(apply, TREE, X, sparsity=0.5, repair=repair)(X) - whole
            ).mean()
        )
        for repair in (False, True)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_rounds_go_on_with_what_training_made():
    found = []
    for small in prune_iteratively(apply, TREE, X, rounds=3, sparsity=0.75, round_to=1):
        found.append(small)
        small.params = jax.tree.map(lambda w: 2.0 * w, small.params)
    once = prune(apply, TREE, X, sparsity=0.75, round_to=1)
    assert kept(found[-1]) == kept(once)
    for before, after in itertools.pairwise(found):
        for name, mask in after.cut.masks.items():
            assert not (mask & ~before.cut.masks[name]).any()
    # Of a norm that training has only scaled, the same channels are best.
    np.testing.assert_array_equal(found[-1].cut.masks["in"], once.cut.masks["in"])
    one = found[-1].cut.take(TREE)["out"]
    np.testing.assert_allclose(found[-1].params["out"], 8 * one, rtol=1e-6)
    before, after = found[-1].num_params
    assert before == sum(leaf.size for leaf in jax.tree.leaves(TREE))


@pytest.mark.parametrize(
    "make",
    [
        optax.adam,
        optax.adamw,
        optax.lion,
        optax.rmsprop,
        lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
        optax.contrib.schedule_free_adamw,
    ],
    ids="adam adamw lion rmsprop nesterov chain schedule_free".split(),
)
def test_states_of_optimizers_go_on(make):
    tx = make(1e-2)
    _, state = jax.jit(tx.update)(TREE, tx.init(TREE), TREE)
    small = prune(apply, TREE, X, sparsity=0.5)
    moved = small.optimizer_state(tx, state)
    fresh = tx.init(small.params)
    assert jax.tree.structure(moved) == jax.tree.structure(fresh)
    assert jax.tree.map(np.shape, moved) == jax.tree.map(np.shape, fresh)
    updates, _ = jax.jit(tx.update)(small.cut.take(TREE), moved, small.params)
    assert jax.tree.structure(updates) == jax.tree.structure(small.params)
    # Of what an earlier round has left, too.
    smaller = prune(apply, TREE, X, sparsity=0.75, after=small)
    again = smaller.optimizer_state(tx, moved)
    at_once = smaller.optimizer_state(tx, state)
    for one, other in zip(*map(jax.tree.leaves, (again, at_once)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda rate: optax.adafactor(rate, min_dim_size_to_factor=2), "v_row"),
        (optax.sm3, "mu"),
        (optax.lbfgs, "memory"),
    ],
    ids="adafactor sm3 lbfgs".split(),
)
def test_states_that_are_not_shaped_like_parameters_are_begun_anew(make, name):
    tx = make(1e-2)
    state = tx.init(TREE)
    small = prune(apply, TREE, X, sparsity=0.5)
    with pytest.raises(UserError, match=f"{name}.*anew=True"):
        small.optimizer_state(tx, state)
    moved = small.optimizer_state(tx, state, anew=True)
    fresh = tx.init(small.params)
    assert jax.tree.map(np.shape, moved) == jax.tree.map(np.shape, fresh)
    assert jax.tree.structure(small.optimizer_state(tx)) == jax.tree.structure(fresh)
    with pytest.raises(UserError, match="another optimizer"):
        small.optimizer_state(optax.sgd(0.1), state)


@pytest.mark.parametrize("has_statistics", [False, True])
def test_exports_compute_the_same(tmp_path, has_statistics):
    function = apply_with_statistics if has_statistics else apply
    statistics = STATISTICS if has_statistics else None
    small = prune(function, TREE, X, statistics=statistics, sparsity=0.5)
    small.export(tmp_path / "small")
    np.testing.assert_allclose(read_model(tmp_path / "small")(X[:3]), small(X[:3]))


def test_narrow_types_are_certified_in_float32():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TREE)
    small = prune(apply, narrow, X.astype(jnp.bfloat16), sparsity=0.5)
    assert small.certificate.forward_error < 1e-5
    assert {x.dtype for x in jax.tree.leaves(small.params)} == {jnp.dtype("bfloat16")}


def test_the_summary_says_what_is_left():
    text = str(prune(apply, TREE, X, sparsity=0.5))
    assert "in       16 of 32 channels" in text
    assert "248 of 752 (0.330) parameters" in text
    assert "masked and small network differ by at most" in text


def test_what_differs_is_refused_unless_it_is_meant():
    def normed(params, x):
        h = x @ params["in"]
        h = h / jnp.mean(jnp.abs(h), -1, keepdims=True)
        return h @ params["mid"]

    tree = {"in": TREE["in"], "mid": TREE["mid"]}
    exact = prune(normed, tree, X, sparsity=0.5)
    assert exact.certificate.is_equal
    meant = prune(normed, tree, X, sparsity=0.5, renormalise=True)
    assert not meant.certificate.is_equal
    assert flatten_by_path(meant.params)["in"].shape == (6, 16)


REFUSED = {
    "nothing": ({}, "nothing says how small"),
    "two": ({"sparsity": 0.5, "macs": 0.5}, "sparsity and macs both say"),
    "all": ({"sparsity": 1.0}, r"sparsity=1 is outside \[0, 1\)"),
    "more": ({"macs": 1.5}, r"macs=1.5 is outside \(0, 1\].*at_most"),
    "tree": ({"params": TREE}, "params=dict.* given by position"),
    "unreachable": ({"macs": 0.001}, "out of reach"),
    "criterion": ({"sparsity": 0.5, "criterion": "tailor"}, "'tailor' is unknown"),
    "loss": ({"sparsity": 0.5, "criterion": "taylor"}, "there is no loss"),
    "group": ({"keep": {"mod": 4}}, "keep={'mod': ...} is for no .*'mid'"),
    "count": ({"keep": {"mid": 17}}, "17} says nothing of group mid of 16"),
    "table": ({"keep": {"mid": 4}, "budget": "global"}, "leave out budget"),
    "budget": ({"sparsity": 0.5, "budget": "all"}, "not one of uniform, global"),
    "exclude": ({"sparsity": 0.5, "exclude": ["mod"]}, "'mod' matches no"),
    "progress": ({"sparsity": 0.5, "progress": 0.0}, "progress=0 is outside"),
    "scores": (
        {"sparsity": 0.5, "criterion": lambda params, trace: {"in": np.ones(3)}},
        r"group 'in' with shape \(3,\), and it should be \(32,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_clear_is_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        prune(apply, TREE, X, **options)


def test_networks_without_what_they_need_are_refused():
    with pytest.raises(UserError, match="no inputs behind the parameters"):
        prune(apply, TREE, sparsity=0.5)
    with pytest.raises(UserError, match="is no network"):
        prune(3, TREE, X, sparsity=0.5)
    with pytest.raises(UserError, match="statistics= is for functions"):
        prune(NnxNet(nnx.Rngs(0)), X, statistics={}, sparsity=0.5)
    with pytest.raises(UserError, match="no params, but kernel"):
        prune(LinenNet(), {"kernel": X}, X, sparsity=0.5)
    with pytest.raises(UserError, match="nothing of this network can be removed"):
        prune(lambda w, x: jnp.sort(x @ w), TREE["in"], X, sparsity=0.5)
    with pytest.raises(TypeError, match=r"no argument 'factor'.*factors"):
        prune(apply, TREE, X, sparsity=0.5, factor="all")
    with pytest.raises(UserError, match="rounds=0"):
        next(prune_iteratively(apply, TREE, X, rounds=0, sparsity=0.5))
