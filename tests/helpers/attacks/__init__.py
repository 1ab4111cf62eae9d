"""Networks made to mislead the tracer: a table of them, and how each is checked.

An attack is a network with what is claimed of it: that some of its channels can be
removed, or that none can and why. The modules beside fill the table.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import trace_channels
from prunex_jax.channels.trace import ChannelTrace
from prunex_jax.shrink import make_cut
from tests.helpers.channel_checks import DENSITIES, draw, random_masks

# One density per network, so that all are compiled within a minute; all of them with
# PRUNEX_ATTACK_DENSITIES=all.
TRIES_ALL = os.environ.get("PRUNEX_ATTACK_DENSITIES") == "all"
FORWARD, BACKWARD = 1e-5, 1e-4

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]
SEQUENCES = draw({"x": (2, 5, 3)}, seed=3)["x"]
TOKENS = draw({"x": (2, 5, 8)}, seed=4)["x"]
IDS = jnp.array([[1, 2, 3], [4, 5, 6]])
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Attack:
    """One network.

    Attributes:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)`.
      params: Shapes of parameters, or the parameters themselves.
      inputs: Its inputs.
      frozen: Whether no channel can be removed; None where versions of jax differ.
      kept: Parameters whose channels are frozen and must be, as (path, axis).
      statistics: Shapes of statistics, if it takes some.
      returns_statistics: Whether it returns new ones.
      differentiable: Whether gradients are compared.
      tolerance: Forward and backward.
      trace: Further options of `trace_channels`.
    """

    apply: Callable[..., Any]
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]
    frozen: bool | None = False
    kept: tuple[tuple[str, int], ...] = ()
    statistics: Mapping[str, Any] | None = None
    returns_statistics: bool = False
    differentiable: bool = True
    tolerance: tuple[float, float] = (FORWARD, BACKWARD)
    trace: Mapping[str, Any] = dataclasses.field(default_factory=dict)


ATTACKS: dict[str, Attack] = {}


def attack(params, *inputs, **claims):
    """Adds a function to the table; `params` are shapes or arrays."""

    def register(apply):
        name = apply.__name__
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(apply, params, inputs or (X,), **claims)
        return apply

    return register


def conv(x, kernel, stride=1, groups=1, padding="SAME"):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def check(name: str) -> ChannelTrace:
    """Traces a network and compares it masked and shrunk, with gradients."""
    with jax.numpy_rank_promotion("allow"):  # as in networks of other people
        return _check(name, ATTACKS[name])


def arguments_of(case: Attack) -> tuple[Any, ...]:
    """Parameters, statistics if it takes some, and inputs."""
    drawn = draw({k: v for k, v in case.params.items() if not hasattr(v, "dtype")})
    params = {k: drawn.get(k, v) for k, v in case.params.items()}
    running = () if case.statistics is None else (draw(case.statistics, seed=5),)
    return params, *running, *case.inputs


def _check(name: str, case: Attack) -> ChannelTrace:
    params, *rest = arguments_of(case)
    statistics = None if case.statistics is None else rest[0]
    trace = trace_channels(
        case.apply,
        params,
        *case.inputs,
        statistics=statistics,
        returns_statistics=case.returns_statistics,
        **case.trace,
    )
    _check_reservations(case, trace)
    place = list(ATTACKS).index(name)
    densities = DENSITIES if TRIES_ALL else DENSITIES[place % 3 : place % 3 + 1]
    rng = np.random.default_rng(place)
    for density in densities if trace.groups else ():
        masks = random_masks(trace.groups, density, rng)
        _compare(case, make_cut(trace, masks, params, statistics), params, statistics)
    return trace


def _check_reservations(case: Attack, trace: ChannelTrace) -> None:
    removable = [group.name for group in trace.groups if group.size > 1]
    if case.frozen:
        named = {staying.reason.primitive for staying in trace.frozen} - {""}
        assert named, f"no primitive is named:\n{trace.explain()}"
        assert not removable, f"{removable} can be removed after all"
    elif case.frozen is False:
        assert removable, f"everything stays:\n{trace.explain()}"
    for path, axis in case.kept:
        assert not any(
            (member.path, member.axis) == (path, axis)
            for group in trace.groups
            for member in group.members
        ), f"{path} axis {axis} can be removed after all"


def _compare(case: Attack, cut, params, statistics) -> None:
    small = cut.function(case.apply)
    before = () if statistics is None else (statistics,)
    after = () if statistics is None else (cut.take_statistics(statistics),)

    def both(params):
        full, gradients = _run(case, case.apply, before, cut.mask(params))
        wanted = cut.take(gradients)
        if case.returns_statistics:
            full = full[0], cut.take_statistics(full[1])
        return full, wanted, *_run(case, small, after, cut.take(params))

    options = {"xla_backend_optimization_level": 0}
    full, wanted, less, found = jax.jit(both, compiler_options=options)(params)
    assert _is_finite(full), "masking makes outputs not finite"
    assert _is_finite(wanted), "masking makes gradients not finite"
    forward, backward = case.tolerance
    error = _error(full, less)
    assert error <= forward, f"outputs differ by {error:.1e}: {cut.keep_indices}"
    error = _error(wanted, found)
    assert error <= backward, f"gradients differ by {error:.1e}: {cut.keep_indices}"


def _run(case, apply, statistics, params):
    """Outputs, and gradients of all floating parameters by path."""
    by_path = flatten_by_path(params)
    moving = {k: v for k, v in by_path.items() if jnp.issubdtype(v.dtype, jnp.inexact)}

    def loss(moving):
        leaves = {**by_path, **moving}
        merged = jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
        outputs = apply(merged, *statistics, *case.inputs)
        first = outputs[0] if case.returns_statistics else outputs
        return sum(_weighted(x) for x in jax.tree.leaves(first)), outputs

    if not case.differentiable:
        return loss(moving)[1], {}
    (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(moving)
    return outputs, gradients


def _weighted(x):
    x = jnp.asarray(x)
    x = x.real + 2 * x.imag if jnp.iscomplexobj(x) else x.astype(jnp.float32)
    return jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape))


def _is_finite(tree) -> bool:
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree))


def _error(wanted, found) -> float:
    """Largest difference of a leaf, relative to it or to what is large."""
    pairs = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True))
    for a, b in pairs:
        assert np.shape(a) == np.shape(b), "results of other shapes"
    wide = [
        [np.asarray(x, np.complex128) for x in pair] for pair in pairs if pair[0].size
    ]
    largest = max([np.abs(a).max() for a, _ in wide], default=0.0)
    floor = max(0.1 * largest, 1e-3)
    return max(
        [np.abs(a - b).max() / max(np.abs(a).max(), floor) for a, b in wide],
        default=0.0,
    )
