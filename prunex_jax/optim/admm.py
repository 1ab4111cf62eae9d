"""The algorithm of hierarchical structured ADMM: local steps, rounds, duals, penalties.

Means come from `comm`, channels and their choice from `channels` and `sparsity`; it
knows no trainer. `optim.hsadmm` wraps it for optax. One parameterised core covers the
published form and the forms that were found to work better; see `optim.presets`.

Problem (hosts i, devices j): minimise sum_ij f_ij(theta_ij) subject to
theta_ij = z_i, z_i = z, z_i in S, where S keeps at most K_g channels of every channel
group g alive.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.channels import (
    ChannelGroup,
    Layouts,
    Masks,
    keep_indices_of,
    layouts_of,
    mask_channels,
    mask_of,
    put_channels,
    sum_squares_by_channel,
    take_channels,
)
from prunex_jax.comm import (
    axis_size,
    mean_over_devices,
    mean_over_hosts,
    sum_over_hosts,
    vary,
)
from prunex_jax.errors import UserError
from prunex_jax.optim.presets import HsadmmParameters
from prunex_jax.sparsity import choose_keep_indices
from prunex_jax.trees import PyTree, flatten_by_path

# moving: masks follow the scores. freeze: they are chosen one last time, and the copies
# are set to the consensus. frozen: masks stay, no scores are exchanged.
RoundKind = Literal["moving", "freeze", "frozen"]


class Residuals(NamedTuple):
    """ADMM residuals of the last round (Boyd et al., 2011), as norms.

    Placed like the parameters: each copy has its own.
    """

    primal_device: jax.Array  # float32[]: ||theta_ij - z_i||
    dual_device: jax.Array  # float32[]: rho_device ||z_i - previous z_i||
    primal_host: jax.Array  # float32[]: ||z_i - z||
    dual_host: jax.Array  # float32[]: rho_host ||z - previous z||


class HsadmmState(NamedTuple):
    """State of H-SADMM; parts that a form does not use are None.

    "As params" means per_host for device_level "gradient", per_device for "consensus".
    """

    num_steps: jax.Array  # int32[], replicated: local steps done
    num_rounds: jax.Array  # int32[], replicated
    inner_state: PyTree  # of the inner optimizer, as params
    global_consensus: PyTree  # z, replicated
    masks: dict[str, jax.Array]  # bool[size] per group, replicated; True means kept
    outer_trace: PyTree | None  # momentum of z, replicated
    device_dual: PyTree | None  # u_ij scaled, as params
    host_consensus: PyTree | None  # z_i, per_host; None where z_i = z
    host_dual: PyTree | None  # v_i scaled, per_host
    rho_device: jax.Array  # float32[], replicated
    rho_host: jax.Array  # float32[], replicated
    residuals: Residuals  # of the last round, as params
    num_changed: jax.Array  # int32[], replicated: channels the last round flipped


@dataclasses.dataclass(frozen=True, eq=False)
class Hsadmm:
    """The core: local update and round, for callers who choose when to do which.

    `optim.hsadmm` makes an optax transformation of it and explains the arguments.
    """

    inner: optax.GradientTransformation
    groups: Sequence[ChannelGroup]
    keep_counts: Mapping[str, int]
    parameters: HsadmmParameters
    sync_period: int = 4
    device_level: Literal["gradient", "consensus"] = "gradient"
    host_axis: str | None = None
    device_axis: str | None = None
    learning_rate: optax.ScalarOrSchedule = 1.0
    freeze_round: int | None = None

    def init(self, params: PyTree) -> HsadmmState:
        """Starts with every copy and every consensus at `params`, duals at zero.

        Args:
          params: The same on every host and device.
        Returns:
          The state.
        """
        form = self.parameters
        zeros = jax.tree.map(jnp.zeros_like, params)
        nothing = jnp.zeros((), jnp.float32)
        return HsadmmState(
            num_steps=jnp.zeros((), jnp.int32),
            num_rounds=jnp.zeros((), jnp.int32),
            inner_state=self.inner.init(params),
            global_consensus=jax.tree.map(jnp.array, params),
            masks={group.name: jnp.ones(group.size, bool) for group in self.groups},
            outer_trace=zeros if form.outer_momentum else None,
            device_dual=zeros if form.dual_decay else None,
            host_consensus=jax.tree.map(jnp.array, params) if form.rho_host else None,
            host_dual=zeros if form.rho_host else None,
            rho_device=jnp.asarray(form.rho_device, jnp.float32),
            rho_host=jnp.asarray(form.rho_host, jnp.float32),
            residuals=Residuals(nothing, nothing, nothing, nothing),
            num_changed=jnp.zeros((), jnp.int32),
        )

    def local_update(
        self, grads: PyTree, state: HsadmmState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, HsadmmState]:
        """One local step: the inner optimizer, and the pull where there is one.

            theta <- theta + inner(g) - rho_device * learning_rate * (theta - z_i + u)

        The pull stays outside the inner optimizer's momentum: inside it, together with
        a dual, it oscillates and collapses without any NaN.

        Args:
          grads: Gradients of the local loss, per_device.
          state: The state.
          params: theta, as the state's docstring says.
          **extra: For the inner optimizer.
        Returns:
          Updates for `optax.apply_updates`, and the state.
        Collectives:
          device_level "gradient": one sum over `device_axis` of all gradients.
        """
        if self.device_level == "gradient":
            grads = mean_over_devices(grads, self.device_axis)
        inner = optax.with_extra_args_support(self.inner)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        if self.parameters.rho_device:
            pull = jnp.minimum(
                self._learning_rate(state.num_steps) * state.rho_device, 1.0
            )
            gap = optax.tree.sub(params, _host_level(state))
            offset = _add(gap, state.device_dual)
            updates = optax.tree.add_scale(updates, -pull, offset)
        return updates, state._replace(
            inner_state=inner_state, num_steps=state.num_steps + 1
        )

    def exchange(
        self,
        params: PyTree,
        state: HsadmmState,
        *,
        keep_counts: Mapping[str, int] | None = None,
        kind: RoundKind = "moving",
    ) -> tuple[PyTree, HsadmmState]:
        """One round: agree on channels, average the kept ones, pull every copy.

            host    a_i = (P rho_device mean_j(theta_ij + u_ij) + rho_host (z - v_i))
                          / (P rho_device + rho_host)       [mean_j(theta_ij + u_ij)]
            masks   K_g channels of largest sum_i ||mean_j theta_ij||^2; never revived
            global  zbar = z + mean_i(mask (a_i + v_i) - z),  on compact arrays only
                    d = z - zbar;  o <- beta o + d;  z <- z - alpha (d + beta o)
            duals   u_ij <- gamma u_ij + theta_ij - z_i;    v_i <- v_i + z_i - z
            copies  theta_ij <- theta_ij - kappa (theta_ij - z_i + u_ij)

        Without `rho_host`, z_i = z and v_i = 0 (in brackets).
        When the mask changes, z, z_i, v_i and o are zero outside it from this round on,
        and with kappa = 1 so is the inner optimizer's state; u_ij stays, because it is
        what drives dead entries of theta_ij to zero. In a "freeze" round, theta_ij <- z
        and the duals and all dead entries of the inner state become zero.

        Args:
          params: theta.
          state: The state.
          keep_counts: Static K_g per group; None takes the final ones.
          kind: Whether masks move, move for the last time, or stay.
        Returns:
          theta and the state after the round.
        Collectives:
          device_level "consensus": a sum over `device_axis` of all of theta + u and
          theta. Over hosts, each as `comm.mean_over_hosts`: one float32 per channel,
          unless frozen; and the kept channels in `wire_dtype`.
        """
        form = self.parameters
        layouts = self._layouts(params)
        before = self._balance(state) if form.adapt == "residual" else state
        theta, target = self._host_means(params, before)
        counts = self.keep_counts if keep_counts is None else keep_counts
        keep_indices = self._choose(theta, before, layouts, counts, kind)
        masks = {
            name: mask_of(keep_indices[name], mask.size)
            for name, mask in before.masks.items()
        }
        after = self._global_step(target, before, layouts, keep_indices, masks)
        params, after = self._pull(params, before, after)
        if kind == "freeze":
            params, after = self._harden(params, after)
        if kind == "freeze" or (kind == "moving" and form.prox_strength == 1):
            inner_state = self._mask_inner(after.inner_state, params, layouts, masks)
            after = after._replace(inner_state=inner_state)
        return params, after

    def update(
        self,
        grads: PyTree,
        state: HsadmmState,
        params: PyTree | None = None,
        *,
        sync: bool | None = None,
        keep_counts: Mapping[str, int] | None = None,
        kind: RoundKind | None = None,
        **extra: Any,
    ) -> tuple[PyTree, HsadmmState]:
        """The optax update: a local step, then a round where one is due.

        Args:
          grads: Gradients of the local loss, per_device.
          state: The state.
          params: theta; required.
          sync: Static: whether a round follows. None lets the step count decide inside
            the program, every `sync_period` steps.
          keep_counts: Static K_g of this round; None takes the final ones.
          kind: Static kind of the round. None lets the round count decide inside the
            program: moving before `freeze_round`, then freeze, then frozen.
          **extra: For the inner optimizer.
        Returns:
          Updates for `optax.apply_updates`, and the state.
        Collectives:
          Those of `local_update`, and of `exchange` where a round is due.
        """
        if params is None:
            raise UserError("hsadmm needs params: call update(grads, state, params)")
        updates, state = self.local_update(grads, state, params, **extra)
        moved = optax.apply_updates(params, updates)

        def round_(operand: tuple[PyTree, HsadmmState]) -> tuple[PyTree, HsadmmState]:
            return self._round_of_kind(operand, keep_counts, kind)

        if sync is None:
            is_due = state.num_steps % self.sync_period == 0
            moved, state = jax.lax.cond(is_due, round_, lambda x: x, (moved, state))
        elif sync:
            moved, state = round_((moved, state))
        return optax.tree.sub(moved, params), state

    def _round_of_kind(
        self,
        operand: tuple[PyTree, HsadmmState],
        keep_counts: Mapping[str, int] | None,
        kind: RoundKind | None,
    ) -> tuple[PyTree, HsadmmState]:
        def run(chosen: RoundKind) -> Callable[..., tuple[PyTree, HsadmmState]]:
            return lambda x: self.exchange(*x, keep_counts=keep_counts, kind=chosen)

        if kind is None and self.freeze_round is not None:
            behind = jnp.sign(operand[1].num_rounds - self.freeze_round) + 1
            kinds: tuple[RoundKind, ...] = ("moving", "freeze", "frozen")
            return jax.lax.switch(behind, [run(k) for k in kinds], operand)
        return run(kind or "moving")(operand)

    def _learning_rate(self, count: jax.Array) -> jax.Array | float:
        rate = self.learning_rate
        return rate(count) if callable(rate) else rate

    def _layouts(self, params: PyTree) -> Layouts:
        shapes = {path: x.shape for path, x in flatten_by_path(params).items()}
        return layouts_of(self.groups, shapes)

    def _num_copies(self) -> int:
        """Copies of theta per host."""
        is_consensus = self.device_level == "consensus"
        return axis_size(self.device_axis) if is_consensus else 1

    def _host_means(self, params: PyTree, state: HsadmmState) -> tuple[PyTree, PyTree]:
        """mean_j theta_ij, and a_i before the projection; both per_host."""
        theta, with_dual = params, _add(params, state.device_dual)
        if self.device_level == "consensus":
            if state.device_dual is None:
                theta = with_dual = mean_over_devices(params, self.device_axis)
            else:
                theta, with_dual = mean_over_devices(
                    (params, with_dual), self.device_axis
                )
        if state.host_dual is None:
            return theta, with_dual
        weight = state.rho_host / (self._num_copies() * state.rho_device)
        anchor = optax.tree.sub(state.global_consensus, state.host_dual)
        return theta, jax.tree.map(
            lambda a, b: (a + weight * b) / (1 + weight), with_dual, anchor
        )

    def _choose(
        self,
        theta: PyTree,
        state: HsadmmState,
        layouts: Layouts,
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> dict[str, jax.Array]:
        if kind == "frozen":
            return {
                name: keep_indices_of(mask, keep_counts[name])
                for name, mask in state.masks.items()
            }
        scores = self.scores(theta, layouts)
        return choose_keep_indices(scores, keep_counts, alive=state.masks)

    def scores(self, theta: PyTree, layouts: Layouts) -> dict[str, jax.Array]:
        """Squared channel norms of theta, summed over hosts; the same on every host.

        theta is scored, not theta + u: the dual grows on dead channels and would lift
        them back.

        Collectives:
          One float32 per channel over hosts, as `comm.sum_over_hosts`.
        """
        local = sum_squares_by_channel(theta, layouts)
        return sum_over_hosts(local, self.host_axis, self.device_axis)

    def _global_step(
        self,
        target: PyTree,
        state: HsadmmState,
        layouts: Layouts,
        keep_indices: Mapping[str, jax.Array],
        masks: Masks,
    ) -> HsadmmState:
        """Projects a_i, averages its kept differences to z over hosts, moves z and v.

        Differences are sent rather than values: they have the same mean, and lose less
        in a narrow wire type.
        """

        def masked(tree: PyTree) -> PyTree:
            return mask_channels(tree, layouts, masks)

        z, host_dual = masked(state.global_consensus), masked(state.host_dual)
        sent = take_channels(
            optax.tree.sub(_add(target, host_dual), z), layouts, keep_indices
        )
        mean = mean_over_hosts(
            sent, self.host_axis, self.device_axis, self.parameters.wire_dtype
        )
        moved = put_channels(mean, layouts, keep_indices)
        z, trace = self._outer_step(z, moved, masked(state.outer_trace))
        changed = [jnp.sum(masks[name] != state.masks[name]) for name in masks]
        state = state._replace(
            num_rounds=state.num_rounds + 1,
            global_consensus=z,
            outer_trace=trace,
            masks=dict(masks),
            num_changed=jnp.asarray(sum(changed), jnp.int32),
        )
        if host_dual is None:
            return state
        host_consensus = masked(target)
        return state._replace(
            host_consensus=host_consensus,
            host_dual=_add(host_dual, optax.tree.sub(host_consensus, z)),
        )

    def _outer_step(
        self, z: PyTree, moved: PyTree, trace: PyTree | None
    ) -> tuple[PyTree, PyTree | None]:
        """Nesterov step of z along `moved`, which is -d in `exchange`'s equations."""
        alpha, beta = self.parameters.outer_step, self.parameters.outer_momentum
        if trace is None:
            return optax.tree.add_scale(z, alpha, moved), None
        trace = optax.tree.add_scale(moved, beta, trace)
        ahead = optax.tree.add_scale(moved, beta, trace)
        return optax.tree.add_scale(z, alpha, ahead), trace

    def _pull(
        self, params: PyTree, before: HsadmmState, after: HsadmmState
    ) -> tuple[PyTree, HsadmmState]:
        """Device duals, the proximal pull, and the residuals of the round."""
        kappa, gamma = self.parameters.prox_strength, self.parameters.dual_decay
        level, z = _host_level(after), after.global_consensus
        gap = optax.tree.sub(params, level)
        dual = before.device_dual
        if dual is not None:
            dual = optax.tree.add_scale(gap, gamma, dual)
        residuals = Residuals(
            optax.tree.norm(gap),
            after.rho_device * _distance(level, _host_level(before)),
            _distance(level, z),
            after.rho_host * _distance(z, before.global_consensus),
        )
        if kappa == 1 and dual is None:  # exactly, where x - (x - z) would round
            params = vary(level, self._copy_axes())
        elif kappa:
            params = optax.tree.add_scale(params, -kappa, _add(gap, dual))
        residuals = vary(residuals, self._copy_axes())
        return params, after._replace(device_dual=dual, residuals=residuals)

    def _copy_axes(self) -> tuple[str | None, ...]:
        """Mesh axes over which copies of theta differ."""
        is_consensus = self.device_level == "consensus"
        return (self.host_axis, self.device_axis if is_consensus else None)

    def _harden(self, params: PyTree, state: HsadmmState) -> tuple[PyTree, HsadmmState]:
        """theta := z, z_i := z, duals zero: only kept channels are left anywhere."""
        z = state.global_consensus
        host_consensus = None
        if state.host_consensus is not None:
            host_consensus = vary(z, (self.host_axis,))
        return vary(z, self._copy_axes()), state._replace(
            device_dual=optax.tree.zeros_like(state.device_dual),
            host_dual=optax.tree.zeros_like(state.host_dual),
            host_consensus=host_consensus,
        )

    def _mask_inner(
        self, inner_state: PyTree, params: PyTree, layouts: Layouts, masks: Masks
    ) -> PyTree:
        """Zeroes dead channels of what the inner optimizer keeps per parameter."""
        kept = mask_channels(
            jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), params),
            layouts,
            masks,
        )
        return optax.tree_map_params(
            self.inner,
            lambda moment, alive: jnp.where(alive > 0, moment, jnp.zeros_like(moment)),
            inner_state,
            kept,
        )

    def _balance(self, state: HsadmmState) -> HsadmmState:
        """Residual balancing (Boyd et al., 2011, section 3.4.1), one round late.

        Doubles a penalty whose primal residual exceeds ten times the dual one, halves
        it in the opposite case, and rescales the scaled dual by old / new.
        """
        residuals = state.residuals
        if self.device_level == "consensus":
            residuals = mean_over_devices(residuals, self.device_axis)
        residuals = mean_over_hosts(residuals, self.host_axis, self.device_axis)

        def factor(primal: jax.Array, dual: jax.Array) -> jax.Array:
            up = jnp.where(primal > 10 * dual, 2.0, 1.0)
            return jnp.where(dual > 10 * primal, 0.5, up)

        device = factor(residuals.primal_device, residuals.dual_device)
        host = factor(residuals.primal_host, residuals.dual_host)
        return state._replace(
            rho_device=state.rho_device * device,
            rho_host=state.rho_host * host,
            device_dual=optax.tree.scale(1 / device, state.device_dual),
            host_dual=optax.tree.scale(1 / host, state.host_dual),
        )


def _host_level(state: HsadmmState) -> PyTree:
    """z_i, which is z where the two levels are collapsed."""
    if state.host_consensus is None:
        return state.global_consensus
    return state.host_consensus


def _add(tree: PyTree, other: PyTree | None) -> PyTree:
    """Adds a part of the state that may be absent."""
    return tree if other is None else optax.tree.add(tree, other)


def _distance(left: PyTree, right: PyTree) -> jax.Array:
    return optax.tree.norm(optax.tree.sub(left, right))
