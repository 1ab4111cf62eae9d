"""H-SADMM as an optax transformation, for any training loop.

With axis names it works inside the caller's own `shard_map`; without, it needs no mesh.
The algorithm itself is `optim.admm`.
"""

from collections.abc import Mapping, Sequence

import optax

from prunex_jax.channels import ChannelGroup
from prunex_jax.mesh import ALONE, MeshAxes
from prunex_jax.methods.hsadmm.copies import DeviceLevel
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.presets import HsadmmParameters, preset


def hsadmm(
    inner: optax.GradientTransformation,
    groups: Sequence[ChannelGroup],
    keep_counts: Mapping[str, int],
    *,
    sync_period: int = 4,
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
      sync_period: Local steps per round.
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
    if isinstance(parameters, str):
        parameters = preset(parameters, sync_period)
    core = Hsadmm(
        inner,
        tuple(groups),
        dict(keep_counts),
        parameters,
        sync_period,
        device_level,
        axes,
        learning_rate,
        freeze_round,
    )
    return optax.GradientTransformationExtraArgs(core.init, core.update)
