"""Prunes torchvision's ResNet-18 on CIFAR-10 in one call, and tunes what is left.

Trains it from random weights in the trainer of this package, prunes it, and trains the
smaller module on. Accuracy is that of validation images until the end, when the test
images are read once, for all three networks. Prints a table.

    python -m benchmarks torchvision_cifar --workdir=DIR [--data-dir=FOLDER]
        [--params=0.25 | --macs=0.5] [--budget=global] [--epochs=2] [--tune-epochs=0.5]

CIFAR-10 is read as TFDS has prepared it. A run that was stopped goes on. On CPUs, XLA
computes the convolutions of the last layers, whose maps are smaller than their kernels,
in slow loops, unless XLA_FLAGS=--xla_disable_hlo_passes=algsimp is set.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax import prune
from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.data import evaluation_batches
from prunex_jax.train import TrainResult, train

# What rankings are means over and repairs look at, and what is scored at once.
_BATCHES, _BATCH_SIZE, _SCORED = 32, 16, 250


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True, help="where runs are kept")
    parser.add_argument("--data-dir", default="", help="if not where TFDS has it")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--tune-epochs", type=float, default=0.5)
    parser.add_argument("--budget", default="global", help="or uniform")
    parser.add_argument("--macs", type=float, help="share that remains")
    parser.add_argument("--params", type=float, help="share that remains")
    given = parser.parse_args()
    goal = {k: v for k, v in vars(given).items() if k in ("macs", "params") and v}
    try:
        for row in rows_of(given, goal or {"params": 0.25}):
            sys.stdout.write(" | ".join(["", *row, ""]).strip() + "\n")
            sys.stdout.flush()
    except UserError as error:
        sys.exit(f"error: {error}")
    packages = ("torch", "torchvision", "torchax", "jax")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    sys.stdout.write(f"\nn=1, {versions}\n")


def rows_of(given: argparse.Namespace, goal: dict[str, float]) -> Iterator[list[str]]:
    """Head and rows of the table."""
    import torch
    import torchvision

    torch.manual_seed(0)
    module = torchvision.models.resnet18(num_classes=10)
    folder = Path(given.workdir)
    whole = trained(module, folder / "whole", given.data_dir, given.epochs, 0.05)
    dataset = whole.trained.task.dataset
    module = whole.module()
    images, batches = calibration(dataset.train)
    began = time.perf_counter()
    small = prune(
        module,
        images,
        criterion="taylor",
        loss=optax.softmax_cross_entropy_with_integer_labels,
        batches=batches,
        budget=given.budget,
        repair=True,
        **goal,
    )
    seconds = time.perf_counter() - began
    sys.stderr.write(f"{small}\n{seconds:.0f} seconds\n")
    tuned = trained(
        small.module(), folder / "tuned", given.data_dir, given.tune_epochs, 0.02
    )
    share = [
        f"{after / before:.3f}" for before, after in (small.num_params, small.macs)
    ]
    networks = {
        f"trained for {given.epochs:g} epochs": (
            jax.jit(whole.network.logits),
            ["1", "1"],
            "",
        ),
        f"after prune(..., budget={given.budget!r})": (small, share, f"{seconds:.0f}"),
        f"and {given.tune_epochs:g} epochs of tuning": (
            jax.jit(tuned.network.logits),
            share,
            "",
        ),
    }
    yield [
        *("network", "parameters", "multiply-accumulates"),
        *("validation accuracy", "test accuracy", "seconds of prune"),
    ]
    yield ["---"] * 6
    for name, (network, shares, took) in networks.items():
        splits = (dataset.validation, dataset.test)
        scores = [f"{accuracy(network, split):.4f}" for split in splits]
        yield [name, *shares, *scores, took]


def trained(
    module: Any, folder: Path, data_dir: str, epochs: float, learning_rate: float
) -> TrainResult:
    """Trains a module of PyTorch, whose images have their channels first."""
    settings = {
        "data": {"name": "cifar10", "dir": data_dir, "batch_size": 64},
        "method": {"name": "dense"},
        "optimizer": {"learning_rate": learning_rate},
        "run": {"epochs": epochs, "read_test": False, "log_every_steps": 50},
    }
    return train(settings, folder, model=module, inputs=channels_first)


def channels_first(examples: PyTree) -> Any:
    """Images as PyTorch has them."""
    return examples["image"].transpose(0, 3, 1, 2)


def calibration(split: Any) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Some training images, and batches of them with labels, drawn at random."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(len(split), _BATCHES * _BATCH_SIZE, replace=False))
    with evaluation_batches(split, _BATCH_SIZE, rows) as found:
        batches = [
            (jnp.asarray(channels_first(batch)), jnp.asarray(batch["label"]))
            for batch in found
        ]
    return batches[0][0], batches


def accuracy(network: Callable[[Any], Any], split: Any) -> float:
    """Share of a split that a network classifies right."""
    right = total = 0.0
    with evaluation_batches(split, _SCORED, np.arange(len(split))) as batches:
        for batch in batches:
            answers = np.asarray(network(channels_first(batch))).argmax(-1)
            right += float(((answers == batch["label"]) * batch["valid"]).sum())
            total += float(batch["valid"].sum())
    return right / total


if __name__ == "__main__":
    main()
