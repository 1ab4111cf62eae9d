"""H-SADMM as a method: rounds on compact channels every `sync_period` steps."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import setting
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import Layouts, kept_shape, layouts_of
from prunex_jax.comm import Collective, TopK, Wire, dense_size
from prunex_jax.comm.formulas import device_sum, host_sum
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm.arithmetic import norm
from prunex_jax.methods.hsadmm.consensus import (
    FLIGHT_IN_SLICES,
    HsadmmState,
    state_placements,
)
from prunex_jax.methods.hsadmm.copies import DeviceLevel
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.outer import law_step
from prunex_jax.methods.hsadmm.presets import HsadmmParameters, preset
from prunex_jax.methods.hsadmm.sending import payload_of, sent_differences
from prunex_jax.methods.hsadmm.streaming import Streaming, fragments_of
from prunex_jax.methods.method import (
    KeepCounts,
    Method,
    MethodConfig,
    MethodRow,
    Options,
    Recipe,
    RoundKind,
    Variant,
)
from prunex_jax.sparsity import uses_gradients


@dataclasses.dataclass(frozen=True)
class HsadmmConfig:
    """Parameters of hierarchical structured ADMM; None takes the preset's value.

    With `rounds.top_k`, preset recommended has no outer momentum.
    """

    # recommended | reset | leaky | paper: see presets.PRESETS.
    preset: str = "recommended"
    # Steps between exchanges over the host axis.
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
    # none | residual: residual balancing of the penalties (paper preset).
    adapt: Literal["none", "residual"] = "none"


# What remains of an error, where a form needs it and nothing else is asked for: of
# what was rounded away, and of numbers that were not sent. SparseLoCo has 0.95 for
# both; runs of ours that lose none of the latter ended half a point higher.
_ROUNDING_DECAY = 0.95
_TOP_K_DECAY = 1.0


def rounds_of(recipe: Recipe) -> dict[str, Any]:
    """How rounds cross hosts and move z, as fields of `HsadmmParameters`."""
    method, rounds = recipe.config, recipe.config.rounds
    # Slices are small: there waiting costs more memory than it saves.
    in_turn = recipe.slicing is None
    wire = Wire(method.wire_dtype, method.bucket_bytes, in_turn)
    top = None
    if rounds.top_k:
        top = TopK(rounds.top_k, rounds.top_k_route)
    decay = rounds.error_decay
    if decay is None:
        decay = _ROUNDING_DECAY if wire.is_biased else 0.0
        decay = _TOP_K_DECAY if top else decay
    return {
        "wire": wire,
        "error_decay": decay,
        "top": top,
        "outer": rounds.outer,
    }


# What is left of a channel that has faded, before the freeze sets it to zero.
_FADED = 0.01


def fade_of(num_steps: int, sync_period: int) -> float:
    """What a round leaves of losing channels that fade over so many steps.

    Example:
      >>> round(fade_of(100, 10) ** 10, 6)
      0.01
      >>> fade_of(0, 10)
      0.0
    """
    return _FADED ** (sync_period / num_steps) if num_steps else 0.0


# What remains of copies that have gone on while a mean was under way: alpha of
# Streaming DiLoCo, section 3.
_MIXING = 0.5


def streaming_of(
    method: MethodConfig, sync_period: int, left_by_rounds: float = 0.0
) -> Streaming | None:
    """Whether rounds are in fragments; None if everything is exchanged at once.

    Args:
      method: The settings.
      sync_period: Steps per round.
      left_by_rounds: What whole rounds leave of the copies.
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
    return Streaming(sync_period, rounds.fragments, rounds.delay, mixing)


def parameters_of(recipe: Recipe) -> HsadmmParameters:
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
        config.sync_period,
        rho_device=config.rho_device,
        rho_host=config.rho_host,
        prox_strength=config.prox_strength,
        dual_decay=config.dual_decay,
        outer_step=step,
        outer_momentum=momentum,
        adapt=config.adapt,
        fade=fade_of(recipe.fade_steps, config.sync_period),
        criterion=recipe.criterion,
        **rounds,
    )


