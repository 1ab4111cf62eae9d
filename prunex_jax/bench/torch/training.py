"""Training with PyTorch's DistributedDataParallel over gloo, as its users would.

Data and their order, the network, its first parameters and learning rates are those of
this package; settings that PyTorch's side does not have are refused. Importing it needs
torch.
"""

import contextlib
import dataclasses
import hashlib
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
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.bench.links.gates import Gatekeeper, Spec
from prunex_jax.bench.links.host import free_memory, pass_gates
from prunex_jax.bench.links.kernel import num_cores
from prunex_jax.bench.torch.models import load_params, make_torch_model
from prunex_jax.data import (
    Batch,
    Dataset,
    evaluation_batches,
    make_loader,
    open_dataset,
)
from prunex_jax.mesh import LaunchFlags, keep_freed_memory
from prunex_jax.methods.inner import make_learning_rate
from prunex_jax.models import Model, make_model
from prunex_jax.train.config import ExperimentConfig, resolve_config, total_steps

# Steps before PowerSGD compresses; with feedback of errors it takes no fewer than two.
_POWERSGD_START = 2
# Its hook chains sums per bucket. Those of two buckets may start in another order on
# another process, and gloo takes one for the other: all gradients make one bucket.
_BUCKET_MEGABYTES = {"powersgd": 100_000}
# What nobody traces here.
_UNKNOWN = dict.fromkeys(("traced_bytes", "formula_bytes", "hops"))


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a process trains: all that our own run has in common with PyTorch's."""

    config: ExperimentConfig  # All settings.
    dataset: Dataset  # What is learned.
    model: Model  # The network, as this package describes it.
    rates: np.ndarray  # Learning rate of every step up to the last gate.
    rows: np.ndarray  # Rows of the global batch that this process has.
    eval_batch_size: int  # Examples per evaluation batch over all processes.
    eval_rows: np.ndarray  # Rows of evaluation batches.
    num_hosts: int  # Hosts that the processes are on.


def run_specs(
    specs: Sequence[Spec], gate: Gatekeeper, launch: LaunchFlags, interface: str = ""
) -> None:
    """Runs them on this process, with all others, one after the other.

    Raises:
      UserError: A setting that the PyTorch side lacks.
      TrainingDivergedError: The loss is no longer finite.
    """
    # Here jax gives data, schedule and first parameters, and computes nothing else.
    jax.config.update("jax_platforms", "cpu")
    # As the processes that it is compared with do.
    keep_freed_memory()
    with joined(launch, interface):
        for spec in specs:
            free_memory()
            task = make_task(spec, launch)
            if spec.exchange_only:
                pass_gates(spec, gate, make_exchange(task), lambda steps: _UNKNOWN)
            else:
                with Trainer(task, spec.hook) as trainer:
                    pass_gates(
                        spec, gate, trainer.step, trainer.facts, trainer.accuracy
                    )
            gate.arrive(event="done")


