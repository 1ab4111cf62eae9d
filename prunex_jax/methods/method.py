"""What a method is to the trainer, what it is made from, and its row in the table."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig, setting
from prunex_jax.base.sync import SyncSchedule, quadratic_schedule
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelGroup
from prunex_jax.comm import (
    FLOAT32,
    Route,
    Slicing,
    Wire,
)
from prunex_jax.mesh import IN_SLICES, MeshAxes, Placement
from prunex_jax.sparsity.settings import Criterion

# moving: masks follow the scores. freeze: they are chosen one last time, and the copies
# are set to the consensus. frozen: masks stay, no scores are exchanged.
RoundKind = Literal["moving", "freeze", "frozen"]
# How a round steps along the mean movement of the hosts: by settings, or as the period
# and the cosine of successive movements say.
OuterRule = Literal["fixed", "law"]
KeepCounts = Mapping[str, int]
# Static, hashable keyword arguments of an update.
Options = dict[str, Any]

# (params, opt_state, keep_counts, kind) -> (params, opt_state)
Exchange = Callable[[PyTree, PyTree, KeepCounts, RoundKind], tuple[PyTree, PyTree]]
# (params, batch) -> logits of the examples of one device, in training mode
Forward = Callable[[PyTree, Mapping[str, jax.Array]], jax.Array]
# (logits, batch) -> mean loss over the examples of one device
Objective = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
# (forward, objective, params, opt_state, batches) -> (params, opt_state)
Prepare = Callable[
    [Forward, Objective, PyTree, PyTree, Sequence[Any]], tuple[PyTree, PyTree]
]


@dataclasses.dataclass(frozen=True)
class RoundsConfig:
    """When hsadmm, local_sgd and diloco have rounds, and what these send."""

    # constant (every sync_period steps) | quadratic (rarer as the learning rate falls:
    # every (alpha / rate)^2 steps, and at least sync_period).
    sync_rule: Literal["constant", "quadratic"] = "constant"
    # alpha of the quadratic rule; None: the largest rate times sqrt(sync_period), so
    # that only rounds at that rate are as short as sync_period.
    sync_alpha: float | None = setting(None, above=0)
    # What remains, until the next round, of what a host has not sent: numbers that are
    # not among the largest, and what the wire rounds away. 0 keeps nothing, and rounds
    # stochastically. None: 1 with top_k, 0.95 with int2 alone, else 0.
    error_decay: float | None = setting(None, at_least=0, at_most=1)
    # Of every 4096 numbers, only so many largest are sent, with positions of 12 bits; 0
    # sends all. Even. Scales and biases are always sent whole.
    top_k: int = setting(0, at_least=0, at_most=4096)
    # auto (gather up to four hosts, then what sends fewer bytes) | gather (all entries
    # to all hosts) | owners (a host per chunk adds up: fewer bytes from three hosts on,
    # but what it sends on is cut down once more).
    top_k_route: Route = "auto"
    # Streaming: parts of the parameters, each exchanged once per sync_period at a time
    # of its own, so that the largest message is about so many times smaller. 1
    # exchanges all at once.
    fragments: int = setting(1, at_least=1)
    # Streaming: 1 exchanges beside a step and applies the mean after it; with 0, steps
    # wait for it.
    delay: int = setting(0, at_least=0, at_most=1)
    # Streaming: what remains of the local copies when a mean is applied. None: 0.5 with
    # a delay, else what the method leaves of them in whole rounds.
    mixing: float | None = setting(None, at_least=0, below=1)
    # fixed (the outer step and momentum of the method) | law (momentum from the period,
    # and in every round a step from the cosine of successive movements, for one more
    # copy of the parameters).
    outer: OuterRule = "fixed"


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """Which method exchanges what over the host axis: what all methods share.

    `methods.method_config` adds the settings of every registered method under its key.
    """

    name: str = "hsadmm"
    # float32 | float16 | bfloat16 | int8 | int4 | int2: format of what crosses the host
    # axis. int2 needs a method that sends later what it has rounded away.
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8", "int4", "int2"] = (
        "float32"
    )
    # What rounds send.
    rounds: RoundsConfig = RoundsConfig()
    # Largest message over the host axis that stands for a buffer; 0 sends gradients, or
    # what a round exchanges, in one, whose copies take as much memory. Where the
    # largest numbers of chunks are sent, it counts all that they are chosen from.
    bucket_bytes: int = setting(2**28, at_least=0)
    # Parameters whose path contains one of these are averaged whole by topk, dgc,
    # powersgd and importance, such as ("bias", "norm").
    send_whole: tuple[str, ...] = ()
    # Methods one after the other, instead of `name`: ("dense", "hsadmm @ 0.1",
    # "diloco @ accuracy > 0.9"). See `phases`.
    schedule: tuple[str, ...] = ()
    # Modules, or paths of .py files, that register methods; imported before names are
    # looked up, so that other processes and later runs know them too.
    plugins: tuple[str, ...] = ()

    def __getattr__(self, key: str) -> Any:
        """Tells mypy of settings that registered methods add; refuses all others."""
        raise AttributeError(f"no registered method has settings under method.{key}")


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """What a method is made from: the parts that the trainer has built before it.

    Attributes:
      config: Settings that all methods share.
      inner: The inner optimizer, for averaged gradients.
      learning_rate: Its schedule.
      groups: Channel groups that may be pruned; none once they were.
      keep_counts: Final kept channels of each group.
      shapes: Shape of every parameter by path.
      axes: Mesh axes.
      total_steps: Length of the run.
      criterion: What hsadmm ranks channels by.
      optimizer: Settings of the inner optimizer, for methods that do part of its work.
      settings: The method's own settings; `make_method` takes them from `config`.
      slicing: How parameters, gradients and state lie in slices over the devices of a
        host, which are what the method works on; None if they are whole.
    """

    config: MethodConfig
    inner: optax.GradientTransformation
    learning_rate: optax.Schedule
    groups: Sequence[ChannelGroup]
    keep_counts: KeepCounts
    shapes: Mapping[str, tuple[int, ...]]
    axes: MeshAxes = dataclasses.field(default_factory=MeshAxes)
    total_steps: int = 0
    criterion: Criterion = "norm"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    settings: Any = None
    slicing: Slicing | None = None

    @property
    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by path of what a device works on: parameters, or slices of them."""
        return self.shapes if self.slicing is None else self.slicing.own_shapes

    def placed(self, placement: Placement) -> Placement:
        """Where a part of the state lies that is like the parameters."""
        return placement if self.slicing is None else IN_SLICES[placement]

    def sync(self, period: int) -> SyncSchedule:
        """When rounds of at least so many steps end, by the rule of the settings.

        Raises:
          UserError: A number for another rule, or a rule without learning rates.
        """
        rounds = self.config.rounds
        if rounds.sync_rule == "quadratic":
            rates = jax.vmap(self.learning_rate)(jnp.arange(self.total_steps))
            return quadratic_schedule(rates.tolist(), period, rounds.sync_alpha)
        if rounds.sync_alpha is not None:
            raise UserError(
                f"method.rounds.sync_alpha={rounds.sync_alpha:g} is for the quadratic "
                "rule: set method.rounds.sync_rule='quadratic' too, or leave it out"
            )
        return SyncSchedule(period)

    @property
    def wire(self) -> Wire:
        """How what the method exchanges crosses hosts."""
        return Wire(self.config.wire_dtype, self.config.bucket_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class Placements:
    """Where the parameters and the optimizer state of a method live.

    Attributes:
      params: Where the trained parameters live.
      opt_state: The same for the optimizer state, part by part.
      slicing: How the parts lie in slices whose placement says so; None where none
        does.
      copies: What becomes of the copies of hosts and devices where their number
        changes: "mean", all are merged or spread so that their mean stays (consensus,
        duals, what is held back); or "own", each new host takes over one of them as it
        is.
      forgotten: Names of parts of the optimizer state that mean something only in the
        slices that they were made in. In others they start as zeros.
    """

    params: Placement = "replicated"
    opt_state: Any = "replicated"
    slicing: Slicing | None = None
    copies: Literal["mean", "own"] = "mean"
    forgotten: tuple[str, ...] = ()

    @property
    def params_slicing(self) -> Slicing | None:
        """How parameters lie in slices, not only the optimizer state; None if whole."""
        return self.slicing if self.params in IN_SLICES.values() else None

    def whole_params(self, params: PyTree) -> PyTree:
        """The whole parameters of a host.

        Collectives:
          As `Slicing.join`, where they lie in slices.
        """
        slicing = self.params_slicing
        return params if slicing is None else slicing.join(params)

    def own_params(self, params: PyTree) -> PyTree:
        """What a device has of whole parameters; nothing moves."""
        slicing = self.params_slicing
        return params if slicing is None else slicing.take(params)

    def whole(self, opt_state: PyTree) -> PyTree:
        """The optimizer state of a device, with whole arrays for slices.

        Collectives:
          As `Slicing.join_all` for every part in slices.
        """
        if self.slicing is None:
            return opt_state
        return self._of_parts(self.slicing.join_all, opt_state)

    def sliced(self, opt_state: PyTree) -> PyTree:
        """The inverse of `whole`; nothing moves."""
        if self.slicing is None:
            return opt_state
        return self._of_parts(self.slicing.take_all, opt_state)

    def _of_parts(self, fn: Callable[[PyTree], PyTree], opt_state: PyTree) -> PyTree:
        """Changes the parts that lie in slices."""
        in_slices = set(IN_SLICES.values())
        return jax.tree.map(
            lambda placement, part: fn(part) if placement in in_slices else part,
            self.opt_state,
            opt_state,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Payload:
    """What an exchange, or a step, averages over hosts.

    Attributes:
      elements: keep_counts -> elements of the largest array; 0 for a method that sends
        nothing.
      bytes_of: Elements -> bytes that stand for them on the host axis.
      position_bytes: keep_counts -> bytes that say where those elements belong, if they
        are few of many.
    """

    elements: Callable[[KeepCounts], int] = lambda keep_counts: 0
    bytes_of: Callable[[int], int] = FLOAT32.payload_bytes
    position_bytes: Callable[[KeepCounts], int] = lambda keep_counts: 0

    def num_bytes(self, keep_counts: KeepCounts) -> int:
        """Bytes that stand for the array, with positions."""
        values = self.bytes_of(self.elements(keep_counts))
        return values + self.position_bytes(keep_counts)

    def times(self, parts: int) -> "Payload":
        """The same of so many devices together."""
        return Payload(
            lambda counts: parts * self.elements(counts),
            self.bytes_of,
            lambda counts: parts * self.position_bytes(counts),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Pruning:
    """How a method removes channels.

    Attributes:
      masks: opt_state -> channel masks, replicated; {} where no channel is pruned.
      scores: (params, opt_state) -> scores of the channels, replicated, by which a
        global budget compares groups; None takes the squared norms of the network. A
        program of its own.
      in_rounds: Whether the densities of the sparsity schedule are for its rounds.
      moved: (opt_state, a tree like the parameters, in slices where the state is) ->
        opt_state, with the tree added to what the copies of the network are held to;
        None where masks do not move.
    """

    masks: Callable[[PyTree], dict[str, jax.Array]] = lambda opt_state: {}
    scores: Callable[[PyTree, PyTree], dict[str, jax.Array]] | None = None
    in_rounds: bool = False
    moved: Callable[[PyTree, PyTree], PyTree] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """What a method exchanges beside its steps.

    Attributes:
      sync: When there are exchanges.
      exchange: What happens then. A program of its own.
      is_streaming: Whether steps exchange what rounds would while masks stay, one part
        after the other, as `StepOptions` say. Then update also takes keep_counts as an
        option, and `exchange` is for whole rounds: where masks change, before a cut,
        and at the end.
    """

    sync: SyncSchedule
    exchange: Exchange
    is_streaming: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """Keyword arguments of a transform's update that differ from step to step.

    Every new combination compiles the step anew, so there should be few.

    Attributes:
      at: Number of a step, from 0 -> its options; without any, update is in its steady
        state.
      early: opt_state of the whole mesh -> options that take the place of `at`, or None
        once the method has settled; it is not asked again.
    """

    at: Callable[[int], Options] = lambda step: {}
    early: Callable[[PyTree], Options | None] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Preparation:
    """What a method does once, before its first step.

    Attributes:
      run: Is given whole parameters, and returns them whole.
      num_batches: Batches of the mesh that it looks at.
    """

    run: Prepare
    num_batches: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class InnerState:
    """The state of the inner optimizer, which the next method of a schedule takes over.

    Attributes:
      get: opt_state -> that state, placed as params.
      put: (opt_state, such a state) -> opt_state with it.
    """

    get: Callable[[PyTree], PyTree] = lambda opt_state: ()
    put: Callable[[PyTree, PyTree], PyTree] = lambda opt_state, inner: opt_state


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A recipe for training over a mesh: what is sent, when, and what it stands for.

    `transform` is all that a method must have; by default it keeps replicated
    parameters and stands for them, and its transform exchanges in every step. What is
    sent is read from the traced program, see `traffic`. Functions of parameters and
    states run inside `shard_map`, on the values of one device.

    Attributes:
      transform: init and the update of every step; may communicate. It is given local
        gradients, parameters, and what `step_options` say.
      name: Key in `methods.METHODS`, which `make_method` fills in.
      placements: Where parameters and state live.
      network: (params, opt_state) -> parameters that the method stands for, replicated.
      health: opt_state -> named scalars for the log, or dicts of them.
      payload: What an exchange averages over hosts.
      pruning: How channels are removed.
      rounds: Exchanges beside the steps, or None.
      step_options: What the transform's update is told in a step.
      preparation: What is done before the first step, or None.
      inner: Where the state of the inner optimizer is.
    """

    transform: optax.GradientTransformationExtraArgs
    name: str = ""
    placements: Placements = Placements()
    network: Callable[[PyTree, PyTree], PyTree] = lambda params, opt_state: params
    health: Callable[[PyTree], dict[str, Any]] = lambda opt_state: {}
    payload: Payload = Payload()
    pruning: Pruning = Pruning()
    rounds: Rounds | None = None
    step_options: StepOptions = StepOptions()
    preparation: Preparation | None = None
    inner: InnerState = InnerState()

    @property
    def sync(self) -> SyncSchedule | None:
        """When rounds end; None if there are none beside the steps."""
        return None if self.rounds is None else self.rounds.sync

    @property
    def is_streaming(self) -> bool:
        """Whether steps exchange what rounds would; see `Rounds`."""
        return self.rounds is not None and self.rounds.is_streaming


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method at settings that have a name: one row of studies, sweeps and tables.

    Attributes:
      name: Key: letters, digits, dashes.
      title: What tables call it.
      settings: Dotted key -> value; in the table, "method.name" is among them.
      period: Steps after which the pattern of exchanges repeats.
    """

    name: str
    title: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    period: int = 1


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """A method in the table; `methods.register_method` adds it.

    Attributes:
      name: `method.name` of the settings.
      make: Builds the method from a recipe, whose `settings` are the method's own.
      settings: Frozen dataclass of its settings, all with defaults; None if it has
        none.
      key: Where they stand under `method`; empty takes the name. Methods with the same
        settings may share a key.
      variants: How studies, sweeps, `advise`, the traffic table and the contract suite
        show it; the first is the method as it is compared with others.
      takes_slices: Whether it can work on slices of the parameters; see `Recipe`.
    """

    name: str
    make: Callable[[Recipe], Method]
    settings: type | None = None
    key: str = ""
    variants: tuple[Variant, ...] = ()
    takes_slices: bool = False

    def __post_init__(self) -> None:
        """Completes the key and the settings of the variants."""
        object.__setattr__(self, "key", self.key or self.name)
        named = {"method.name": self.name}
        complete = tuple(
            dataclasses.replace(each, settings={**named, **each.settings})
            for each in self.variants
        )
        object.__setattr__(self, "variants", complete)
