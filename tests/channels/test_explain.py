"""Why channels stay, and what users freeze, merge, teach and renormalise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from prunex_jax.base.errors import UserError
from prunex_jax.channels import Traced, freeze_all, trace_channels
from prunex_jax.shrink import make_cut
from tests.helpers.channel_checks import assert_exact, draw, members_of, random_masks

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]


def different(h):
    """Dead channels have values that are finite, and known while running only."""
    return h + jnp.arange(8.0)[None]


# Uses that tie a channel to its position, to others, or to a number of them.
UNKNOWN = {
    "cumsum": lambda h, x: jnp.cumsum(h + 1, axis=1),
    "cumprod": lambda h, x: jnp.cumprod(h, axis=1),
    "cummax": lambda h, x: lax.cummax(h, axis=1),
    "cumlogsumexp": lambda h, x: lax.cumlogsumexp(h, axis=1),
    "sort": lambda h, x: jnp.sort(h, axis=1),
    "top_k": lambda h, x: lax.top_k(h, 3)[0],
    "fft": lambda h, x: jnp.fft.fft(h).real,
    "cholesky": lambda h, x: jnp.linalg.cholesky(h.T @ h / 9 + jnp.eye(8))[:4],
    "argmax": lambda h, x: h * (jnp.argmax(h, 1) == 2)[:, None],
    "argmin": lambda h, x: h * jnp.argmin(h, 1)[:, None].astype(jnp.float32),
    "gather": lambda h, x: jnp.take_along_axis(h, jnp.argsort(x, axis=1), axis=1),
    "dynamic_slice": lambda h, x: lax.dynamic_slice(h, (0, x.argmax()), (4, 3)),
    "dynamic_update_slice": lambda h, x: lax.dynamic_update_slice(
        h, h[:, :3], (0, x.argmax())
    ),
    "scatter": lambda h, x: h.at[:, x.argmax()].set(1.0),
    "scatter-add": lambda h, x: h.at[:, x.argmax() + jnp.arange(2)].add(1.0),
    "scatter-mul": lambda h, x: h.at[:, x.argmax()].multiply(2.0, unique_indices=True),
    "reduce_max": lambda h, x: different(h).max(1, keepdims=True),
    "reduce_prod": lambda h, x: different(h).prod(1, keepdims=True),
    "reduce_and": lambda h, x: jnp.all(different(h) > 0.5, 1, keepdims=True).astype(
        jnp.float32
    ),
    "reduce_window_sum": lambda h, x: lax.reduce_window(
        h, 0.0, lax.add, (1, 2), (1, 1), "VALID"
    ),
    "reduce_sum": lambda h, x: different(h).sum(1, keepdims=True),
    "dot_general": lambda h, x: jnp.sin(different(h) @ jnp.ones((8, 3)) + x),
    "unstack": lambda h, x: sum(jnp.unstack(h, axis=1)[:3])[:, None],
    "pad": lambda h, x: lax.pad(h, 0.0, ((0, 0, 0), (0, 0, 1))),
    "conv_general_dilated": lambda h, x: lax.conv(
        h[:, None], jnp.ones((1, 1, 3)), (1,), "SAME"
    )[:, 0],
    "debug_callback": lambda h, x: (jax.debug.callback(print_sum, h), h)[1],
}


def print_sum(h):
    assert h.shape == (4, 8)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_mixes_channels_freezes_them_and_says_so(name):
    f = UNKNOWN[name]

    def apply(p, x):
        return f(x @ p["a"], x) @ p["b"] + jnp.tanh(x @ p["c"]) @ p["d"]

    width = jax.eval_shape(f, jax.ShapeDtypeStruct((4, 8), jnp.float32), X).shape[1]
    params = draw({"a": (3, 8), "b": (width, 2), "c": (3, 5), "d": (5, 2)})
    trace = assert_exact(apply, params, X, densities=[0.5])
    assert members_of(trace) == {"c": (5, [("c", 1, 1), ("d", 0, 1)])}
    reason = trace.explain("a").splitlines()[1]
    if name == "unstack" and not hasattr(lax, "unstack_p"):  # older jax splits
        assert reason.startswith("a axis 1 (8), positions 0: stays; split: ")
    else:
        assert reason.startswith(f"a axis 1 (8): stays; {name}: ")
    assert f"at {__file__}:" in reason


def test_a_channel_read_alone_stays_and_the_others_go():
    def apply(p, x):
        h = jnp.tanh(x @ p["a"])
        return h @ p["b"] + h[:, 3][:, None]

    trace = trace_channels(apply, draw({"a": (3, 8), "b": (8, 2)}), X)
    (group,) = trace.groups
    assert group.members[0].positions.ravel().tolist() == [0, 1, 2, 4, 5, 6, 7]
    lines = trace.explain("a").splitlines()
    assert lines[1] == "a axis 1 (8), positions 0-2 and 4-7: group a, 7 channels"
    assert lines[2].startswith("a axis 1 (8), positions 3: stays; slice: leaves one ")
    assert "; together with b axis 0" in lines[2]


def test_parameters_that_are_results_or_unused_or_tiny_stay():
    def apply(p, x):
        return x @ p["a"] @ p["b"], p["c"], p["one"] * p["number"] * p["count"]

    shapes = {"a": (3, 4), "b": (4, 2), "c": (5, 4), "unused": (4, 0), "one": (4, 1)}
    params = {**draw(shapes), "number": 2.5, "count": jnp.arange(4)[:, None]}
    trace = assert_exact(apply, params, X)
    assert members_of(trace) == {"a": (4, [("a", 1, 1), ("b", 0, 1)])}
    assert trace.explain("c").splitlines() == [
        "c axis 0 (5): stays; is an output of the function",
        "c axis 1 (4): stays; is an output of the function",
    ]
    assert trace.explain("unused").splitlines() == [
        "unused axis 0 (4): stays; is not used",
        "unused axis 1 (0): is empty",
    ]
    assert "one axis 1 (1): stays; has length 1" in trace.explain("one")
    assert trace.explain("number") == "number: stays; is a single number"
    with pytest.raises(UserError, match="no parameter 'd'; there are a, b, c"):
        trace.explain("d")


def test_explain_names_every_axis_of_every_parameter_once():
    def apply(p, x):
        both = jnp.concatenate([x @ p["a"], lax.top_k(x @ p["b"], 4)[0], x], 1)
        return both @ p["c"]

    params = draw({"a": (3, 6), "b": (3, 4), "c": (13, 2)})
    lines = trace_channels(apply, params, X).explain().splitlines()
    heads = [line.split(":")[0] for line in lines]
    assert heads == [
        "a axis 0 (3)",
        "a axis 1 (6)",
        "b axis 0 (3)",
        "b axis 1 (4)",
        "c axis 0 (13), positions 0-5",
        "c axis 0 (13), positions 6-12",
        "c axis 1 (2)",
    ]
    assert "fixed size (of input 0)" in lines[0]
    assert "group a, 6 channels" in lines[4]
    assert "fixed size (of a result of top_k)" in lines[5]


def test_sources_are_lines_of_this_file_even_where_jax_remembers_others():
    def first(p, x):
        return lax.cummax(x @ p["a"], axis=1)

    def second(p, x):
        h = x @ p["a"]
        return lax.cummax(h, axis=1)

    params = draw({"a": (3, 11)})
    for apply, offset in ((first, 1), (second, 2)):
        line = apply.__code__.co_firstlineno + offset
        reason = trace_channels(apply, params, X).explain("a")
        assert f"at {__file__}:{line}" in reason


def test_prunable_share_counts_entries_once():
    params = draw({"a": (3, 8), "b": (8, 2), "c": (8, 8), "d": (5,)})
    trace = trace_channels(lambda p, x: x @ p["a"] @ p["c"] @ p["b"], params, X)
    assert trace.prunable_share() == pytest.approx((24 + 16 + 64) / (24 + 16 + 64 + 5))


def harmless(ctx, x, *rest):
    return [Traced(x.labels, x.dead)]


def summing_whatever(ctx, x):
    return [Traced(x.labels[:-1], x.dead[:-1])]


@pytest.mark.parametrize(
    ("f", "wrong"),
    [
        (lambda h: jnp.sort(h, axis=1), {"sort": harmless}),
        (lambda h: h - jnp.exp(h).sum(1)[:, None], {"reduce_sum": summing_whatever}),
    ],
)
def test_a_wrong_rule_is_noticed_by_comparing_masked_with_shrunk(f, wrong):
    params = draw({"a": (3, 8), "b": (8, 2)})
    with pytest.raises(AssertionError, match="masked and shrunk differ"):
        assert_exact(lambda p, x: f(x @ p["a"]) @ p["b"], params, X, rules=wrong)


def test_a_rule_with_wrong_shapes_is_refused():
    with pytest.raises(UserError, match="the rule for transpose returned shapes"):
        trace_channels(
            lambda p, x: p["a"].T, draw({"a": (3, 8)}), X, rules={"transpose": harmless}
        )


def test_two_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    with pytest.raises(UserError, match="two leaves of the parameters have the same"):
        trace_channels(lambda p, x: p["a/b"], params, X)


def test_inputs_of_one_path_are_told_apart():
    def apply(p, x):
        return jnp.tanh((x["a/b"] + x["a"]["b"]) @ p["a"]) @ p["b"]

    inputs = {"a/b": X, "a": {"b": 2 * X}}
    trace = assert_exact(apply, draw({"a": (3, 8), "b": (8, 2)}), inputs)
    assert [group.name for group in trace.groups] == ["a"]


def test_leaves_that_are_no_arrays_are_refused_with_what_to_do():
    params = {"act": jnp.tanh, "a": jnp.ones((3, 8))}
    message = "parameter 'act' is a .* and not an array; .* eqx.partition"
    with pytest.raises(UserError, match=message):
        trace_channels(lambda p, x: p["act"](x @ p["a"]), params, X)
    with pytest.raises(UserError, match="input '0' is a str and not an array"):
        trace_channels(lambda p, x: p["a"], {"a": jnp.ones(3)}, "train")


def test_an_axis_name_that_nothing_binds_is_refused_with_what_to_do():
    def apply(p, x):
        return lax.pmean(x @ p["a"], "batch") @ p["b"]

    shapes = {"a": (3, 8), "b": (8, 2)}
    message = "a mesh or vmap that is not around it .*batch"
    with pytest.raises(UserError, match=message):
        trace_channels(apply, draw(shapes), X)
    around = jax.vmap(apply, (None, 0), axis_name="batch")
    assert assert_exact(around, draw(shapes), X, densities=(0.5,)).groups


# Freezing and merging.


def two_branches(p, x):
    left = jnp.tanh(x @ p["left"]["in"]) @ p["left"]["out"]
    return left + jnp.sin(x @ p["right"]["in"]) @ p["right"]["out"]


BRANCH = {"in": (3, 6), "out": (6, 2)}
LEFT = {"left/in": (6, [("left/in", 1, 1), ("left/out", 0, 1)])}
RIGHT = {"right/in": (6, [("right/in", 1, 1), ("right/out", 0, 1)])}


@pytest.mark.parametrize(
    ("freeze", "left"),
    [
        (["left/in"], RIGHT),
        (["left/*"], RIGHT),
        ([("left/in", 1)], RIGHT),
        ([("*/out", 0)], {}),
        (["*"], {}),
        ([("left/in", 0)], {**LEFT, **RIGHT}),
        (["right/out", ("left/in", 0)], LEFT),
    ],
)
def test_parameters_are_frozen_by_name(freeze, left):
    params = draw({"left": BRANCH, "right": BRANCH})
    trace = assert_exact(two_branches, params, X, densities=(0.5,), freeze=freeze)
    assert members_of(trace) == left
    for name in {*LEFT, *RIGHT} - set(left):
        assert "axis 1 (6): stays; is frozen by request" in trace.explain(name)


def test_merged_groups_live_and_die_together():
    params = draw({"left": BRANCH, "right": BRANCH})
    merge = [[("left/in", 1), ("right/out", 0)]]
    trace = assert_exact(two_branches, params, X, merge=merge)
    (group,) = trace.groups
    assert members_of(trace) == {
        "left/in": (6, [*LEFT["left/in"][1], *RIGHT["right/in"][1]])
    }
    assert all((m.positions[:, 0] == np.arange(6)).all() for m in group.members)


def test_what_is_merged_with_something_frozen_stays():
    params = draw({"left": BRANCH, "right": BRANCH})
    merge = [[("left/in", 1), ("right/in", 1)]]
    trace = trace_channels(two_branches, params, X, merge=merge, freeze=["left/out"])
    assert not trace.groups
    assert "is frozen by request" in trace.explain("right/in")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ["middle/*"]}, "freeze names 'middle/\\*' and no parameter is .* "
         "there are left/in, left/out, right/in, right/out"),
        ({"freeze": [("left/in", 2)]}, "freeze names axis 2 of 'left/in' and "),
        ({"merge": [[("left", 0), ("right/in", 1)]]}, "merge names axis 0 of 'left' "),
        ({"merge": [[("left/in", 0), ("right/in", 1)]]}, "axes of 3 and 6 positions"),
    ],
)  # fmt: skip
def test_wishes_for_what_is_not_there_are_refused(options, message):
    params = draw({"left": BRANCH, "right": BRANCH})
    with pytest.raises(UserError, match=message):
        trace_channels(two_branches, params, X, **options)


# Primitives of users.


def primitive_of(name, implement):
    """An elementwise operation as a user may add it: y = implement(x, **params)."""
    new = core.Primitive(name)
    new.def_impl(implement)
    new.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(new, mlir.lower_fun(implement, multiple_results=False))
    ad = jax.interpreters.ad
    ad.deflinear2(new, lambda g, x, **params: [implement(g, **params)])
    return new


twice_p = primitive_of("twice", lambda x: x * 2)


def scale_by_width(x, *, width):
    assert x.shape[-1] == width, "is told another width than it is given"
    return x * 3


wide_p = primitive_of("wide", scale_by_width)


def twice(p, x):
    return twice_p.bind(x @ p["a"]) @ p["b"]


def wide(p, x):
    return wide_p.bind(x @ p["a"], width=8) @ p["b"]


def passes(ctx, x):
    return [Traced(x.labels, x.dead)]


def rebuild_wide(evaluator, equation, operands):
    (x,) = operands
    assert evaluator.sizes(equation.results[0]) == x.shape
    return [wide_p.bind(x, width=x.shape[-1])]


PAIR = {"a": (3, 8), "b": (8, 2)}


def test_a_primitive_without_a_rule_freezes_by_name():
    trace = trace_channels(twice, draw(PAIR), X)
    assert not trace.groups
    line = trace.explain("a").splitlines()[1]
    assert line.startswith(
        "a axis 1 (8): stays; twice: not known to keep channels apart at "
    )
    assert f"at {__file__}:{twice.__code__.co_firstlineno + 1}" in line
    assert "(of a result of twice)" in trace.explain("b")


def test_a_primitive_with_a_rule_is_followed():
    trace = assert_exact(twice, draw(PAIR), X, rules={"twice": passes})
    assert members_of(trace) == {"a": (8, [("a", 1, 1), ("b", 0, 1)])}


def test_a_primitive_whose_parameters_know_sizes_needs_to_be_rebuilt():
    options = {"rules": {"wide": passes}, "rebuilds": {"wide": rebuild_wide}}
    trace = assert_exact(wide, draw(PAIR), X, **options)
    assert members_of(trace) == {"a": (8, [("a", 1, 1), ("b", 0, 1)])}
    with pytest.raises(AssertionError, match="is told another width"):
        assert_exact(wide, draw(PAIR), X, rules={"wide": passes})


def test_a_result_of_another_size_than_the_rule_says_is_refused():
    def pads(evaluator, equation, operands):
        return [jnp.pad(operands[0], ((0, 0), (0, 1)))]

    options = {"rules": {"twice": passes}, "rebuilds": {"twice": pads}}
    with pytest.raises(UserError, match=r"twice with fewer channels gave .*`rebuilds`"):
        assert_exact(twice, draw(PAIR), X, **options)


def test_a_rule_of_a_user_comes_before_the_one_of_the_package():
    params = draw(PAIR)
    f = lambda p, x: jnp.sin(x @ p["a"]) @ p["b"]  # noqa: E731
    assert trace_channels(f, params, X).groups
    trace = trace_channels(f, params, X, rules={"sin": freeze_all})
    assert not trace.groups
    assert "stays; sin: not known to keep channels apart" in trace.explain("a")


# Renormalising.


def layer_norm(x, scale, shift):
    x = x - x.mean(-1, keepdims=True)
    size = jnp.square(x).mean(-1, keepdims=True)
    return x * lax.rsqrt(size + 1e-5) * scale[None] + shift[None]


def normed(p, x):
    h = layer_norm(x @ p["a"], p["scale"], p["shift"])
    return jax.nn.gelu(h) @ p["b"]


def normed_by_library(p, x):
    h = jax.nn.standardize(x @ p["a"], axis=-1) * p["scale"][None]
    return jax.nn.gelu(h + p["shift"][None]) @ p["b"]


NORMED = {"a": (3, 8), "scale": (8,), "shift": (8,), "b": (8, 2)}
MEMBERS = {"a": (8, [("a", 1, 1), ("scale", 0, 1), ("shift", 0, 1), ("b", 0, 1)])}


@pytest.mark.parametrize("apply", [normed, normed_by_library])
def test_the_channels_of_a_layer_norm_go_exactly(apply):
    trace = assert_exact(apply, draw(NORMED), X)
    assert {g.name: g.size for g in trace.groups} == {"a": 8}
    assert sorted(members_of(trace)["a"][1]) == sorted(MEMBERS["a"][1])


def test_what_dead_channels_do_not_share_stays_and_says_where():
    def apply(p, x):
        h = x @ p["a"] + jnp.arange(8.0)[None]
        return layer_norm(h, p["scale"], p["shift"]) @ p["b"]

    trace = trace_channels(apply, draw(NORMED), X)
    assert not trace.groups
    mean = layer_norm.__code__.co_firstlineno + 1
    text = trace.explain("a").splitlines()[1]
    head = "a axis 1 (8): stays; reduce_sum: reads removed channels that may have "
    assert text.startswith(f"{head}different values (a constant of shape (1, 8) ")
    assert f") at {__file__}:{mean}; together " in text
    assert {"scale axis 0", "shift axis 0", "b axis 0"} <= set(
        text.split("together with ")[1].split(", ")
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("apply", [normed, normed_by_library])
def test_renormalising_gives_the_layer_norm_of_the_smaller_width(apply):
    params = draw(NORMED)
    trace = trace_channels(apply, params, X, renormalise=True)
    assert {g.name: g.size for g in trace.groups} == {"a": 8}
    assert sorted(members_of(trace)["a"][1]) == sorted(MEMBERS["a"][1])
    masks = random_masks(trace.groups, 0.5, np.random.default_rng(0))
    cut = make_cut(trace, masks, params)
    smaller = cut.take(params)
    small = cut.function(apply)
    np.testing.assert_allclose(small(smaller, X), apply(smaller, X), rtol=1e-5)
    by_small, by_apply = (
        jax.grad(lambda p, f=f: jnp.sin(f(p, X)).sum())(smaller) for f in (small, apply)
    )
    for one, other in zip(*map(jax.tree.leaves, (by_small, by_apply)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    masked = apply(cut.mask(params), X)
    assert np.abs(masked - small(smaller, X)).max() > 0.01, "there is nothing to renorm"


def test_renormalising_changes_what_is_divided_by_the_number_of_channels_only():
    def apply(p, x):
        h = x @ p["a"]
        return (h / h.shape[1]) @ p["b"] + jnp.square(h).sum(1, keepdims=True) / 5

    params = draw(PAIR)
    trace = trace_channels(apply, params, X, renormalise=True)
    cut = make_cut(trace, {"a": np.arange(8) % 2 == 0}, params)
    small = cut.function(apply)
    np.testing.assert_allclose(
        small(cut.take(params), X), apply(cut.mask(params), X), rtol=1e-5
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda h: h - h.mean(1, keepdims=True) * 2,
        lambda h: jnp.exp(h) / jnp.exp(h).sum(1, keepdims=True),
        lambda h: h - h.max(1, keepdims=True),
        lambda h: h - jnp.cos(h).sum(1, keepdims=True) / 7,
    ],
    ids=["mean", "softmax", "maximum", "other divisor"],
)
def test_renormalising_is_for_means_alone(f):
    """A mean may be scaled further; other sums and choices stay what they were."""
    params = draw(PAIR)
    apply = lambda p, x: f(x @ p["a"]) @ p["b"]  # noqa: E731
    trace = trace_channels(apply, params, X, renormalise=True)
    assert members_of(trace) == {"a": (8, [("a", 1, 1), ("b", 0, 1)])}
    cut = make_cut(trace, {"a": np.arange(8) % 2 == 0}, params)
    smaller = cut.take(params)
    error = jnp.abs(cut.function(apply)(smaller, X) - apply(cut.mask(params), X)).max()
    assert (error > 0.01) == ("mean" in str(f.__code__.co_names))


def explained(apply, params, *inputs, **options):
    return trace_channels(apply, params, *inputs, **options).explain()


def rms(h):
    return h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)


def test_a_table_that_freezes_what_a_norm_reads_is_named():
    table = np.sin(np.arange(32.0, dtype=np.float32)).reshape(4, 8)
    params = draw({"a": (3, 8), "b": (8, 2)})
    text = explained(lambda p, x: rms(x @ p["a"] + table) @ p["b"], params, X)
    assert "constant of shape (4, 8) differs from channel to channel" in text
    assert "give it to the function among the parameters" in text
    # What it says to do helps.
    apply = lambda p, x: rms(x @ p["a"] + p["table"]) @ p["b"]  # noqa: E731
    trace = assert_exact(apply, {**params, "table": table}, X, densities=(0.5,))
    assert [(g.name, g.size) for g in trace.groups] == [("a", 8)]


def test_weight_norm_without_epsilon_is_named():
    norm = lambda v: jnp.linalg.norm(v, axis=0, keepdims=True)  # noqa: E731
    params = draw({"a": (3, 8), "b": (8, 2)})
    text = explained(lambda p, x: x @ (p["a"] / norm(p["a"])) @ p["b"], params, X)
    assert "sqrt at " in text
    assert "may be given zero or less of them; add such as 1e-12" in text


def test_freeze_takes_one_pattern_as_a_string():
    params = {"backbone": draw({"a": (3, 8)}), "head": draw({"b": (8, 2)})}
    apply = lambda p, x: jnp.tanh(x @ p["backbone"]["a"]) @ p["head"]["b"]  # noqa: E731
    trace = trace_channels(apply, params, X, freeze="backbone/*")
    assert not trace.groups
    assert "backbone/a axis 1 (8): stays; is frozen by request" in trace.explain()


def test_rows_of_tables_and_readers_of_constants_are_no_channels():
    rows = {"pos": (6, 8), "a": (3, 8), "b": (8, 2)}
    trace = trace_channels(
        lambda p, x: jnp.tanh(x @ p["a"] + p["pos"][:4]) @ p["b"], draw(rows), X
    )
    assert [(g.name, g.size) for g in trace.groups] == [("a", 8)]
    assert "rows of a table" in trace.explain("pos")
    fixed = jnp.ones((4, 5))
    apply = lambda p, x: x + jnp.tanh(fixed @ p["b"])  # noqa: E731
    assert not trace_channels(apply, draw({"b": (5, 3)}), X).groups


def test_a_rank_between_two_parameters_is_a_group():
    apply = lambda p, x: x @ (p["down"] @ p["up"])  # noqa: E731
    trace = assert_exact(apply, draw({"down": (3, 4), "up": (4, 2)}), X)
    assert [(g.name, g.size) for g in trace.groups] == [("down", 4)]


def test_a_matrix_beside_the_identity_keeps_rows_and_columns_apart():
    def apply(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ (p["w"] + jnp.eye(8))) @ p["b"]

    trace = assert_exact(apply, draw({"a": (3, 8), "w": (8, 8), "b": (8, 2)}), X)
    assert [(g.name, g.size) for g in trace.groups] == [("a", 8), ("w", 8)]
