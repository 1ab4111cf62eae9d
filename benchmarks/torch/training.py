"""Training with PyTorch's DistributedDataParallel over gloo, as its users would.

Data and their order, the network, its first parameters and learning rates are those of
this package; settings that PyTorch's side does not have are refused. Importing it needs
torch.
"""

import contextlib
import dataclasses
import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links.gates import Gatekeeper, Spec
from benchmarks.links.host import free_memory, metric_of, pass_gates
from benchmarks.links.kernel import num_cores
from benchmarks.links.part import part_of
from benchmarks.torch.models import load_params, make_torch_model
from benchmarks.torch.objectives import make_torch_objective
from prunex_jax.base.errors import UserError
from prunex_jax.base.imports import is_named
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.data import evaluation_batches, make_loader
from prunex_jax.processes import LaunchFlags, keep_freed_memory
from prunex_jax.tasks import Task, make_task
from prunex_jax.train.build.config import ExperimentConfig, resolve_config, total_steps
from prunex_jax.train.build.optimizer import make_learning_rate

# Steps before PowerSGD compresses; with feedback of errors it takes no fewer than two.
_POWERSGD_START = 2
# Its hook chains sums per bucket. Those of two buckets may start in another order on
# another process, and gloo takes one for the other: all gradients make one bucket.
_BUCKET_MEGABYTES = {"powersgd": 100_000}
_OPTIMIZERS = ("sgd", "adamw")
# Settings that mean the same here, by section; all others must be at their defaults.
_HEEDED = {
    "optimizer": (
        *("name", "learning_rate", "momentum", "nesterov", "weight_decay"),
        *("warmup_share", "schedule", "flat_share", "rewind_share"),
        *("label_smoothing", "clip_norm", "adamw_paths"),
    ),
    "model": ("name", "stem", "width", "norm_scope", "convolution", "gpt"),
    "model.gpt": ("layers", "width", "heads", "key_heads", "head_width", "hidden"),
}
# What nobody traces here.
_UNKNOWN = dict.fromkeys(("traced_bytes", "formula_bytes", "hops"))


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a process trains: all that our own run has in common with PyTorch's."""

    config: ExperimentConfig  # All settings.
    task: Task  # What is learned, and by which network, as this package describes it.
    rates: np.ndarray  # Learning rate of every step up to the last gate.
    rows: np.ndarray  # Rows of the global batch that this process has.
    eval_batch_size: int  # Examples per evaluation batch over all processes.
    eval_rows: np.ndarray  # Rows of evaluation batches.
    num_hosts: int  # Hosts that the processes are on.
    metric: str = ""  # What the network is scored by,
    scored_examples: int = 0  # and on how many examples; 0: all.


def run_specs(
    specs: Sequence[Spec], gate: Gatekeeper, launch: LaunchFlags, interface: str = ""
) -> None:
    """Runs them on this process, with all others, one after the other.

    Raises:
      UserError: A setting that the PyTorch side lacks.
      TrainingDivergedError: The loss is no longer finite.
    """
    # Here jax gives data, schedule, first parameters and scores, and nothing else.
    jax.config.update("jax_platforms", "cpu")
    # As the processes that it is compared with do.
    keep_freed_memory()
    with joined(launch, interface):
        for spec in specs:
            free_memory()
            job = make_job(spec, launch)
            if spec.exchange_only:
                pass_gates(spec, gate, make_exchange(job), lambda steps: _UNKNOWN)
            else:
                with Trainer(job, spec.hook) as trainer:
                    pass_gates(spec, gate, trainer.step, trainer.facts, trainer.score)
            gate.arrive(event="done")


