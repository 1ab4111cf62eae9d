"""Looks at examples, and at what a network answers, before anything is trained.

What cannot be learned from is refused; what is only odd becomes a warning.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.data import EXAMPLE, Dataset, ImageDataset, Split
from prunex_jax.data.own import OwnSplit, labels_of
from prunex_jax.data.splits import SPLITS, ArraySource
from prunex_jax.models import Model

# Examples of a batch that shapes are looked at with: none of the sizes people use.
ROWS = 3
# Examples that are read of data that do not lie in memory.
FEW = 32


def check_examples(dataset: Dataset, has_own_loss: bool = False) -> tuple[str, ...]:
    """Refuses examples of a user's own that no network can learn from.

    All are looked at that lie in memory, and of others the first 32 for training.

    Args:
      dataset: The examples.
      has_own_loss: Whether a loss of the user's own may leave out what is no number,
        as where targets are masked: then it is a warning.
    Returns:
      Warnings of what is odd.
    Raises:
      UserError: Numbers are not finite.
    Example:
      >>> from prunex_jax.data import open_own
      >>> from prunex_jax.data.settings import DataConfig
      >>> check_examples(open_own(np.ones((9, 2)), DataConfig()))
      ('the examples for training are all the same',)
    """
    warnings: list[str] = []
    for name, examples in _read(dataset):
        for path, array in flatten_by_path(examples).items():
            called = f"entry {path} of the examples" if path else "the examples"
            problem = _not_finite(array)
            if problem and not has_own_loss:
                raise UserError(
                    f"data: {called} in {name} has numbers that are not finite in "
                    f"{problem}; remove these examples or replace the numbers"
                )
            if problem:
                warnings.append(f"{called} in {name} is not finite in {problem}")
            if name == "train" and array.ndim > 1 and _is_constant(array):
                warnings.append(f"{called} for training are all the same")
    return tuple(warnings)


def check_labels(dataset: Dataset, num_outputs: int) -> tuple[str, ...]:
    """Refuses labels for which a network has no answer.

    Args:
      dataset: Labelled examples, labels as of `check_examples`.
      num_outputs: Classes that the network tells apart.
    Returns:
      Warnings of classes without an example.
    Raises:
      UserError: A label is negative or too large, or there is one output.
    Example:
      >>> from prunex_jax.data import open_own
      >>> from prunex_jax.data.settings import DataConfig
      >>> x, labels = np.eye(4), np.array([1, 2, 1, 2])
      >>> check_labels(open_own((x, labels), DataConfig(validation_share=0.0)), 3)
      ('1 of 3 classes have no example for training; the first is 0',)
    """
    if num_outputs == 1:
        raise UserError(
            "the network gives 1 number per example, and labels are classes: give it "
            "an output for each class, 2 where there are two"
        )
    if isinstance(dataset, ImageDataset):
        if dataset.num_classes > num_outputs:
            raise UserError(
                f"labels of {dataset.name!r} go from 0 to {dataset.num_classes - 1}, "
                f"and the network has {num_outputs} outputs; give it "
                f"{dataset.num_classes}"
            )
        return ()
    for name, examples in _read(dataset):
        labels = labels_of(examples)
        if labels is None:
            continue
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= num_outputs:
            raise UserError(
                f"labels in {name} go from {lowest} to {highest}, and the network has "
                f"{num_outputs} outputs, for labels from 0 to {num_outputs - 1}; "
                "number the classes from 0, or give it more outputs"
            )
    return _unused_classes(dataset.train, num_outputs)


def answers_of(model: Model, inputs: PyTree) -> PyTree:
    """Shapes of a network's answers.

    Args:
      model: The network.
      inputs: What it reads of `ROWS` examples, as arrays or their shapes.
    """
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    return jax.eval_shape(model.apply, *arrays, inputs)


def without_rows(answers: PyTree) -> str:
    """Says which of the answers for `ROWS` examples has no row for each; "" if none."""
    for path, leaf in flatten_by_path(answers).items():
        if leaf.shape[:1] != (ROWS,):
            which = f"answer {path}" if path else "answer"
            return (
                f"the network's {which} for {ROWS} examples is "
                f"{leaf.dtype}{list(leaf.shape)}, without the examples along its "
                "first axis"
            )
    return ""


def check_teaches(
    loss: Callable[[PyTree], jax.Array], answers: PyTree
) -> tuple[str, ...]:
    """Warns of a loss whose gradient is zero at random answers.

    Args:
      loss: Answers -> mean loss of some examples.
      answers: Shapes of the answers for these examples.
    Example:
      >>> answers = jax.ShapeDtypeStruct((3, 2), jnp.float32)
      >>> check_teaches(lambda x: jnp.mean(jnp.argmax(x, 1) == 1), answers)
      ('the loss has no gradient: it does not change, or in steps, with the answers',)
      >>> check_teaches(lambda x: jnp.mean(x**2), answers)
      ()
    """
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(answers)):
        return ()
    random = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda x: random.standard_normal(x.shape).astype(x.dtype), answers
    )
    if any(map(np.any, jax.tree.leaves(jax.jit(jax.grad(loss))(drawn)))):
        return ()
    said = "the loss has no gradient: it does not change, or in steps, with the answers"
    return (said,)


def check_token_scores(answers: PyTree, length: int, num_tokens: int) -> None:
    """Refuses answers that are not a score for every token of a vocabulary.

    Args:
      answers: Shapes of the answers for `ROWS` sequences.
      length: Tokens of a sequence.
      num_tokens: Size of the vocabulary.
    Raises:
      UserError: They are something else, or the vocabulary is larger.
    """
    shapes = [x.shape for x in jax.tree.leaves(answers)]
    if [shape[:2] for shape in shapes] != [(ROWS, length)] or len(shapes[0]) != 3:
        said = ", ".join(str(list(shape)) for shape in shapes)
        raise UserError(
            f"the network answers {ROWS} sequences of {length} tokens with numbers of "
            f"shape {said}; give a score for every token of the vocabulary at every "
            f"place, [{ROWS}, {length}, {num_tokens}]"
        )
    if shapes[0][2] < num_tokens:
        raise UserError(
            f"the network tells {shapes[0][2]} tokens apart, and the vocabulary has "
            f"{num_tokens}; give it as many outputs"
        )


def _read(dataset: Dataset) -> Iterator[tuple[str, PyTree]]:
    """Split -> its examples as a user gave them, if they are in memory, or some."""
    for name in SPLITS:
        split = getattr(dataset, name)
        if not isinstance(split, OwnSplit) or not len(split):
            continue
        if split.is_loaded and isinstance(split.source, ArraySource):
            if name == "train" or split.source is not _source_of(dataset.train):
                yield name, split.source.arrays
        elif name == "train":
            first = np.arange(min(len(split), FEW))
            yield name, split.evaluation_batch(first)[EXAMPLE]


def _source_of(split: Split) -> Any:
    return split.source if isinstance(split, OwnSplit) else None


def _not_finite(array: np.ndarray) -> str:
    """In how many examples numbers are not finite, and the first; "" in none."""
    # A sum is finite where all numbers are, and needs no memory.
    if array.dtype.kind != "f" or np.isfinite(np.sum(array, dtype=np.float64)):
        return ""
    rows = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    wrong = np.flatnonzero(~rows)
    if not len(wrong):
        return ""
    return (
        f"{len(wrong)} of {len(array)} examples, the first of which is number "
        f"{wrong[0]}"
    )


def _is_constant(array: np.ndarray) -> bool:
    is_same = len(array) > 1 and np.array_equal(array[0], array[-1])
    return is_same and bool((array == array[:1]).all())


def _unused_classes(split: Split, num_outputs: int) -> tuple[str, ...]:
    if split.why_no_labels():
        return ()
    counts: Any = np.bincount(split.labels(), minlength=num_outputs)
    unused = np.flatnonzero(counts == 0)
    if not len(unused):
        return ()
    return (
        f"{len(unused)} of {num_outputs} classes have no example for training; the "
        f"first is {unused[0]}",
    )
