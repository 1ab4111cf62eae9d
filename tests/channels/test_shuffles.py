"""Shuffles are found, do what they did, and leave every position a channel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels.shuffles import with_shuffles
from tests.helpers.channel_checks import assert_exact, draw, members_of
from tests.helpers.networks import conv

X = np.arange(2 * 12 * 3 * 5).reshape(2, 12, 3, 5)


def moved(*apart, turn, together):
    def apply(x):
        return x.reshape(apart).transpose(turn).reshape(together)

    return apply


FOUND = {
    "two groups": moved(2, 2, 6, 3, 5, turn=(0, 2, 1, 3, 4), together=X.shape),
    "three parts": moved(2, 2, 3, 2, 3, 5, turn=(0, 3, 1, 2, 4, 5), together=X.shape),
    "to channels last": moved(
        2, 3, 4, 3, 5, turn=(0, 3, 4, 2, 1), together=(2, 3, 5, 12)
    ),
    "only moved": moved(2, 3, 4, 3, 5, turn=(1, 2, 0, 3, 4), together=(12, 2, 3, 5)),
}
OTHERS = {
    "with another axis": moved(
        2, 2, 6, 3, 5, turn=(0, 2, 3, 1, 4), together=(2, 6, 6, 5)
    ),
    "one part": moved(2, 2, 6, 3, 5, turn=(2, 0, 1, 3, 4), together=(6, 4, 3, 5)),
    "two axes": moved(
        2, 2, 6, 3, 1, 5, turn=(0, 2, 1, 4, 3, 5), together=(2, 12, 3, 5)
    ),
    "left apart": lambda x: x.reshape(2, 2, 6, 3, 5).swapaxes(1, 2),
}


def names_of(closed):
    return [eqn.primitive.name for eqn in closed.eqns]


@pytest.mark.parametrize("name", FOUND)
def test_a_shuffle_is_a_lookup_that_does_the_same(name):
    closed = with_shuffles(jax.make_jaxpr(FOUND[name])(X))
    assert "reshape" not in names_of(closed)
    (found,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    np.testing.assert_array_equal(found, FOUND[name](X))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_shuffle_stays(name):
    closed = jax.make_jaxpr(OTHERS[name])(X)
    assert with_shuffles(closed) is closed


def test_what_is_read_in_between_stays():
    def apply(x):
        apart = x.reshape(2, 2, 6, 3, 5)
        return apart.swapaxes(1, 2).reshape(X.shape), apart.sum(1)

    closed = jax.make_jaxpr(apply)(X)
    assert with_shuffles(closed) is closed


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_every_channel_goes_for_itself_also_in_calls(wrap):
    """Twice, before and behind a branch that takes half of the channels."""

    def shuffle(x):
        return x.reshape(-1, 2, 6).swapaxes(1, 2).reshape(-1, 12)

    def apply(p, x):
        h = wrap(shuffle)(jax.nn.relu(x @ p["a"]))
        left, right = jnp.split(h, 2, -1)
        both = jnp.concatenate([left, jax.nn.relu(right @ p["b"])], -1)
        return wrap(shuffle)(both) @ p["c"]

    params = draw({"a": (3, 12), "b": (6, 6), "c": (12, 2)})
    trace = assert_exact(apply, params, draw({"x": (4, 3)})["x"], densities=(0.5,))
    sizes = {name: size for name, (size, _) in members_of(trace).items()}
    assert sizes == {"a": 6, "a#2": 6, "b": 6}, trace.explain()


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [(1, {"one": 4, "two": 6}), (2, {"one": 2, "two": 3}), (3, {"one": 4, "two": 2})],
)
def test_filters_of_groups_may_be_others_in_every_group(groups, wanted):
    """As in ShuffleNet: groups, a shuffle, groups; as many filters of each are left."""

    def apply(p, x):
        h = jax.nn.relu(conv(x, p["one"], 3))
        h = h.reshape(*h.shape[:3], 3, 4).swapaxes(3, 4).reshape(h.shape)
        return conv(jax.nn.relu(h), p["two"], groups).mean((1, 2)) @ p["o"]

    shapes = {"one": (1, 1, 2, 12), "two": (1, 1, 12 // groups, 6), "o": (6, 2)}
    x = draw({"x": (2, 4, 4, 6)})["x"]
    trace = assert_exact(apply, draw(shapes), x, densities=(0.5,))
    sizes = {name: size for name, (size, _) in members_of(trace).items()}
    assert sizes == wanted, trace.explain()