def make_job(spec: Spec, launch: LaunchFlags) -> Job:
    """Builds a job from what the runner wrote; nothing is trained or loaded yet.

    Raises:
      UserError: A setting that the PyTorch side does not have.
    """
    config = resolve_config(spec.config)
    _check_supported(config)
    data = config.data
    rows = _rows(launch, data.batch_size, "batch_size")
    eval_batch_size = data.eval_batch_size or data.batch_size
    eval_rows = _rows(launch, eval_batch_size, "eval_batch_size")
    smoothing = config.optimizer.label_smoothing
    task = make_task(data, config.model, config.seed, label_smoothing=smoothing)
    num_steps, last = total_steps(config, len(task.dataset.train)), spec.boundaries[-1]
    if last > num_steps:
        raise UserError(f"a gate after step {last} comes after the last, {num_steps}")
    schedule = make_learning_rate(config.optimizer, num_steps)
    rates = jax.vmap(lambda step: jnp.asarray(schedule(step)))(jnp.arange(last))
    return Job(
        config=config,
        task=task,
        rates=np.asarray(rates),
        rows=rows,
        eval_batch_size=eval_batch_size,
        eval_rows=eval_rows,
        num_hosts=spec.num_hosts,
        metric=spec.metric,
        scored_examples=spec.scored_examples,
    )


def _rows(launch: LaunchFlags, batch_size: int, setting: str) -> np.ndarray:
    """Rows of a global batch that this process has: those of one of our hosts."""
    count = launch.num_processes
    if batch_size % count:
        raise UserError(
            f"config.data.{setting}={batch_size} does not divide evenly over {count} "
            f"hosts; use a multiple of {count}"
        )
    size = batch_size // count
    return np.arange(launch.process_id * size, (launch.process_id + 1) * size)


def _check_supported(config: ExperimentConfig) -> None:
    """Refuses what the PyTorch side does not have, rather than leaving it out."""
    if config.optimizer.name not in _OPTIMIZERS:
        raise UserError(
            f"config.optimizer.name={config.optimizer.name!r} is not supported with "
            f"runtime torch; set it to one of {', '.join(_OPTIMIZERS)}"
        )
    if is_named(config.model.name):
        raise UserError(
            f"config.model.name={config.model.name!r} is a network of your own, which "
            "has no PyTorch form; give the row runtime jax"
        )
    others: list[tuple[str, Any, Any]] = [
        ("distill.teacher", config.distill.teacher, ""),
        ("data.mixup", config.data.mixup, 0.0),
        ("data.cutmix", config.data.cutmix, 0.0),
    ]
    for section, heeded in _HEEDED.items():
        settings = operator.attrgetter(section)(config)
        others += [
            (f"{section}.{field.name}", getattr(settings, field.name), field.default)
            for field in dataclasses.fields(settings)
            if field.name not in heeded
        ]
    for key, value, supported in others:
        if value != supported:
            raise UserError(
                f"config.{key}={value!r} is not supported with runtime torch; set it "
                f"to {supported!r}"
            )


@contextlib.contextmanager
def joined(launch: LaunchFlags, interface: str = "") -> Iterator[None]:
    """Joins the other processes, for as long as the context lasts."""
    torch.set_num_threads(num_cores())
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{launch.coordinator}",
        rank=launch.process_id,
        world_size=launch.num_processes,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def make_exchange(job: Job) -> Callable[[], float]:
    """Makes a step that sums an array of the network's size, and does nothing else.

    Collectives:
      Of each step: one all-reduce of float32[number of parameters].
    """
    params, _ = jax.eval_shape(job.task.model.init, jax.random.key(0))
    sizes = [torch.Size(shape).numel() for shape in shapes_by_path(params).values()]
    # Zeros stay zeros, however often they are summed.
    values = torch.zeros(sum(sizes))

    def step() -> float:
        distributed.all_reduce(values)
        return 0.0

    return step


