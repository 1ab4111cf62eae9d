"""What PyTorch is asked to train: as much as can be of what this package would.

It owns which settings PyTorch's side has, and what both sides share: data and their
order, network, learning rates. It leaves training to `torch_training`, and needs no
torch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import ExperimentConfig
from prunex_jax.bench.links.gates import Spec
from prunex_jax.data import Dataset, open_dataset
from prunex_jax.methods.inner import make_learning_rate
from prunex_jax.models import Model, make_model
from prunex_jax.train.config import resolve_config, total_steps


@dataclasses.dataclass(frozen=True)
class Seat:
    """Which process this is, and how it finds the others.

    Attributes:
      address: Host and port of process 0.
      process: Number of this process.
      processes: Of the run.
      interface: Network interface to exchange over; empty lets gloo choose.
    """

    address: str
    process: int = 0
    processes: int = 1
    interface: str = ""

    def rows(self, batch_size: int, setting: str) -> np.ndarray:
        """Rows of a global batch that this process has: those of one of our hosts.

        Raises:
          UserError: The batch cannot be divided evenly.
        """
        if batch_size % self.processes:
            raise UserError(
                f"config.data.{setting}={batch_size} does not divide evenly over "
                f"{self.processes} hosts; use a multiple of {self.processes}"
            )
        size = batch_size // self.processes
        return np.arange(self.process * size, (self.process + 1) * size)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a process trains: everything that our own run has in common with PyTorch's.

    Attributes:
      config: All settings.
      dataset: What is learned.
      model: The network, as this package describes it.
      rates: Learning rate of every step up to the last gate.
      rows: Rows of the global batch that this process has.
      eval_batch_size: Examples per evaluation batch over all processes.
      eval_rows: Rows of evaluation batches.
      num_hosts: Hosts that the processes are on.
    """

    config: ExperimentConfig
    dataset: Dataset
    model: Model
    rates: np.ndarray
    rows: np.ndarray
    eval_batch_size: int
    eval_rows: np.ndarray
    num_hosts: int


def make_task(spec: Spec, seat: Seat) -> Task:
    """Builds a task from what the runner wrote; nothing is trained or loaded yet.

    Raises:
      UserError: A setting that the PyTorch side does not have.
    """
    config = resolve_config(spec.config)
    _check_supported(config)
    data = config.data
    rows = seat.rows(data.batch_size, "batch_size")
    eval_batch_size = data.eval_batch_size or data.batch_size
    eval_rows = seat.rows(eval_batch_size, "eval_batch_size")
    dataset = open_dataset(data, config.seed)
    num_steps, last = total_steps(config, len(dataset.train)), spec.boundaries[-1]
    if last > num_steps:
        raise UserError(f"a gate after step {last} comes after the last, {num_steps}")
    schedule = make_learning_rate(config.optimizer, num_steps)
    rates = jax.vmap(lambda step: jnp.asarray(schedule(step)))(jnp.arange(last))
    return Task(
        config=config,
        dataset=dataset,
        model=make_model(config.model, dataset.image_shape, dataset.num_classes),
        rates=np.asarray(rates),
        rows=rows,
        eval_batch_size=eval_batch_size,
        eval_rows=eval_rows,
        num_hosts=spec.num_hosts,
    )


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
