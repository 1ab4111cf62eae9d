"""What rounds send: what is not in the mean is kept, and routes are chosen."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from prunex_jax.comm import TopK, Wire, list_collectives, wire_bytes
from prunex_jax.mesh import vary
from prunex_jax.methods import method_config
from prunex_jax.methods.hsadmm import Sending
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.hsadmm.send import mean_of_differences
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.method import RoundsConfig
from tests.helpers.common import MESH
from tests.helpers.formulas.hsadmm import sent_differences
from tests.helpers.formulas.methods import formulas_of
from tests.helpers.mean_cases import AXES, assert_same, on_mesh
from tests.methods import test_contract as contract

SIZES = {2: 9000, 1: 70}
SHAPES = {"kernel": (90, 100), "bias": (70,)}
FORMS = {
    "float32": Sending(),
    "int8": Sending(wire=Wire("int8")),
    "int4 kept": Sending(wire=Wire("int4"), error_decay=1.0),
    "int2 kept": Sending(wire=Wire("int2"), error_decay=1.0),
    "gather": Sending(error_decay=0.9, top=TopK(64)),
    "owners int2": Sending(
        wire=Wire("int2"),
        error_decay=0.9,
        top=TopK(64, route="owners"),
    ),
}


def differences(factors):
    """What hosts would send: equal in length but for the factors, [hosts, 1, ...]."""
    rng = np.random.default_rng(0)
    own = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    signs = {name: rng.choice([-1, 1], (4, *shape)) for name, shape in SHAPES.items()}
    signs = jax.tree.map(
        lambda s, x: s * x * np.reshape(factors, (4, *[1] * x.ndim)), signs, own
    )
    return jax.tree.map(lambda x: np.float32(x)[:, None], signs)


@functools.cache
def sending(name):
    """Mean and errors, as every host has them."""
    form = FORMS[name]

    def run(own):
        mean, error = mean_of_differences(own, form, MESH, jax.random.key(0), "frozen")
        return jax.tree.map(lambda x: vary(x, AXES)[None, None], (mean, error or {}))

    return on_mesh(run, (4, 1), jax.P(*AXES), check_vma=False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_in_the_mean_is_kept(name):
    """Also where one host sends ten times as much as the others."""
    sent = differences((1, 1, 10, 1))
    found, error = jax.tree.map(np.asarray, sending(name)(sent))
    for leaf in found.values():
        assert_same(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    wanted = jax.tree.map(lambda x: x.mean(0, keepdims=True), sent)
    if error:
        found = jax.tree.map(lambda x, e: x + e.mean(0), found, error)
    tolerance = 0.2 if name == "int8" else 1e-5
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf[0], wanted[path][0], atol=tolerance)


@pytest.mark.parametrize("name", FORMS)
def test_formula_bytes_are_traced_bytes(name):
    for kind in ("frozen", "freeze"):
        form, mesh_shape = FORMS[name], {"host": 4, "device": 1}
        program = on_mesh(
            lambda own, form=form, kind=kind: mean_of_differences(
                own, form, MESH, jax.random.key(0), kind
            )[0],
            (4, 1),
        )
        traced = list_collectives(program.trace(differences((1, 1, 1, 1))).jaxpr)
        formula = sent_differences(SIZES, form, mesh_shape, kind)
        assert wire_bytes(traced, mesh_shape) == wire_bytes(formula, mesh_shape)


def config_of(name, wire_dtype="float32", own=None, **rounds):
    own = {"sync_period": 4, **(own or {})}
    is_hsadmm = name == "hsadmm"
    return method_config(
        name,
        local_sgd=LocalSgdConfig(**({} if is_hsadmm else own)),
        hsadmm=HsadmmConfig(**(own if is_hsadmm else {})),
        rounds=RoundsConfig(**rounds),
        wire_dtype=wire_dtype,
    )


@pytest.mark.parametrize("name", ["hsadmm", "local_sgd", "diloco"])
def test_settings_choose_the_route_by_bytes(name):
    """Formulas alone: those of a network of 30 chunks."""
    recipe = contract.recipe_of(config_of(name))
    recipe = dataclasses.replace(
        recipe, groups=(), keep_counts={}, shapes={"kernel": (300, 400), "bias": (400,)}
    )

    def sent(num_hosts, **rounds):
        own = dataclasses.replace(recipe, config=config_of(name, "int2", **rounds))
        mesh_shape = {"host": num_hosts, "device": 1}
        formula = formulas_of(own).exchange(mesh_shape, {}, "frozen")
        return wire_bytes(formula, mesh_shape)["host"]

    for num_hosts in (2, 4, 8, 32):
        auto, gather, owners = (
            sent(num_hosts, top_k=64, **more)
            for more in ({}, {"top_k_route": "gather"}, {"top_k_route": "owners"})
        )
        assert auto == (gather if num_hosts <= 4 else owners)
        assert num_hosts == 2 or gather > owners