def make_task(spec: Spec, launch: LaunchFlags) -> Task:
    """Builds a task from what the runner wrote; nothing is trained or loaded yet.

    Raises:
      UserError: A setting that the PyTorch side does not have.
    """
    config = resolve_config(spec.config)
    _check_supported(config)
    data = config.data
    rows = _rows(launch, data.batch_size, "batch_size")
    eval_batch_size = data.eval_batch_size or data.batch_size
    eval_rows = _rows(launch, eval_batch_size, "eval_batch_size")
    dataset = open_dataset(data, config.seed)
    network = make_model(config.model, dataset.image_shape, dataset.num_classes)
    if not isinstance(network, Model):
        raise UserError(
            f"config.model.name={config.model.name!r} is not supported with runtime "
            "torch; choose a resnet or a vgg"
        )
    num_steps, last = total_steps(config, len(dataset.train)), spec.boundaries[-1]
    if last > num_steps:
        raise UserError(f"a gate after step {last} comes after the last, {num_steps}")
    schedule = make_learning_rate(config.optimizer, num_steps)
    rates = jax.vmap(lambda step: jnp.asarray(schedule(step)))(jnp.arange(last))
    return Task(
        config=config,
        dataset=dataset,
        model=network,
        rates=np.asarray(rates),
        rows=rows,
        eval_batch_size=eval_batch_size,
        eval_rows=eval_rows,
        num_hosts=spec.num_hosts,
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
    for key, value, supported in (
        ("optimizer.name", config.optimizer.name, "sgd"),
        ("optimizer.micro_batches", config.optimizer.micro_batches, 1),
        ("model.compute_dtype", config.model.compute_dtype, "float32"),
    ):
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


def make_exchange(task: Task) -> Callable[[], float]:
    """Makes a step that sums an array of the network's size, and does nothing else.

    Collectives:
      Of each step: one all-reduce of float32[number of parameters].
    """
    params, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    sizes = [torch.Size(shape).numel() for shape in shapes_by_path(params).values()]
    # Zeros stay zeros, however often they are summed.
    values = torch.zeros(sum(sizes))

    def step() -> float:
        distributed.all_reduce(values)
        return 0.0

    return step


class Trainer:
    """A network in training on this process, with a copy on every other.

    Batch statistics are those of the process's images, and running ones are averaged
    over processes when the network is evaluated, as in this package.
    """

    def __init__(self, task: Task, hook: str):
        self.task = task
        self.network = make_torch_model(task.model)
        key = jax.random.key(task.config.seed)
        load_params(self.network, *jax.jit(task.model.init)(key))
        # Our images come in this order anyway; it saves a tenth of a step and more.
        self.network.to(memory_format=torch.channels_last)
        self.replica = DistributedDataParallel(
            self.network,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_BUCKET_MEGABYTES.get(hook),
        )
        _register_hook(self.replica, hook, task.config.method.powersgd.rank)
        self.optimizer = _make_optimizer(self.network, task.config.optimizer)
        self.done = 0
        data, seed = task.config.data, task.config.seed
        loader = make_loader(
            task.dataset.train,
            data,
            rows=task.rows,
            seed=seed,
            num_hosts=task.num_hosts,
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
          The loss on the images of this process.
        Collectives:
          All-reduces of gradients over the processes, bucket by bucket and while the
          backward pass goes on, as DistributedDataParallel and its hook do.
        """
        config = self.task.config.optimizer
        images, labels = _tensors(next(self._batches))
        loss = functional.cross_entropy(
            self.replica(images), labels, label_smoothing=config.label_smoothing
        )
        self.optimizer.zero_grad()
        loss.backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(self.network.parameters(), config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.task.rates[self.done])
        self.optimizer.step()
        self.done += 1
        return loss.item()

    @torch.no_grad()
    def accuracy(self) -> float | None:
        """Scores the network on the validation split; None if that is empty.

        Collectives:
          One all-reduce of all running statistics, one of two numbers.
        """
        task, seen = self.task, torch.zeros(2)
        batches = evaluation_batches(
            task.dataset.validation,
            task.eval_batch_size,
            task.eval_rows,
            task.config.data.num_workers,
        )
        with _averaged_statistics(self.network), batches:
            for batch in batches:
                images, labels = _tensors(batch)
                valid = torch.from_numpy(batch["valid"])
                right = self.network(images).argmax(1) == labels
                seen += torch.stack([(right * valid).sum(), valid.sum()])
        distributed.all_reduce(seen)
        correct, examples = seen.tolist()
        return correct / examples if examples else None

    def facts(self, steps: int) -> dict[str, Any]:
        """What gates are told: SHA-256 of the parameters, equal on all processes."""
        del steps
        found = hashlib.sha256()
        for value in self.network.parameters():
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        return {**_UNKNOWN, "digest": found.hexdigest()}


def _tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32[n, c, h, w] in the memory of ours, and labels, int64[n]."""
    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)
    return images, torch.from_numpy(batch["label"]).long()


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


def _make_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.SGD:
    """As `methods.inner.make_inner`: kernels decay, biases and scales do not."""
    params = list(network.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
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
    own = torch.cat(running)
    mean = own.clone()
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
