"""Placement: a word, a leading axis, and the sharding that follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.mesh import enter, leave, specs_of
from prunex_jax.train.steps.state import NEVER, zero_totals
from tests.helpers.common import make_mesh

PLACEMENTS = {"a": "replicated", "b": "per_host", "c": "per_device"}


def test_words_become_specs():
    assert specs_of(PLACEMENTS) == {
        "a": jax.P(),
        "b": jax.P("host"),
        "c": jax.P("host", "device"),
    }
    with pytest.raises(KeyError, match="somewhere"):
        specs_of("somewhere")


def test_leave_puts_axes_in_front_and_enter_takes_them_off():
    tree = {"a": jnp.ones(3), "b": {"x": jnp.ones(()), "y": None}, "c": [jnp.ones(2)]}
    outside = leave(PLACEMENTS, tree)
    shapes = [leaf.shape for leaf in jax.tree.leaves(outside)]
    assert shapes == [(3,), (1,), (1, 1, 2)]
    back = enter(PLACEMENTS, outside)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert [x.shape for x in jax.tree.leaves(back)] == [(3,), (), (2,)]


def test_a_word_covers_a_whole_part():
    outside = leave("per_host", {"x": jnp.ones(2), "y": (jnp.ones(()),)})
    assert [x.shape for x in jax.tree.leaves(outside)] == [(1,), (1, 2)][::-1]


def test_blocks_of_several_copies_are_refused():
    """Taking the axes off keeps one copy; two would be lost without a word."""
    with pytest.raises(TypeError):
        enter("per_host", jnp.ones((2, 3)))


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_every_device_gets_its_own(shape):
    """Round trip through `shard_map`: values and shardings are as the words say."""
    mesh = make_mesh(*shape)
    specs = specs_of(PLACEMENTS)
    count = {"a": (), "b": shape[:1], "c": shape}
    tree = {
        name: np.arange(np.prod((*lead, 2))).reshape(*lead, 2)
        for name, lead in count.items()
    }

    def double(block):
        own = enter(PLACEMENTS, block)
        assert all(x.shape == (2,) for x in own.values())
        return leave(PLACEMENTS, jax.tree.map(lambda x: 2 * x, own))

    run = jax.shard_map(double, mesh=mesh, in_specs=(specs,), out_specs=specs)
    for name, value in jax.jit(run)(tree).items():
        np.testing.assert_array_equal(value, 2 * tree[name])
        wanted = jax.sharding.NamedSharding(mesh, specs[name])
        assert value.sharding.is_equivalent_to(wanted, value.ndim)


def test_totals_start_at_nothing_and_never():
    totals = zero_totals(["tokens"])
    assert int(totals.pop("first_bad_step")) == NEVER == np.iinfo(np.int32).max
    assert {k: float(x) for k, x in totals.items()} == {"loss": 0.0, "tokens": 0.0}