# Keep counts as options of a step: static, so hashable.
FixedCounts = tuple[tuple[str, int], ...]


def make_hsadmm(recipe: Recipe) -> Method:
    """Builds the H-SADMM method."""
    config: HsadmmConfig = recipe.settings
    parameters = parameters_of(recipe)
    core = Hsadmm(
        recipe.inner,
        recipe.groups,
        recipe.keep_counts,
        parameters,
        config.sync_period,
        config.device_level,
        recipe.axes,
        recipe.learning_rate,
        streaming=streaming_of(
            recipe.config, config.sync_period, 1.0 - parameters.prox_strength
        ),
        slicing=recipe.slicing,
    )
    return consensus_method(core, recipe, prunes=True)


def consensus_method(core: Hsadmm, recipe: Recipe, prunes: bool) -> Method:
    """What all methods share whose copies meet in a consensus every so many steps."""
    placements = state_placements(core.device_level, core.slicing is not None)
    if core.slicing is not None and core.streaming is not None:
        placements = placements._replace(flight=FLIGHT_IN_SLICES)
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

    traffic = _Traffic(core, recipe)
    return Method(
        params_placement=state_placements(core.device_level).inner_state,
        opt_placement=placements,
        transform=optax.GradientTransformationExtraArgs(core.init, update),
        sync_period=core.sync_period,
        is_streaming=streaming is not None,
        step_options=options,
        exchange=exchange,
        network=network,
        masks=lambda state: state.masks,
        scores=core.scores if prunes else None,
        health=functools.partial(_health, core.parameters, core.axes),
        step_formula=traffic.step,
        exchange_formula=traffic.exchange,
        payload_elements=lambda counts: traffic.payload(counts)[0],
        position_bytes=lambda counts: traffic.payload(counts)[1],
        inner_state=lambda state: state.inner_state,
        with_inner=lambda state, inner: state._replace(inner_state=inner),
        wire=core.parameters.wire,
        prunes=prunes,
        removes_at_once=prunes
        and core.parameters.resets_copies
        and not core.parameters.fade,
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
        "mask_changes": state.num_changed.astype(jnp.float32),
    }
    for name, dual in (
        ("device_dual_norm", state.device_dual),
        ("host_dual_norm", state.host_dual),
        ("error_norm", state.error),
    ):
        if dual is not None:
            found[name] = norm(dual, axes)
    if state.movements is not None:
        found["round_cosine"] = state.movements.cosine
        if state.movements.average is not None:
            found["outer_step"] = law_step(form.outer_momentum, state.movements.average)
    if health.primal_by_group:
        found["primal_residual_by_group"] = health.primal_by_group
        found["dual_residual_by_group"] = health.dual_by_group
    return found


