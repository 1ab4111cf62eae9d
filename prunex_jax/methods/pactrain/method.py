"""PacTrain: gradients share the sparsity of the weights, and travel packed.

The network is pruned before training. From then on the gradient of a dead weight is set
to zero, all hosts know which weights those are, and an ordinary all-reduce carries the
others, without positions. What is kept is chosen by `grasp`, by size, or by the user;
`packing` knows how it is packed.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import setting
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    FLOAT32,
    Slicing,
    Wire,
    check_local,
    dense_size,
    gather_over_hosts,
    key_of_slice,
    mean_over_mesh,
    refuse_biased,
)
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.method import (
    Forward,
    Method,
    MethodRow,
    Objective,
    Preparation,
    Prepare,
    Pruning,
    Recipe,
    StepOptions,
    Variant,
)
from prunex_jax.methods.moments import map_moments
from prunex_jax.methods.pactrain.grasp import grasp_pattern, magnitude_pattern
from prunex_jax.methods.pactrain.packing import (
    ChannelPacking,
    Packing,
    Pattern,
    WeightPacking,
)
from prunex_jax.methods.pactrain.ternary import ternary_mean_over_mesh

# Two odd factors and offsets with bits all over, one pair for each word of a print.
_SALTS = np.array([(0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F)], np.uint32)


@dataclasses.dataclass(frozen=True)
class PactrainConfig:
    """Pruning before training, and gradients that share its pattern."""

    # grasp (gradient flow, on real batches) | magnitude.
    score: Literal["grasp", "magnitude"] = "grasp"
    # Batches of the run that gradient flow is scored on.
    score_batches: int = setting(4, at_least=1)
    # channels (whole channels, as `sparsity` says) | weights (single ones).
    structure: Literal["channels", "weights"] = "channels"
    # Share of the entries of kernels that structure "weights" keeps.
    density: float = setting(0.5, above=0, at_most=1)
    # Steps for which masks must have been the same on all hosts before gradients are
    # packed; 0 packs from the first.
    stable_steps: int = setting(1, at_least=0)
    # Packed values as -1, 0 or 1 times a shared scale, one byte each.
    is_ternary: bool = False


class PactrainState(NamedTuple):
    """State of `pactrain`; everything is replicated."""

    num_steps: jax.Array  # int32[]
    pattern: PyTree  # what is kept, as the packing describes it
    age: jax.Array  # int32[]: steps in a row in which all hosts had the same pattern


# Where the parts of the state live.
PACTRAIN_PLACEMENTS = PactrainState("replicated", "replicated", "replicated")  # type: ignore[arg-type]


def pactrain(
    packing: Packing,
    *,
    wire: Wire = FLOAT32,
    is_ternary: bool = False,
    axes: MeshAxes = ALONE,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages the gradients of living weights over the mesh, packed into one buffer.

    `init` reads the pattern off the parameters: what is largest is kept. Prune them
    before, with `grasp_pattern` or as you like, and `packing.mask`; of masked
    parameters it finds the mask again. Dead gradients are exact zeros, so that weight
    decay and momentum behind it leave dead weights at zero, if they start there.

    As `update(..., packed=True)`, which is the default and needs hosts that agree, what
    is kept is taken out, averaged and put back. As `packed=False` it tracks masks: it
    masks whole gradients, averages those, and compares the patterns of all hosts; `age`
    counts the steps for which they have been the same, and starts again when they are
    not. Which of the two runs is static, because it decides what is sent; `age`
    says when the second has done its work.

    Args:
      packing: What lives and dies together, and how much of it is kept.
      wire: How values cross hosts.
      is_ternary: Whether packed values are -1, 0 or 1 times the largest magnitude of
        all hosts, one byte each, drawn so that the mean is unbiased; `wire` is for what
        is sent before it is packed.
      axes: Mesh axes of the caller; none is a single device.
      seed: Of the draws.
    Returns:
      A transformation of local gradients into one direction, replicated.
    Raises:
      UserError: Ternary values of more hosts than a byte can count.
    Collectives:
      packed: as `comm.mean_over_mesh` for `packing.num_kept` values, or as
      `ternary.ternary_mean_over_mesh`. Otherwise as
      `comm.mean_over_mesh` for all values, and as `comm.gather_over_hosts` for two
      numbers. Packing slices also sends what `packing.pack` and `unpack` do.
    Example:
      >>> from prunex_jax.methods.pactrain.packing import WeightPacking
      >>> params = {'kernel': jnp.array([[3.0, 0.0, 1.0, 0.0]])}
      >>> tx = pactrain(WeightPacking(0.5, {'kernel': (1, 4)}))
      >>> direction, state = tx.update({'kernel': jnp.ones((1, 4))}, tx.init(params))
      >>> direction['kernel'].tolist(), state.pattern.tolist()
      ([[1.0, 0.0, 1.0, 0.0]], [0, 2])

    References:
      Wang et al., PacTrain: Pruning and Adaptive Sparse Gradient Compression for
      Efficient Collective Communication in Distributed Deep Learning, 2025,
      arXiv:2505.18563.
      Wen et al., TernGrad, 2017, arXiv:1705.07878 (ternary values).
    Differs from:
      The paper, as far as it is public: the pattern of weights is tracked, not that of
      gradients, which flickers where living weights have no gradient; hosts compare
      patterns only until they are stable, since nothing changes them after that.
      Whole channels may be pruned, so that the network becomes small.
    """

    def init(params: PyTree) -> PactrainState:
        nothing = jnp.zeros((), jnp.int32)
        return PactrainState(nothing, magnitude_pattern(params, packing), nothing)

    def update(
        grads: PyTree,
        state: PactrainState,
        params: PyTree | None = None,
        *,
        packed: bool = True,
        **extra: Any,
    ) -> tuple[PyTree, PactrainState]:
        del params, extra
        check_local(grads, axes)
        key = jax.random.fold_in(jax.random.key(seed), state.num_steps)
        key = key_of_slice(key, axes)
        state = state._replace(num_steps=state.num_steps + 1)
        pattern = state.pattern
        if not packed:
            masked = packing.mask(grads, pattern)
            age = jnp.where(hosts_agree(pattern, axes), state.age + 1, 0)
            return mean_over_mesh(masked, axes, wire, key), state._replace(age=age)
        own = packing.pack(grads, pattern)
        if is_ternary:
            mean = ternary_mean_over_mesh(own, axes, key)
        else:
            mean = mean_over_mesh(own, axes, wire, key)
        return packing.unpack(mean, pattern, grads), state

    return optax.GradientTransformationExtraArgs(init, update)


