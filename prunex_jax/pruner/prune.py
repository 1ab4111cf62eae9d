"""Traces, chooses, cuts, repairs and certifies, in one call."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import check_settings
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelTrace, TraceOptions, trace_channels
from prunex_jax.pruner.goals import Goal, Table, counts_for, goal_of
from prunex_jax.pruner.networks import FullNetwork, full_network, in_float32
from prunex_jax.pruner.ranking import (
    Batches,
    Loss,
    OwnCriterion,
    Scores,
    check_criterion,
    estimates_damage,
    scores_of,
)
from prunex_jax.pruner.result import Pruned
from prunex_jax.shrink import Certificate, Cut, certify, make_cut
from prunex_jax.shrink import repair as refit
from prunex_jax.shrink.cost import (
    latency_cost,
    macs_cost,
    size_costs,
    small_calls,
    trace_limits,
)
from prunex_jax.sparsity import (
    CountLimits,
    Target,
    channel_costs,
    check_excludes,
    choose_keep_indices,
    comparable_scores,
    masks_of,
)
from prunex_jax.sparsity.settings import SparsityConfig
from prunex_jax.sparsity.targets import Cost


def prune(
    network: Any,
    *given: PyTree,
    sparsity: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    target: Target | None = None,
    keep: Table | None = None,
    criterion: str | OwnCriterion = "norm",
    budget: Literal["uniform", "global"] = "uniform",
    loss: Loss | None = None,
    batches: Iterable[tuple[PyTree, PyTree]] | None = None,
    repair: bool = False,
    statistics: PyTree | None = None,
    round_to: int = 8,
    multiples: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_group_sparsity: float = 1.0,
    scope: Literal["all", "inner"] = "all",
    seed: int = 0,
    check: bool = True,
    after: Pruned | None = None,
    progress: float = 1.0,
    **tracing: Any,
) -> Pruned:
    """Makes a network smaller, in one call.

    Exactly one of `sparsity`, `params`, `macs`, `bytes`, `latency`, `target` and `keep`
    says how small. Nothing is trained: `after` and `prune_iteratively` go on from what
    training of yours has made of an earlier result.

    Args:
      network: A function `apply(params, *inputs)`, or `apply(params, statistics,
        *inputs)`; a module of Flax NNX, Flax Linen, Equinox or PyTorch; or what
        `hk.transform` made. Modules of Equinox take one example, and are mapped over
        the batch.
      *given: Parameters and inputs of functions, variables and inputs of Linen's
        modules, inputs of modules that hold their parameters. Inputs are batches of
        examples; on them the small network is compared with the masked one.
      sparsity: Share of the channels of every group that goes.
      params: Share of the parameters that remains.
      macs: Share of the multiply-accumulates that remains.
      bytes: Share of the bytes of parameters that remains.
      latency: Share of the seconds of a call that remains; measured on this device.
      target: What may remain in any of these units, as a share or an amount.
      keep: Channels that stay (int), or their share (float), by wildcards of groups;
        other groups stay whole.
      criterion: What channels are ranked by: norm, scale, taylor, fisher or random
        (`pruner.ranking`), or a function (params, trace) -> scores by group.
      budget: uniform, the same share of every group; or global, ranked over all groups:
        taylor and fisher by what the loss loses per what a channel costs, norm and
        scale relative to their group's mean, others as they are.
      loss: (answers, targets) -> the mean loss, or that of every example; for taylor
        and fisher.
      batches: (inputs, targets) each, for the same, and for repair.
      repair: Whether what reads removed channels is refitted to those that stay, on the
        inputs of the batches, or without batches on the inputs given; see
        `shrink.repair`.
      statistics: Running statistics of a function that takes some.
      round_to: Kept counts are multiples of this where a group is wide enough.
      multiples: Other multiples for some groups, as `sparsity.multiples` of runs.
      exclude: Groups whose name contains one of these stay whole.
      max_group_sparsity: No group loses more than this share of its channels.
      scope: all, or inner: groups inside of a block only.
      seed: Of random scores.
      check: Whether a certificate that does not hold is an error.
      after: What an earlier call left of the same network. Channels that went stay
        gone; shares remain those of the whole network.
      progress: How much of the way is gone now, in (0, 1]: shares that remain are taken
        to this power.
      **tracing: Fields of `TraceOptions`, such as `freeze` and `factors`.
    Returns:
      The small network.
    Raises:
      UserError: It is not clear what is asked for, it is out of reach, nothing can be
        removed, or masked and small network differ.
    Example:
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> tree = {'in': jax.random.normal(keys[0], (3, 16)),
      ...         'out': jax.random.normal(keys[1], (16, 2))}
      >>> x = jax.random.normal(keys[2], (64, 3))
      >>> small = prune(apply, tree, x, sparsity=0.5, repair=True)
      >>> small.params['out'].shape, small(x).shape, small.certificate.is_equal
      ((8, 2), (64, 2), True)
    """
    shares = {"params": params, "macs": macs, "bytes": bytes, "latency": latency}
    goal = goal_of(sparsity, shares, target, keep)
    listed = None if batches is None else list(batches)
    check_criterion(criterion, loss, listed)
    if not 0.0 < progress <= 1.0:
        raise UserError(f"progress={progress:g} is outside (0, 1]")
    if after is None:
        full = full_network(network, given, statistics)
        trace = _trace(full, tracing)
    else:
        full, trace = after.full, after.trace
    config = SparsityConfig(
        budget=budget,
        max_group_sparsity=max_group_sparsity,
        scope=scope,
        round_to=round_to,
        multiples=tuple(multiples),
        exclude=tuple(exclude),
    )
    limits = _limits(config, trace)
    whole, running = _at_full_size(full, after)
    scores = scores_of(criterion, full, whole, running, trace, loss, listed, seed)
    costs = _costs(full, trace, limits)
    ranked = None
    if budget == "global":
        ranked = _comparable(scores, criterion, goal, limits, costs)
    earlier = None if after is None else after.cut
    counts = counts_for(goal, progress, limits, costs, ranked, _counts_of(earlier))
    cut = _cut(trace, scores, counts, earlier, whole, running)
    masked = cut.mask(whole)
    if repair and not all(mask.all() for mask in cut.masks.values()):
        examples = _examples(full, listed)
        masked = refit(full.apply, whole, cut, *examples, statistics=running)
    small = cut.take(masked)
    small_running = None if running is None else cut.take_statistics(running)
    apply = cut.function(full.apply)
    certificate = _certify(full, apply, cut, masked, running, small, small_running)
    if check and not trace.options.renormalise:
        certificate.check()
    return Pruned(apply, small, small_running, trace, cut, certificate, full, after)


def prune_iteratively(
    network: Any, *given: PyTree, rounds: int = 3, **options: Any
) -> Iterator[Pruned]:
    """Makes a network smaller in several rounds, with training of yours in between.

    After every round, set `small.params` (and `small.statistics`) to what training has
    made of them; the next round goes on with these.

    Args:
      network: As `prune` takes it.
      *given: The same.
      rounds: How many; each removes the same share of what is left.
      **options: Those of `prune`.
    Yields:
      The small network of each round.
    Raises:
      UserError: As `prune`.
    Example:
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> tree = {'in': jnp.ones((3, 64)), 'out': jnp.ones((64, 2))}
      >>> x = jnp.ones((4, 3))
      >>> for small in prune_iteratively(apply, tree, x, rounds=2, sparsity=0.75):
      ...     print(small.params['out'].shape)
      ...     small.params = jax.tree.map(lambda w: 0.9 * w, small.params)  # training
      (32, 2)
      (16, 2)
    """
    if rounds < 1:
        raise UserError(f"rounds={rounds} leaves nothing to do; give at least 1")
    if "batches" in options:  # Every round goes through them.
        options["batches"] = list(options["batches"])
    small = options.pop("after", None)
    for number in range(1, rounds + 1):
        progress = number / rounds
        small = prune(network, *given, after=small, progress=progress, **options)
        yield small


def _trace(full: FullNetwork, options: Mapping[str, Any]) -> ChannelTrace:
    known = {field.name for field in dataclasses.fields(TraceOptions)}
    if unknown := sorted(set(options) - known):
        hint = suggest(unknown[0], known)
        raise TypeError(f"prune has no argument {unknown[0]!r}{hint}")
    trace = trace_channels(
        full.apply,
        full.params,
        *full.inputs,
        statistics=full.statistics,
        **options,
    )
    if not trace.groups:
        raise UserError(f"nothing of this network can be removed: {trace}")
    return trace


def _limits(config: SparsityConfig, trace: ChannelTrace) -> CountLimits:
    check_settings(config, "prune")
    limits = trace_limits(config, trace)
    check_excludes(config.exclude, limits.sizes)
    return limits


def _at_full_size(full: FullNetwork, after: Pruned | None) -> tuple[PyTree, PyTree]:
    """Parameters and statistics, with zeros for what an earlier call has removed."""
    if after is None:
        return full.params, full.statistics
    running = after.statistics
    if running is not None:
        running = after.cut.put_statistics(running)
    return after.cut.put(after.params), running


def _costs(
    full: FullNetwork, trace: ChannelTrace, limits: CountLimits
) -> dict[str, Cost]:
    """Of all units; nothing is counted or measured before it is asked for."""
    arguments = (full.apply, trace, full.params, *full.inputs)
    calls = small_calls(*arguments, statistics=full.statistics)
    return {
        **size_costs(trace),
        "macs": macs_cost(*arguments, statistics=full.statistics),
        "latency": latency_cost(calls, limits.sizes),
    }


def _comparable(
    scores: Scores,
    criterion: str | OwnCriterion,
    goal: Goal,
    limits: CountLimits,
    costs: Mapping[str, Cost],
) -> Mapping[str, np.ndarray]:
    if not isinstance(goal, Target):
        raise UserError("keep= gives counts by group; leave out budget='global'")
    if callable(criterion) or criterion == "random":
        return scores
    if not estimates_damage(criterion):
        return comparable_scores(scores, None)
    return comparable_scores(scores, channel_costs(limits, costs[goal.unit]))


def _counts_of(cut: Cut | None) -> dict[str, int] | None:
    if cut is None:
        return None
    return {name: int(mask.sum()) for name, mask in cut.masks.items()}


def _cut(
    trace: ChannelTrace,
    scores: Scores,
    counts: Mapping[str, int],
    earlier: Cut | None,
    params: PyTree,
    statistics: PyTree | None,
) -> Cut:
    """Keeps the best channels of those that an earlier cut has left."""
    alive = None
    if earlier is not None:
        left = _counts_of(earlier) or {}
        counts = {name: min(count, left[name]) for name, count in counts.items()}
        alive = {name: jnp.asarray(mask) for name, mask in earlier.masks.items()}
    ranked = {name: jnp.asarray(score) for name, score in scores.items()}
    kept = choose_keep_indices(ranked, counts, alive)
    sizes = {name: len(score) for name, score in scores.items()}
    return make_cut(trace, masks_of(kept, sizes), params, statistics)


def _examples(full: FullNetwork, batches: Batches | None) -> tuple[PyTree, ...]:
    """What repairs look at, as inputs of one call."""
    if not batches:
        return full.inputs
    calls = [full.as_inputs(inputs) for inputs, _ in batches]
    return tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *calls))


def _certify(
    full: FullNetwork,
    small_apply: Any,
    cut: Cut,
    masked: PyTree,
    running: PyTree | None,
    small: PyTree,
    small_running: PyTree | None,
) -> Certificate:
    """Compares both in float32, as rounding to fewer bits would hide what differs."""

    def of(apply: Any, statistics: PyTree | None) -> Any:
        if statistics is None:
            return apply
        return lambda params, *inputs: apply(params, in_float32(statistics), *inputs)

    return certify(
        of(full.apply, running),
        of(small_apply, small_running),
        in_float32(masked),
        in_float32(small),
        in_float32(full.inputs),
        cut.take,
    )
