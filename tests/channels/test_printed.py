"""What people see of a trace."""

import jax.numpy as jnp
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels

PARAMS = {
    "hidden": {"value": jnp.ones((4, 16))},
    "out": jnp.ones((16, 3)),
    "rest": [jnp.ones((3, 1)) for _ in range(9)],
}


def apply(params, x):
    x = jnp.tanh(x @ params["hidden"]["value"]) @ params["out"]
    return x + sum(x @ each for each in params["rest"])


TRACE = trace_channels(apply, PARAMS, jnp.ones((2, 4)))


def test_a_trace_is_printed_as_a_table():
    head, row, total, stays = str(TRACE).splitlines()
    assert head.split() == ["group", "channels", "parameters", "in"]
    assert row.split()[:3] == ["hidden/value", "16", "112"]
    assert row.endswith("hidden/value axis 1, out axis 0")
    assert total.startswith("1 groups, 16 channels, ")
    assert total.endswith("% of 139 parameters can go")
    assert stays.startswith("axes that stay, and why: ")
    assert repr(TRACE) == str(TRACE), "in a notebook, too"


def test_parameters_of_nnx_are_found_by_both_names():
    wanted = TRACE.explain("hidden/value")
    assert TRACE.explain("hidden") == wanted and "group hidden/value" in wanted
    assert TRACE.explain("out/value") == TRACE.explain("out")


def test_an_unknown_parameter_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"'uot', did you mean 'out'.*, \.\.\.$"):
        TRACE.explain("uot")
