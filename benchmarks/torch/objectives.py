"""Losses of this package's tasks in PyTorch. Importing it needs torch."""

import dataclasses
from typing import Protocol

import torch
from torch.nn import functional

from prunex_jax.base.errors import UserError
from prunex_jax.data import EXAMPLE, Batch
from prunex_jax.tasks import Classification, Language, Objective

Tensors = tuple[torch.Tensor, torch.Tensor]


class TorchObjective(Protocol):
    """What a step minimises."""

    def tensors(self, batch: Batch) -> Tensors:
        """What the network reads of a batch, and what it is to answer."""
        ...

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss over the batch of this process, float32[]."""
        ...


def make_torch_objective(objective: Objective) -> TorchObjective:
    """The PyTorch form of an objective.

    Raises:
      UserError: It has none.
    """
    if type(objective) is Language:
        return _Text()
    if type(objective) is Classification:
        return _Images(objective.label_smoothing)
    raise UserError(
        "rows with runtime torch learn labelled images or the next token of text, and "
        f"this task is {type(objective).__name__}; give the row runtime jax"
    )


@dataclasses.dataclass(frozen=True)
class _Images:
    """As `tasks.Classification`, of labelled images."""

    label_smoothing: float

    def tensors(self, batch: Batch) -> Tensors:
        """Images, float32[n, c, h, w] in the memory of ours, and int64[n]."""
        images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)
        return images, torch.from_numpy(batch["label"]).long()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy with the labels."""
        return functional.cross_entropy(
            outputs, targets, label_smoothing=self.label_smoothing
        )


@dataclasses.dataclass(frozen=True)
class _Text:
    """As `tasks.Language`."""

    def tensors(self, batch: Batch) -> Tensors:
        """Tokens and those that follow them, int64[n, length] each."""
        tokens = torch.from_numpy(batch[EXAMPLE]).long()
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy with the next tokens."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
