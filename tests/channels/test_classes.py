"""Operations of classes: what they are made of is walked, and their derivatives."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from prunex_jax.channels import trace_channels
from prunex_jax.shrink.cost import count_macs
from tests.helpers.channel_checks import assert_exact, draw, members_of

hijax = pytest.importorskip("jax.experimental.hijax")
Operation = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

PAIR = {"a": (3, 8), "b": (8, 2)}
ONE = {"a": (8, [("a", 1, 1), ("b", 0, 1)])}
X = draw({"x": (4, 3)}, seed=1)["x"]


class Scaled(Operation):
    """Multiplies by a number, and has a derivative of its own."""

    def __init__(self, aval, factor):
        self.in_avals, self.out_aval = (aval,), aval
        self.params = {"factor": factor}
        super().__init__()

    def expand(self, x):
        return x * self.factor

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, res, outgrad):
        return (3 * outgrad,)


class MixedBackwards(Scaled):
    def vjp_bwd_retval(self, res, outgrad):
        return (outgrad + outgrad.sum(1, keepdims=True),)


class Secret(Scaled):
    def expand(self, x):
        raise NotImplementedError


class Product(Operation):
    def __init__(self, left, right):
        self.in_avals = (left, right)
        self.out_aval = jax.typeof(jax.ShapeDtypeStruct((4, 2), left.dtype))
        self.params = {}
        super().__init__()

    def expand(self, left, right):
        return left @ right


def applied(kind):
    def apply(p, x):
        h = x @ p["a"]
        return kind(jax.typeof(h), 2.0)(h) @ p["b"]

    return apply


def test_an_operation_of_a_class_is_what_it_is_made_of():
    assert members_of(assert_exact(applied(Scaled), draw(PAIR), X)) == ONE


def test_a_derivative_of_a_class_ties_what_it_mixes():
    trace = trace_channels(applied(MixedBackwards), draw(PAIR), X)
    assert not trace.groups
    assert "reduce_sum" in trace.explain("b")


def test_a_class_that_says_not_what_it_is_made_of_stays():
    trace = trace_channels(applied(Secret), draw(PAIR), X)
    assert not trace.groups
    assert "call_hi_primitive: not known to keep channels apart" in trace.explain("a")


def test_what_a_class_multiplies_is_counted():
    def apply(left, right):
        return Product(jax.typeof(left), jax.typeof(right))(left, right)

    assert count_macs(apply, jnp.ones((4, 3)), jnp.ones((3, 2))) == 24


@pytest.fixture
def newest_remat():
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("newer jax has it")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("policy", [None, "save_only_these_names"])
def test_blocks_that_are_computed_again_by_a_class(newest_remat, policy):
    named = jax.checkpoint_policies.save_only_these_names("kept")
    options = {"policy": named} if policy else {}

    def block(h):
        return jnp.sin(checkpoint_name(jnp.cos(h), "kept"))

    def apply(p, x):
        return jax.checkpoint(block, **options)(x @ p["a"]) @ p["b"]

    assert "RematTraced" in str(jax.make_jaxpr(apply)(draw(PAIR), X))
    assert members_of(assert_exact(apply, draw(PAIR), X, densities=(0.5,))) == ONE
