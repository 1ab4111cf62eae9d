"""Hierarchical structured ADMM: what a local step and a round do, and in which order.

A round has three stages, each with parameters and a state of its own: `choose` decides
which channels stay, `send` averages over hosts how far they went, and `move` changes
the consensus, duals and copies. One core covers the published form and the forms that
were found to work better, see `presets`; `hsadmm` makes an optax transformation of it.

Problem (hosts i, devices j): minimise sum_ij f_ij(theta_ij) subject to
theta_ij = z_i, z_i = z, z_i in S, where S keeps at most K_g channels of every channel
group g alive.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_whole_number
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelGroup, Layouts, mask_channels
from prunex_jax.comm import Slicing, check_local, mean_over_devices
from prunex_jax.mesh import ALONE, MeshAxes, vary, vary_as
from prunex_jax.mesh.ordering import after
from prunex_jax.methods.hsadmm import choose, move
from prunex_jax.methods.hsadmm.arithmetic import add, add_scaled
from prunex_jax.methods.hsadmm.presets import HsadmmParameters, preset
from prunex_jax.methods.hsadmm.round import Copies, DeviceLevel, Round
from prunex_jax.methods.hsadmm.send import Flight, SendState, send
from prunex_jax.methods.hsadmm.state import HsadmmState
from prunex_jax.methods.hsadmm.streaming import (
    Fragments,
    Streaming,
    check_streams,
)
from prunex_jax.methods.method import RoundKind
from prunex_jax.methods.moments import mask_moments


@dataclasses.dataclass(frozen=True, eq=False)
class Hsadmm:
    """The core: local update and round, for callers who choose when to do which.

    `hsadmm` makes an optax transformation of it and explains the arguments.
    """

    inner: optax.GradientTransformation
    groups: Sequence[ChannelGroup]
    keep_counts: Mapping[str, int]
    parameters: HsadmmParameters
    sync: SyncSchedule
    device_level: DeviceLevel = "gradient"
    axes: MeshAxes = ALONE
    learning_rate: optax.ScalarOrSchedule | None = None
    freeze_round: int | None = None
    streaming: Streaming | None = None  # Rounds in fragments, where `update` says so.
    # How parameters and state lie in slices over devices; None if they are whole.
    slicing: Slicing | None = None

    def __post_init__(self) -> None:
        """Refuses arguments that cannot work, before anything is traced."""
        _check_counts(self.groups, self.keep_counts)
        _check_slices(self)
        if self.device_level not in ("gradient", "consensus"):
            raise UserError(
                f"device_level={self.device_level!r} must be gradient or consensus"
            )
        rho_device = self.parameters.moving.rho_device
        if rho_device and self.learning_rate is None:
            raise UserError(
                f"rho_device={rho_device} pulls in proportion to the "
                "learning rate: pass that of the inner optimizer as learning_rate"
            )
        if self.streaming is not None:
            check_streams(self.parameters)

    @property
    def copies(self) -> Copies:
        """Where copies of the parameters live."""
        return Copies(self.device_level, self.axes, self.slicing)

    def init(self, params: PyTree) -> HsadmmState:
        """Starts with every copy and every consensus at `params`, duals at zero.

        Args:
          params: Floating leaves, the same on every host and device. Inside `shard_map`
            they are typed as replicated; theta is `mesh.vary` of them.
        Returns:
          The state.
        """
        form, copies = self.parameters, self.copies
        zeros = jax.tree.map(jnp.zeros_like, params)
        on_hosts = (copies.axes.host,)
        return HsadmmState(
            num_steps=jnp.zeros((), jnp.int32),
            num_rounds=jnp.zeros((), jnp.int32),
            inner_state=copies.spread(self.inner.init(params)),
            channels=choose.start_channels(
                self.groups, form.choosing.criterion, copies
            ),
            sending=SendState(
                vary(zeros, on_hosts) if form.sending.error_decay else None,
                Flight(jnp.zeros((), jnp.int32)) if self.streaming else None,
            ),
            consensus=move.start_consensus(params, form.moving, copies),
            residuals=copies.spread(move.zero_residuals()),
            health=copies.spread(move.zero_health(group.name for group in self.groups)),
        )

    def local_update(
        self, grads: PyTree, state: HsadmmState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, HsadmmState]:
        """One local step: the inner optimizer, and the pull where there is one.

            theta <- theta + inner(g) - c (theta - z_i + u),
            c = min(rho_device * learning rate, 1)

        The pull stays outside the inner optimizer's momentum: inside it, together with
        a dual, it oscillates and collapses without any NaN.

        Dead channels stay exactly zero, whatever the inner optimizer and the activation
        do: gradients of what reads a dead channel need not vanish (a sigmoid of zero is
        not zero). In forms that do not set copies to z, channels die at the freeze.

        Args:
          grads: Gradients of the local loss, per_device.
          state: The state.
          params: theta, as the state's docstring says.
          **extra: For the inner optimizer.
        Returns:
          Updates for `optax.apply_updates`, and the state.
        Raises:
          UserError: The gradients are sums over the mesh; see `comm.check_local`.
        Collectives:
          device_level "gradient": one sum over `device_axis` of all gradients. Of
          slices, where the criterion looks at gradients, a few float32 per channel.
        """
        form, layouts = self.parameters, self._layouts(params)
        check_local(grads, self.axes)
        if self.device_level == "gradient":
            grads = mean_over_devices(grads, self.axes)
        living = choose.living_of(state.channels, form)
        grads = mask_channels(grads, layouts, living)
        channels = choose.after_gradients(
            state.channels, params, grads, state.num_steps, layouts, self.axes
        )
        inner = optax.with_extra_args_support(self.inner)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        if form.moving.rho_device:
            consensus = state.consensus
            pull = jnp.minimum(self._rate(state.num_steps) * consensus.rho_device, 1.0)
            gap = optax.tree.sub(params, consensus.of_host)
            updates = add_scaled(updates, -pull, add(gap, consensus.device_dual))
        updates = mask_channels(updates, layouts, living)
        return updates, state._replace(
            inner_state=inner_state,
            channels=channels,
            num_steps=state.num_steps + 1,
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
            masks   K_g channels of largest sum_i ||mean_j theta_ij||^2, or of another
                    criterion; never revived
            global  z_i = mask a_i;  s_i = z_i + v_i - z + delta e_i, compact arrays
                    zbar = z + mean_i(sent_i);  e_i <- s_i - sent_i
                    d = z - zbar;  o <- beta o + d;  z <- z - alpha (d + beta o)
            duals   u_ij <- gamma u_ij + theta_ij - z_i;    v_i <- v_i + z_i - z
            copies  theta_ij <- theta_ij - kappa (theta_ij - z_i + u_ij)

        Without `rho_host`, z_i = z and v_i = 0 (in brackets). P is the number of copies
        per host, so 1 for device_level "gradient". The state holds -o. Without
        `error_decay`, delta, there is no e_i. Otherwise sent_i is s_i on the wire,
        or the largest numbers of it. With outer="law", alpha follows from the cosines
        of successive d, see `outer`.

        When the mask changes, z, z_i, v_i, e_i and o are zero outside it from then on;
        where copies are set to z (kappa = 1, no dual), so are they and the moments of
        the inner optimizer. Otherwise theta and u stay, and u drives the dead entries
        of theta to zero. A "freeze" round ends with theta = z_i = z, duals zero and no
        dead entries among the moments.

        Args:
          params: theta.
          state: The state.
          keep_counts: Static K_g per group; None takes the final ones. They should not
            grow from round to round: no channel is revived to fill them. A "frozen"
            round takes those of the round before.
          kind: Whether masks move, move for the last time, or stay.
        Returns:
          theta and the state after the round.
        Collectives:
          device_level "consensus": a sum over `device_axis` of theta, and of theta + u
          if there is u; where the criterion looks at gradients, of one float32 per
          channel, unless frozen. Over hosts, each as `comm.mean_over_hosts`: one
          float32 per channel, unless frozen; and the kept channels as `send` says.
        """
        form, copies, layouts = self.parameters, self.copies, self._layouts(params)
        counts = self._counts(keep_counts)
        this = Round(form, copies, layouts, counts, kind)
        channels, before = state.channels, state.consensus
        theta, target = move.host_means(params, before, copies)

        choice = choose.choose(theta, target, before.values, channels, this)
        channels = choose.after_choice(channels, choice, this)

        difference = move.difference_to_consensus(target, choice, before)
        error = state.sending.error
        moved, error = send(difference, choice, error, state.num_rounds, this)

        consensus = move.move_consensus(target, moved, choice, before, this)
        consensus, found = move.settle(params, consensus, before, choice, self.axes)
        params, consensus, residuals, health = move.pull_copies(
            params, consensus, found, choice, this
        )
        inner_state = state.inner_state
        if kind == "freeze":
            params, consensus = move.harden(consensus, copies)
        if kind == "freeze" or (kind == "moving" and form.moving.resets_copies):
            inner_state = mask_moments(inner_state, params, layouts, channels.masks)
        flight = None if self.streaming is None else Flight(state.num_steps)
        return params, HsadmmState(
            num_steps=state.num_steps,
            num_rounds=state.num_rounds + 1,
            inner_state=inner_state,
            channels=channels,
            sending=SendState(error, flight),
            consensus=consensus,
            residuals=residuals,
            health=health,
        )

    def update(
        self,
        grads: PyTree,
        state: HsadmmState,
        params: PyTree | None = None,
        *,
        sync: bool | None = None,
        keep_counts: Mapping[str, int] | None = None,
        kind: RoundKind | None = None,
        sends: int | None = None,
        **extra: Any,
    ) -> tuple[PyTree, HsadmmState]:
        """The optax update: a local step, then a round where one is due.

        With `streaming`, a step may have a fragment's part of a round instead; see
        `Streaming.options_in`.

        Args:
          grads: Gradients of the local loss, per_device.
          state: The state.
          params: theta; required.
          sync: Static: whether a round follows. None lets the step count decide inside
            the program, as `sync` says.
          keep_counts: Static K_g of this round; None takes the final ones.
          kind: Static kind of the round. None lets the round count decide inside the
            program: moving before `freeze_round`, then freeze, then frozen.
          sends: Static: the fragment whose mean is taken in this step, and applied at
            its end; it needs sync=False, and masks that hold `keep_counts`.
          **extra: For the inner optimizer.
        Returns:
          Updates for `optax.apply_updates`, and the state. Adding the updates of a
          round rounds, so copies equal z to the last bit only after `exchange`; dead
          channels become exactly zero either way.
        Raises:
          UserError: `params` is missing, or the gradients are sums over the mesh.
        Collectives:
          Those of `local_update`, and of `exchange` where a round is due; with `sends`,
          as `Fragments.send`, which with a delay do not depend on `grads`.
        """
        if params is None:
            raise UserError("hsadmm needs params: call update(grads, state, params)")
        if sends is not None:
            fragments, step = self._fragments(keep_counts), (grads, state, params)
            return self._streamed(fragments, step, sends, **extra)
        updates, state = self.local_update(grads, state, params, **extra)

        def round_(operand: tuple[PyTree, HsadmmState]) -> tuple[PyTree, HsadmmState]:
            updates, state = operand
            moved = optax.apply_updates(params, updates)
            moved, state = self._round_of_kind(moved, state, keep_counts, kind)
            step = optax.tree.cast_like(optax.tree.sub(moved, params), updates)
            return vary_as((step, state), operand)

        if sync is None:
            is_due = self.sync.is_due_after(state.num_steps)
            return jax.lax.cond(is_due, round_, lambda x: x, (updates, state))
        return round_((updates, state)) if sync else (updates, state)

    def _streamed(
        self,
        fragments: Fragments,
        step: tuple[PyTree, HsadmmState, PyTree],
        number: int,
        **extra: Any,
    ) -> tuple[PyTree, HsadmmState]:
        """A local step, and a fragment that is sent beside or after it."""
        grads, state, params = step
        is_beside = bool(fragments.streaming.delay)
        if is_beside:
            arrival, state = fragments.send(number, params, state)
            # Devices sum gradients once hosts are done: XLA runs one sum at a time on
            # GPUs, and would put this one behind the passes of the network, beside
            # nothing, where it now is beside them.
            grads = after(jax.tree.leaves(arrival.mean), grads)
        updates, state = self.local_update(grads, state, params, **extra)
        moved = optax.apply_updates(params, updates)
        if not is_beside:
            arrival, state = fragments.send(number, moved, state)
        moved, state = fragments.land(number, arrival, moved, state)
        return optax.tree.cast_like(optax.tree.sub(moved, params), updates), state

    def _round_of_kind(
        self,
        params: PyTree,
        state: HsadmmState,
        keep_counts: Mapping[str, int] | None,
        kind: RoundKind | None,
    ) -> tuple[PyTree, HsadmmState]:
        def run(chosen: RoundKind) -> Callable[..., tuple[PyTree, HsadmmState]]:
            counts = keep_counts
            # A caller may hold as different what all hosts agree on.
            return lambda *x: vary_as(
                self.exchange(*x, keep_counts=counts, kind=chosen), x
            )

        if kind is None and self.freeze_round is not None:
            stage = jnp.sign(state.num_rounds - self.freeze_round) + 1
            kinds: tuple[RoundKind, ...] = ("moving", "freeze", "frozen")
            return jax.lax.switch(stage, [run(k) for k in kinds], params, state)
        return run(kind or "moving")(params, state)

    def scores(self, params: PyTree, state: HsadmmState) -> dict[str, jax.Array]:
        """Scores of the channels of z by which groups compare.

        Args:
          params: theta, for shapes only.
          state: The state.
        Returns:
          float32[size] per group, replicated.
        Collectives:
          As `choose.network_scores`.
        """
        return choose.network_scores(
            state.consensus.values,
            state.channels,
            self._layouts(params),
            self.copies,
            self.parameters.choosing.criterion,
        )

    def _rate(self, count: jax.Array) -> jax.typing.ArrayLike:
        rate = self.learning_rate
        assert rate is not None, "checked in __post_init__"
        return rate(count) if callable(rate) else rate

    def _counts(self, keep_counts: Mapping[str, int] | None) -> Mapping[str, int]:
        return self.keep_counts if keep_counts is None else keep_counts

    def _fragments(self, keep_counts: Mapping[str, int] | None) -> Fragments:
        assert self.streaming is not None, "only streaming forms have fragments"
        return Fragments(
            self.streaming,
            self.parameters,
            tuple(self.groups),
            self._counts(keep_counts),
            self.copies,
        )

    def _layouts(self, params: PyTree) -> Layouts:
        return self.copies.layouts(self.groups, params)


