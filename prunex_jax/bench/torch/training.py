"""Training with PyTorch's DistributedDataParallel over gloo, as its users would.

It owns the process group, the optimizer, the hooks of gradients, one training step and
evaluation. It leaves networks to `torch_models`, and what is trained to `torch_tasks`.
Importing it needs torch.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.bench.links.kernel import num_cores
from prunex_jax.bench.torch.models import load_params, make_torch_model
from prunex_jax.bench.torch.tasks import Seat, Task
from prunex_jax.data import Batch, evaluation_batches, make_loader

# Steps before PowerSGD compresses; with feedback of errors it takes no fewer than two.
_POWERSGD_START = 2
# Its hook chains sums per bucket. Those of two buckets may start in another order on
# another process, and gloo takes one for the other: all gradients make one bucket.
_BUCKET_MEGABYTES = {"powersgd": 100_000}


@contextlib.contextmanager
def joined(seat: Seat) -> Iterator[None]:
    """Joins the other processes, for as long as the context lasts.

    Args:
      seat: Which process this is.
    """
    torch.set_num_threads(num_cores())
    if seat.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.address}",
        rank=seat.process,
        world_size=seat.processes,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def make_exchange(task: Task) -> Callable[[], float]:
    """Makes a step that sums an array of the network's size, and does nothing else.

    Args:
      task: Gives the network.
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

    Args:
      task: What is trained.
      hook: What gradients go through: dense | fp16 | powersgd.
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

    def digest(self) -> str:
        """SHA-256 of the parameters, in hexadecimal digits."""
        found = hashlib.sha256()
        for value in self.network.parameters():
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


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
    """As `optim.inner.make_inner` makes it: kernels decay, biases and scales do not."""
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