class _Traffic:
    """What H-SADMM must send, from sizes alone."""

    def __init__(self, core: Hsadmm, recipe: Recipe) -> None:
        self.core = core
        self.shapes = recipe.shapes
        self.layouts = layouts_of(core.groups, recipe.shapes)
        self.slicing = recipe.slicing
        self.num_channels = sum(group.size for group in core.groups)
        count = 1 if core.streaming is None else core.streaming.num_fragments
        self.fragments = fragments_of(recipe.own_shapes, count)

    def sent_channels(
        self, keep_counts: Mapping[str, int], kind: RoundKind
    ) -> tuple[Layouts, Mapping[str, int]]:
        """Channels that one round sends: all of them while some only fade."""
        if kind == "moving" and self.core.parameters.fade:
            keep_counts = {group.name: group.size for group in self.core.groups}
        return self.layouts, keep_counts

    def sizes(
        self,
        keep_counts: Mapping[str, int],
        kind: RoundKind = "frozen",
        paths: Iterable[str] | None = None,
    ) -> dict[int, int]:
        """Elements of all compact leaves, or of some, of so many axes."""
        layouts, counts = self.sent_channels(keep_counts, kind)
        if self.slicing is not None:
            left = self.slicing.own_kept_shapes(layouts, counts)
        else:
            left = {
                path: kept_shape(shape, layouts.get(path), counts)
                for path, shape in self.shapes.items()
            }
        sizes: dict[int, int] = {}
        for path in left if paths is None else paths:
            num_axes = len(left[path])
            sizes[num_axes] = sizes.get(num_axes, 0) + math.prod(left[path])
        return sizes

    def slices_sent(
        self,
        keep_counts: Mapping[str, int],
        kind: RoundKind,
        paths: Collection[str],
    ) -> list[Collective]:
        """What slices of parameters tell each other to send what is kept of them."""
        slicing, form = self.slicing, self.core.parameters
        if slicing is None:
            return []
        layouts, counts = self.sent_channels(keep_counts, kind)
        own = {path: layouts[path] for path in paths if path in layouts}
        puts = 2 if form.error_decay else 1
        return slicing.taking(own, counts) + puts * slicing.putting(own, counts)

    def norms_of_slices(
        self, paths: Collection[str], more: int = 0
    ) -> list[Collective]:
        """What they tell each other for the residuals of a round, and more norms."""
        num_trees = 4 if any(path in self.layouts for path in paths) else 3
        if self.core.parameters.rho_host:
            num_trees = 6
        return self.numbers_of_slices([len(paths)] * (num_trees + more))

    def numbers_of_slices(self, counts: Iterable[int]) -> list[Collective]:
        """Sums over slices of so many numbers each."""
        slicing = self.slicing
        return [] if slicing is None else [slicing.summing(n) for n in counts if n]

    def payload(self, keep_counts: Mapping[str, int]) -> tuple[int, int]:
        """Of the largest part that is exchanged at once."""
        return max(
            payload_of(self.sizes(keep_counts, paths=paths), self.core.parameters)
            for paths in self.fragments
        )

    def step(
        self,
        mesh_shape: Mapping[str, int],
        sends: int | None = None,
        lands: int | None = None,
        keep_counts: FixedCounts | None = None,
    ) -> list[Collective]:
        is_consensus = self.core.device_level == "consensus"
        sent = []
        if not is_consensus:
            sent += device_sum(dense_size(self.shapes), mesh_shape)
        criterion = self.core.parameters.criterion
        if uses_gradients(criterion):
            count = 1 if criterion == "taylor" else 3
            sent += self.numbers_of_slices([count * self.num_channels])
        if lands is not None:
            sent += self.norms_of_slices(self.fragments[lands], 1)
        if sends is None:
            return sent
        paths = self.fragments[sends]
        if is_consensus:
            size = dense_size({path: self.shapes[path] for path in paths})
            sent += device_sum(size, mesh_shape)
        counts = self.core.keep_counts if keep_counts is None else dict(keep_counts)
        sizes = self.sizes(counts, paths=paths)
        form = self.core.parameters
        sent += self.slices_sent(counts, "frozen", paths)
        return sent + sent_differences(sizes, form, mesh_shape, "frozen")

    def exchange(
        self,
        mesh_shape: Mapping[str, int],
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> list[Collective]:
        form = self.core.parameters
        is_scored = kind != "frozen"
        sent = []
        if self.core.device_level == "consensus":
            num_copies = 2 if form.dual_decay else 1
            num_elements = num_copies * dense_size(self.shapes)
            if form.adapt == "residual":
                sent += device_sum(4, mesh_shape)
            sent += device_sum(num_elements, mesh_shape)
            if is_scored and uses_gradients(form.criterion):
                sent += device_sum(self.num_channels, mesh_shape)
        if form.adapt == "residual":
            sent += host_sum(4, mesh_shape)
        if is_scored:
            sent += host_sum(self.num_channels, mesh_shape)
        sizes = self.sizes(keep_counts, kind)
        sent += self.slices_sent(keep_counts, kind, self.shapes)
        if not (is_scored and form.criterion == "taylor"):
            sent += self.numbers_of_slices([self.num_channels])
        sent += self.norms_of_slices(self.shapes)
        if form.outer != "fixed":
            sent += self.numbers_of_slices([len(self.shapes)] * 2 + [1])
        if self.core.streaming is not None and self.core.streaming.keeps_means:
            for paths in self.fragments:
                sent += self.norms_of_slices(paths, 1)
        return sent + sent_differences(sizes, form, mesh_shape, kind)


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