class Trainer:
    """A network in training on this process, with a copy on every other.

    Batch statistics are those of the process's examples, and running ones are averaged
    over processes when the network is evaluated, as in this package.
    """

    def __init__(self, job: Job, hook: str):
        self.job = job
        task, config = job.task, job.config
        self.objective = make_torch_objective(task.objective)
        self.network = make_torch_model(task.model)
        key = jax.random.key(config.seed)
        load_params(self.network, *jax.jit(task.model.init)(key))
        # Our images come in this order anyway; it saves a tenth of a step and more.
        self.network.to(memory_format=torch.channels_last)
        self.replica = DistributedDataParallel(
            self.network,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_BUCKET_MEGABYTES.get(hook),
        )
        _register_hook(self.replica, hook, config.method.powersgd.rank)
        self.optimizer = _make_optimizer(self.network, config.optimizer)
        self.done = 0
        self._score = jax.jit(task.objective.score)
        loader = make_loader(
            task.dataset.train,
            config.data,
            rows=job.rows,
            seed=config.seed,
            num_hosts=job.num_hosts,
        )
        self._batches = loader.batches()

    def __enter__(self) -> "Trainer":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the reading of batches."""
        self._batches.close()

    def step(self) -> float:
        """Takes one step: forward, backward with the exchange, optimizer.

        Returns:
          The loss on the examples of this process.
        Collectives:
          All-reduces of gradients over the processes, bucket by bucket and while the
          backward pass goes on, as DistributedDataParallel and its hook do.
        """
        clip_norm = self.job.config.optimizer.clip_norm
        inputs, targets = self.objective.tensors(next(self._batches))
        loss = self.objective.loss(self.replica(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(self.network.parameters(), clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.job.rates[self.done])
        self.optimizer.step()
        self.done += 1
        return loss.item()

    @torch.no_grad()
    def score(self) -> float | None:
        """The job's metric on the validation split; None if that is empty.

        Collectives:
          One all-reduce of all running statistics, one of a few numbers.
        """
        job, task = self.job, self.job.task
        names = "loss", *task.objective.counted
        sums = torch.zeros(len(names), dtype=torch.float64)
        batches = evaluation_batches(
            part_of(task.dataset.validation, job.scored_examples),
            job.eval_batch_size,
            job.eval_rows,
            job.config.data.num_workers,
        )
        with _averaged_statistics(self.network), batches:
            for batch in batches:
                inputs, _ = self.objective.tensors(batch)
                found = self._score(self.network(inputs).numpy(), batch)
                sums += torch.tensor([float(found[name]) for name in names])
        distributed.all_reduce(sums)
        total = dict(zip(names, sums.tolist(), strict=True))
        if not total[task.objective.unit]:
            return None
        return metric_of(task.objective.measures(total), job.metric)

    def facts(self, steps: int) -> dict[str, Any]:
        """What gates are told: SHA-256 of the parameters, equal on all processes."""
        del steps
        found = hashlib.sha256()
        for value in self.network.parameters():
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        return {**_UNKNOWN, "digest": found.hexdigest()}


def _register_hook(replica: DistributedDataParallel, hook: str, rank: int) -> None:
    if hook == "fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=_POWERSGD_START,
            use_error_feedback=True,
            warm_start=True,
        )
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        assert hook == "dense", f"no hook {hook!r}"


def _make_optimizer(
    network: nn.Module, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """As `make_inner` of the trainer: kernels decay, biases and scales do not."""
    params = list(network.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        # Moments and epsilon are by default those of optax, and outside of the root.
        return torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
        fused=True,
    )


@contextlib.contextmanager
def _averaged_statistics(network: nn.Module) -> Iterator[None]:
    """Evaluates with running statistics averaged over processes; keeps their own."""
    running = [x for x in network.buffers() if x.is_floating_point()]
    running.append(torch.zeros(0))  # For networks that have none.
    own = torch.cat(running)
    mean = own.clone()
    if len(mean):
        distributed.all_reduce(mean)
        mean /= distributed.get_world_size()
    sizes = [len(x) for x in running]
    try:
        network.eval()
        for buffer, part in zip(running, mean.split(sizes), strict=True):
            buffer.copy_(part)
        yield
    finally:
        network.train()
        for buffer, part in zip(running, own.split(sizes), strict=True):
            buffer.copy_(part)