def hosts_agree(pattern: Pattern, axes: MeshAxes) -> jax.Array:
    """Whether all hosts have the same pattern of integers; bool[], the same everywhere.

    Two patterns that differ pass as equal with a probability of about 2^-64.

    Collectives:
      As `comm.gather_over_hosts` for two uint32.
    """
    if axis_size(axes.host) == 1:
        return jnp.ones((), bool)
    rows = gather_over_hosts(_fingerprint(pattern), axes)
    return jnp.all(rows == rows[:1])


def _fingerprint(pattern: Pattern) -> jax.Array:
    """uint32[2] that says which integers are where, as a sum of scrambled pairs."""
    leaves = [leaf.ravel().astype(jnp.uint32) for leaf in jax.tree.leaves(pattern)]
    values = jnp.concatenate([*leaves, jnp.zeros(1, jnp.uint32)])
    places = jnp.arange(values.size, dtype=jnp.uint32)
    words = [
        jnp.sum(_scramble(values * a + _scramble(places + b)), dtype=jnp.uint32)
        for a, b in _SALTS
    ]
    return jnp.stack(words)


def _scramble(x: jax.Array) -> jax.Array:
    """The last steps of MurmurHash3: every bit depends on every other."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def make_pactrain(recipe: Recipe) -> Method:
    """Builds the PacTrain method.

    Of a network without channel groups, as it is left once its dead channels were cut
    out, nothing is pruned.
    """
    config: PactrainConfig = recipe.settings
    _check_wire(recipe)
    packing, wire = _packing_of(recipe, recipe.slicing), recipe.wire
    early, preparation = None, None
    if config.stable_steps:
        early = functools.partial(_until_stable, stable_steps=config.stable_steps)
    if packing.num_kept != dense_size(recipe.own_shapes):
        num_batches = config.score_batches if config.score == "grasp" else 1
        preparation = Preparation(_prepare_of(recipe, packing), num_batches)
    return gradient_method(
        recipe,
        pactrain(packing, wire=wire, is_ternary=config.is_ternary, axes=recipe.axes),
        placement=PACTRAIN_PLACEMENTS,
        payload_elements=packing.num_kept,
        bytes_of=(lambda count: count) if config.is_ternary else wire.payload_bytes,
        pruning=Pruning(lambda opt_state: packing.masks(opt_state[0].pattern)),
        step_options=StepOptions(early=early),
        preparation=preparation,
    )


def _check_wire(recipe: Recipe) -> None:
    wire = recipe.wire
    refuse_biased(wire, "pactrain")
    if recipe.settings.is_ternary and wire.is_narrow:
        raise UserError(
            f"wire_dtype={wire.dtype!r}: ternary values travel as single bytes already;"
            " choose float32, or no ternary values"
        )


def _packing_of(recipe: Recipe, slicing: Slicing | None) -> Packing:
    """How whole trees are packed, or slices of them."""
    config: PactrainConfig = recipe.settings
    if config.structure == "channels":
        groups, counts = recipe.groups, recipe.keep_counts
        return ChannelPacking(groups, counts, recipe.shapes, slicing)
    if slicing is not None:
        raise UserError(
            "method.pactrain.structure='weights' keeps the largest of all weights, and "
            "slices would have different numbers of them; set topology.shard=none, or "
            "method.pactrain.structure=channels"
        )
    return WeightPacking(config.density, recipe.shapes)


def _prepare_of(recipe: Recipe, own_packing: Packing) -> Prepare:
    """Chooses what is kept, and puts the rest to zero, moments included."""
    is_grasp, slicing = recipe.settings.score == "grasp", recipe.slicing
    packing, axes = _packing_of(recipe, None), recipe.axes.whole

    def prepare(
        forward: Forward,
        objective: Objective,
        params: PyTree,
        opt_state: PyTree,
        batches: Sequence[Any],
    ) -> tuple[PyTree, PyTree]:
        def loss_fn(params: PyTree, part: Any, temperature: float) -> jax.Array:
            return objective(forward(params, part) / temperature, part)

        if is_grasp:
            parts = [part for batch in batches for part in _halves(batch)]
            pattern = grasp_pattern(loss_fn, params, parts, packing, axes=axes)
        else:
            pattern = magnitude_pattern(params, packing)
        state, inner_state = opt_state
        inner_state = map_moments(
            lambda path, leaf: own_packing.mask({path: leaf}, pattern)[path],
            inner_state,
            params if slicing is None else slicing.take(params),
        )
        state = state._replace(pattern=pattern, age=0 * state.age)
        return packing.mask(params, pattern), (state, inner_state)

    return prepare


def _until_stable(opt_state: PyTree, stable_steps: int) -> dict[str, Any] | None:
    """Tracks masks until all hosts have had the same for so many steps."""
    return None if np.asarray(opt_state[0].age) >= stable_steps else {"packed": False}


def _halves(batch: Mapping[str, jax.Array]) -> list[Mapping[str, jax.Array]]:
    """Both halves of the examples of a device; one example has none."""
    count = len(jax.tree.leaves(batch)[0]) // 2
    if not count:
        return [batch]
    cuts = (slice(None, count), slice(count, 2 * count))
    return [jax.tree.map(lambda x, cut=cut: x[cut], dict(batch)) for cut in cuts]


_HALF = {"sparsity.sparsity": 0.5}
ROW = MethodRow(
    "pactrain",
    make_pactrain,
    PactrainConfig,
    takes_slices=True,
    variants=(
        Variant("pactrain", "PacTrain, half of the channels", _HALF),
        Variant(
            "pactrain-ternary",
            "PacTrain, 20 % of the weights, ternary",
            {
                **_HALF,
                "method.pactrain.structure": "weights",
                "method.pactrain.density": 0.2,
                "method.pactrain.is_ternary": True,
            },
        ),
    ),
)
