"""H-SADMM as a method: rounds on compact channels every `sync_period` steps."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import setting
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import kept_shape, layouts_of
from prunex_jax.comm import TopK, Wire
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm import move
from prunex_jax.methods.hsadmm.arithmetic import norm
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.outer import law_step
from prunex_jax.methods.hsadmm.presets import HsadmmParameters, preset
from prunex_jax.methods.hsadmm.round import DeviceLevel
from prunex_jax.methods.hsadmm.send import payload_of
from prunex_jax.methods.hsadmm.state import HsadmmState, state_placements
from prunex_jax.methods.hsadmm.streaming import Streaming, fragments_of
from prunex_jax.methods.method import (
    InnerState,
    KeepCounts,
    Method,
    MethodConfig,
    MethodRow,
    Options,
    Payload,
    Placements,
    Pruning,
    Recipe,
    RoundKind,
    Rounds,
    StepOptions,
    Variant,
)


@dataclasses.dataclass(frozen=True)
class HsadmmConfig:
    """Parameters of hierarchical structured ADMM; None takes the preset's value.

    With `rounds.top_k`, preset recommended has no outer momentum.
    """

    # recommended | reset | leaky | paper: see presets.PRESETS.
    preset: str = "recommended"
    # Steps between exchanges over the host axis; the fewest, by another `sync_rule`.
    sync_period: int = setting(4, at_least=1)
    # gradient (one copy per host) | consensus (one copy per device).
    device_level: DeviceLevel = "gradient"
    # Pull of every local step towards the consensus, times the learning rate.
    rho_device: float | None = setting(None, at_least=0)
    # Penalty between host and global consensus; 0 makes them one.
    rho_host: float | None = setting(None, at_least=0)
    # Pull of every round towards the consensus, in [0, 1].
    prox_strength: float | None = setting(None, at_least=0, at_most=1)
    # What remains of the device dual after a round; 0 means no device dual.
    dual_decay: float | None = setting(None, at_least=0, at_most=1)
    outer_step: float | None = setting(None, at_least=0)
    outer_momentum: float | None = setting(None, at_least=0, below=1)


# What remains of an error, where a form needs it and nothing else is asked for: of
# what was rounded away, and of numbers that were not sent. SparseLoCo has 0.95 for
# both; runs of ours that lose none of the latter ended half a point higher.
_ROUNDING_DECAY = 0.95
_TOP_K_DECAY = 1.0


def rounds_of(recipe: Recipe) -> dict[str, Any]:
    """How rounds cross hosts and move z, by their names in `HsadmmParameters`."""
    method, rounds = recipe.config, recipe.config.rounds
    # Slices are small: there waiting costs more memory than it saves.
    in_turn = recipe.slicing is None
    wire = Wire(method.wire_dtype, method.bucket_bytes, in_turn)
    top = None
    if rounds.top_k:
        top = TopK(rounds.top_k, rounds.top_k_route)
    decay = rounds.error_decay
    if decay is None:
        decay = _ROUNDING_DECAY if wire.format.is_biased else 0.0
        decay = _TOP_K_DECAY if top else decay
    return {
        "wire": wire,
        "error_decay": decay,
        "top": top,
        "outer": rounds.outer,
    }


# What remains of copies that have gone on while a mean was under way: alpha of
# Streaming DiLoCo, section 3.
_MIXING = 0.5


def streaming_of(
    method: MethodConfig, sync: SyncSchedule, left_by_rounds: float = 0.0
) -> Streaming | None:
    """Whether rounds are in fragments; None if everything is exchanged at once.

    `left_by_rounds` is what whole rounds leave of the copies.

    Raises:
      UserError: Fragments or a delay for which a period has no room.
    """
    rounds = method.rounds
    if rounds.fragments == 1 and not rounds.delay:
        if rounds.mixing is not None:
            raise UserError(
                f"method.rounds.mixing={rounds.mixing:g} is for streaming: set "
                "method.rounds.fragments or method.rounds.delay too, or leave it out"
            )
        return None
    mixing = rounds.mixing
    if mixing is None:
        mixing = _MIXING if rounds.delay else left_by_rounds
    return Streaming(sync, rounds.fragments, rounds.delay, mixing)


def _parameters_of(recipe: Recipe, sync: SyncSchedule) -> HsadmmParameters:
    """The preset with what the settings change of it."""
    config: HsadmmConfig = recipe.settings
    rounds = rounds_of(recipe)
    momentum, step = config.outer_momentum, config.outer_step
    is_fixed = recipe.config.rounds.outer != "law"
    if rounds["top"] and config.preset == "recommended" and is_fixed:
        # What was not sent is momentum already: more of it hurts (SparseLoCo).
        momentum, step = momentum or 0.0, 1.0 if step is None else step
    return preset(
        config.preset,
        sync.period,
        rho_device=config.rho_device,
        rho_host=config.rho_host,
        prox_strength=config.prox_strength,
        dual_decay=config.dual_decay,
        outer_step=step,
        outer_momentum=momentum,
        criterion=recipe.criterion,
        **rounds,
    )


# Keep counts as options of a step: static, so hashable.
FixedCounts = tuple[tuple[str, int], ...]


def make_hsadmm(recipe: Recipe) -> Method:
    """Builds the H-SADMM method."""
    return consensus_method(core_of(recipe), recipe, prunes=True)


def core_of(recipe: Recipe) -> Hsadmm:
    """The core as the settings say."""
    config: HsadmmConfig = recipe.settings
    sync = recipe.sync(config.sync_period)
    parameters = _parameters_of(recipe, sync)
    return Hsadmm(
        recipe.inner,
        recipe.groups,
        recipe.keep_counts,
        parameters,
        sync,
        config.device_level,
        recipe.axes,
        recipe.learning_rate,
        streaming=streaming_of(
            recipe.config, sync, 1.0 - parameters.moving.prox_strength
        ),
        slicing=recipe.slicing,
    )


def consensus_method(core: Hsadmm, recipe: Recipe, prunes: bool) -> Method:
    """What all methods share whose copies meet in a consensus every so many steps."""
    placements = state_placements(core.device_level, core.slicing is not None)
    streaming = core.streaming

    def own_counts(keep_counts: KeepCounts) -> KeepCounts:
        return {group.name: keep_counts[group.name] for group in core.groups}

    def update(
        grads: PyTree,
        state: HsadmmState,
        params: PyTree,
        keep_counts: FixedCounts | None = None,
        **extra: Any,
    ) -> tuple[PyTree, HsadmmState]:
        counts = None if keep_counts is None else own_counts(dict(keep_counts))
        return core.update(
            grads, state, params, sync=False, keep_counts=counts, **extra
        )

    def options(step: int) -> Options:
        return {} if streaming is None else streaming.options_in(step)

    def exchange(
        params: PyTree,
        state: HsadmmState,
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> tuple[PyTree, HsadmmState]:
        own = own_counts(keep_counts)
        return core.exchange(params, state, keep_counts=own, kind=kind)

    def network(params: PyTree, state: HsadmmState) -> PyTree:
        del params
        return state.global_consensus

    def moved(state: HsadmmState, change: PyTree) -> HsadmmState:
        return state._replace(consensus=move.shifted(state.consensus, change))

    form = core.parameters
    pruning = Pruning(
        masks=lambda state: state.masks,
        scores=core.scores if prunes else None,
        in_rounds=prunes,
        moved=moved if prunes else None,
    )
    return Method(
        transform=optax.GradientTransformationExtraArgs(core.init, update),
        placements=Placements(
            state_placements(core.device_level).inner_state, placements
        ),
        network=network,
        health=functools.partial(_health, form, core.axes),
        payload=_payload_of(core, recipe),
        pruning=pruning,
        rounds=Rounds(core.sync, exchange, streaming is not None),
        step_options=StepOptions(options),
        inner=InnerState(
            get=lambda state: state.inner_state,
            put=lambda state, inner: state._replace(inner_state=inner),
        ),
    )


def _health(
    form: HsadmmParameters, axes: MeshAxes, state: HsadmmState
) -> dict[str, Any]:
    residuals, health = state.residuals, state.health
    found: dict[str, Any] = {
        "primal_residual": residuals.primal_device,
        "dual_residual": residuals.dual_device,
        "primal_residual_host": residuals.primal_host,
        "dual_residual_host": residuals.dual_host,
        "host_drift": health.host_drift,
        "consensus_norm": norm(state.global_consensus, axes),
        "mask_changes": state.channels.num_changed.astype(jnp.float32),
    }
    consensus = state.consensus
    movements, host = consensus.movements, consensus.host
    for name, dual in (
        ("device_dual_norm", consensus.device_dual),
        ("host_dual_norm", None if host is None else host.dual),
        ("error_norm", state.sending.error),
    ):
        if dual is not None:
            found[name] = norm(dual, axes)
    if movements is not None:
        found["round_cosine"] = movements.cosine
        momentum = form.moving.outer_momentum
        found["outer_step"] = law_step(momentum, movements.average)
    if health.primal_by_group:
        found["primal_residual_by_group"] = health.primal_by_group
        found["dual_residual_by_group"] = health.dual_by_group
    return found


def _payload_of(core: Hsadmm, recipe: Recipe) -> Payload:
    """What the largest part of a round is that is exchanged at once, from sizes."""
    layouts, slicing = layouts_of(core.groups, recipe.shapes), recipe.slicing
    count = 1 if core.streaming is None else core.streaming.num_fragments
    fragments = fragments_of(recipe.own_shapes, count)
    sending = core.parameters.sending

    def largest(keep_counts: KeepCounts) -> tuple[int, int]:
        if slicing is not None:
            left = slicing.own_kept_shapes(layouts, keep_counts)
        else:
            left = {
                path: kept_shape(shape, layouts.get(path), keep_counts)
                for path, shape in recipe.shapes.items()
            }
        found = []
        for paths in fragments:
            sizes = collections.Counter[int]()  # Elements by number of axes.
            for path in paths:
                sizes[len(left[path])] += math.prod(left[path])
            found.append(payload_of(sizes, sending))
        return max(found)

    return Payload(
        lambda counts: largest(counts)[0],
        sending.wire.payload_bytes,
        lambda counts: largest(counts)[1],
    )


_HALF = {"sparsity.sparsity": 0.5}
# Pruning ends at 40 % of the run: most of it is sent, and computed, small.
_EARLY = {**_HALF, "sparsity.start_share": 0.05, "sparsity.freeze_share": 0.4}
_RARE_INT8 = {"method.hsadmm.sync_period": 8, "method.wire_dtype": "int8"}


def _every(period: int) -> Variant:
    """Rarely, early and in int8: under 1/100 of the bytes."""
    return Variant(
        f"hsadmm-{period}",
        f"H-SADMM, every {period} steps, int8",
        {
            **_EARLY,
            "method.hsadmm.sync_period": period,
            "method.wire_dtype": "int8",
        },
        period=period,
    )


ROW = MethodRow(
    "hsadmm",
    make_hsadmm,
    HsadmmConfig,
    takes_slices=True,
    variants=(
        Variant(
            "hsadmm",
            "H-SADMM, half of the channels",
            {**_HALF, "method.hsadmm.sync_period": 1},
        ),
        Variant(
            "hsadmm-8-int8", "H-SADMM, every 8 steps, int8", {**_HALF, **_RARE_INT8}, 8
        ),
        Variant(
            "hsadmm-8-int8-small",
            "H-SADMM, the same, cut out",
            {**_HALF, **_RARE_INT8, "sparsity.shrink_share": 0.6},
            period=8,
        ),
        _every(10),
        _every(16),
        Variant(
            "hsadmm-4-top64",
            "H-SADMM, every 4 steps, 64 of 4,096 numbers, int2",
            {
                **_EARLY,
                "method.hsadmm.sync_period": 4,
                "method.wire_dtype": "int2",
                "method.rounds.top_k": 64,
            },
            period=4,
        ),
        Variant(
            "every-step",
            "the same pruning, float32, every step",
            {
                **_EARLY,
                "method.hsadmm.sync_period": 1,
                "method.hsadmm.preset": "reset",
            },
        ),
    ),
)