def _check_slices(core: Hsadmm) -> None:
    """Refuses copies of single devices."""
    if core.slicing is None:
        return
    if core.device_level == "consensus":
        raise UserError(
            "device_level='consensus' gives every device parameters of its own, so "
            "they cannot lie in slices over devices; set topology.shard=none, or "
            "method.hsadmm.device_level=gradient"
        )


def _check_counts(
    groups: Sequence[ChannelGroup], keep_counts: Mapping[str, int]
) -> None:
    sizes = {group.name: group.size for group in groups}
    if set(sizes) != set(keep_counts):
        differing = sorted(set(sizes) ^ set(keep_counts))
        raise UserError(
            f"keep_counts and groups differ in {', '.join(differing)}: give one count "
            "per channel group"
        )
    for name, count in keep_counts.items():
        check_whole_number(f"keep_counts[{name!r}]", count)
        if not 1 <= count <= sizes[name]:
            raise UserError(
                f"keep_counts[{name!r}]={count} is outside [1, {sizes[name]}], the "
                "channels of that group"
            )


def hsadmm(
    inner: optax.GradientTransformation,
    groups: Sequence[ChannelGroup],
    keep_counts: Mapping[str, int],
    *,
    sync_period: int | SyncSchedule = 4,
    parameters: HsadmmParameters | str = "recommended",
    device_level: DeviceLevel = "gradient",
    axes: MeshAxes = ALONE,
    learning_rate: optax.ScalarOrSchedule | None = None,
    freeze_round: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes H-SADMM an optax transformation around any inner optimizer.

    Every update is a local step; every `sync_period`-th is followed by a round in which
    hosts agree on channels and average the kept ones.

    With axis names, `update` runs inside the caller's `shard_map` (or `vmap` with axis
    names, which simulates hosts on one device). Parameters and state differ between
    hosts there, so outside they have leading axes; `state_placements` says which, and
    `mesh.specs_of`, `enter` and `leave` do the rest. `jax.grad` must not sum over the
    mesh: differentiate `mesh.vary(params, axes.names)`.

    Args:
      inner: The local optimizer, learning rate included.
      groups: Channel groups of the parameters, from `channels.trace_channels`.
      keep_counts: Static K_g of every group, by name.
      sync_period: Local steps per round, or when rounds end, as `quadratic_schedule`
        says.
      parameters: The form: a name from `presets.PRESETS`, or the numbers.
      device_level: "gradient" averages gradients over the devices of a host in every
        step; "consensus" gives every device its own copy and dual.
      axes: Mesh axes of the caller; none is a single device.
      learning_rate: That of the inner optimizer, a number or a schedule of the step
        count: scales the pull of `rho_device`. Forms without rho_device do not use it.
      freeze_round: Round in which the masks are chosen for the last time; None never
        freezes. `update` also takes the kind of a round as an argument.
    Returns:
      A transformation whose `update` takes `sync`, `keep_counts` and `kind` as further
      arguments; see `Hsadmm.update`.
    Raises:
      UserError: Unknown preset, keep counts that do not fit the groups, or numbers that
        mean nothing together.
    Collectives:
      See `Hsadmm.local_update` and `Hsadmm.exchange`.
    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from prunex_jax.channels import trace_channels
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['a']) @ params['b']
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> params = {'a': jax.random.normal(keys[0], (4, 16)),
      ...           'b': jax.random.normal(keys[1], (16, 1))}
      >>> x = jax.random.normal(keys[2], (64, 4))
      >>> loss = lambda p: jnp.mean((apply(p, x) - x[:, :1]) ** 2)
      >>> groups = trace_channels(apply, params, x).groups
      >>> tx = hsadmm(optax.sgd(0.1), groups, {'a': 8}, freeze_round=5)
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> for _ in range(200):
      ...     params, state = step(params, state)
      >>> bool(loss(state.global_consensus) < 0.1), int(state.masks['a'].sum())
      (True, 8)

    References:
      Olama et al., PruneX, 2025, arXiv:2512.14628 (the two-level problem).
      Boyd et al., Distributed Optimization and Statistical Learning via ADMM, 2011.
    Differs from:
      The paper, unless parameters="paper": one level of consensus, penalties as pulls
      outside the momentum, an outer Nesterov step in place of duals. Channels are
      agreed on by summing scores over hosts; the paper's rule is not public.
    """
    sync = sync_period
    if not isinstance(sync, SyncSchedule):
        sync = SyncSchedule(check_whole_number("sync_period", sync))
    if (
        freeze_round is not None
        and check_whole_number("freeze_round", freeze_round) < 0
    ):
        raise UserError(
            f"freeze_round={freeze_round} is before the first round, which is 0; None "
            "never freezes"
        )
    if isinstance(parameters, str):
        parameters = preset(parameters, sync.period)
    core = Hsadmm(
        inner,
        tuple(groups),
        dict(keep_counts),
        parameters,
        sync,
        device_level,
        axes,
        learning_rate,
        freeze_round,
    )
    return optax.GradientTransformationExtraArgs(core.init, core.update)
