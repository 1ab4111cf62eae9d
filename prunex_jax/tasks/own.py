"""A network, data or a loss of the user's own, in any combination with ours."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.settings import check_defaults
from prunex_jax.base.trees import PyTree
from prunex_jax.data import (
    EXAMPLE,
    MIXING,
    OF_IMAGES,
    VALID,
    Dataset,
    ImageDataset,
    open_named,
    open_own,
)
from prunex_jax.data.own import labels_of
from prunex_jax.data.settings import DataConfig
from prunex_jax.mesh.varying import untyped
from prunex_jax.models import Model, check_norm_scope, make_model, own_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.tasks.base import (
    LOSS,
    Batch,
    Measure,
    Metric,
    Objective,
    Sums,
    Task,
    sum_valid,
    valid_rows,
)
from prunex_jax.tasks.checks import (
    FEW,
    ROWS,
    answers_of,
    check_examples,
    check_labels,
    check_teaches,
    without_rows,
)
from prunex_jax.tasks.classification import Classification

# (answers, examples) -> float32[] or float32[batch].
OwnMeasure = Callable[[PyTree, PyTree], jax.Array]
# Settings of networks and data of ours, which say nothing of others.
OF_IMAGE_MODELS = ("stem", "compute_dtype", "convolution", "recompute")
_OF_OUR_MODELS = (*OF_IMAGE_MODELS, "width")
_OF_OUR_DATA = ("dir", "loader", *OF_IMAGES)


@dataclasses.dataclass(frozen=True, eq=False)
class Own:
    """What a user brings; None takes what the settings say.

    Attributes:
      model: As `models.own_model` takes it.
      data: As `data.open_own` takes it.
      loss: (answers, examples) -> mean loss, or the loss of every example; or
        `classification` or `regression`. None chooses by the targets: integers are
        classes, and other numbers are to be met with the least squared error.
      inputs: What the network reads of examples: a key of it, or a function. None takes
        the first of a pair, entry `image` of a dict, or all of a single array.
      metrics: Name -> what `loss` takes and gives, to be measured beside it.
    """

    model: Any = None
    data: Any = None
    loss: OwnMeasure | str | None = None
    inputs: Callable[[PyTree], PyTree] | Any = None
    metrics: Mapping[str, OwnMeasure] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OwnObjective:
    """A loss of the user's own."""

    loss_of: OwnMeasure
    inputs_of: Callable[[Batch], PyTree]  # What the network reads of a batch.
    measured: tuple[tuple[str, Measure], ...] = ()  # What else is measured, by name.
    example: str = "ex"  # What an example is.

    unit = "examples"
    units_per_example = 1
    can_be_taught = False

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The loss, and what else is measured."""
        return (LOSS, *(Metric(name) for name, _ in self.measured))

    @property
    def counted(self) -> tuple[str, ...]:
        """Examples, and what else is measured."""
        return (*(name for name, _ in self.measured), "examples")

    def inputs(self, batch: Batch) -> PyTree:
        """What the network reads."""
        return self.inputs_of(batch)

    def loss(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """The mean loss of a batch, as it was given."""
        return jnp.mean(self.loss_of(outputs, examples_of(batch)))

    def count(self, outputs: PyTree, batch: Batch) -> Sums:
        """Examples, and what else is measured."""
        size = jax.tree.leaves(examples_of(batch))[0].shape[0]
        valid = valid_rows(batch, size)
        sums = {k: sum_valid(f(outputs, batch), valid) for k, f in self.measured}
        return {**sums, "examples": jnp.sum(valid)}

    def score(self, outputs: PyTree, batch: Batch) -> Sums:
        """The same, and the losses."""
        losses = each_of(self.loss_of, outputs, examples_of(batch))
        return {"loss": sum_valid(losses, batch[VALID]), **self.count(outputs, batch)}

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over examples."""
        names = ("loss", *(name for name, _ in self.measured))
        return {name: sums[name] / sums["examples"] for name in names}


def each_of(measure: OwnMeasure, outputs: PyTree, examples: PyTree) -> jax.Array:
    """What a measure gives for every example, float32[batch].

    One that gives a mean over a batch is asked about batches of one.

    Example:
      >>> def mean_square(outputs, targets):
      ...     return jnp.mean((outputs - targets) ** 2)
      >>> each_of(mean_square, jnp.array([1.0, 2.0]), jnp.zeros(2)).tolist()
      [1.0, 4.0]
    """
    size = jax.tree.leaves(examples)[0].shape[0]
    if jax.eval_shape(measure, outputs, examples).shape == (size,):
        return measure(outputs, examples)

    def one(output: PyTree, example: PyTree) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None], (output, example))
        return jnp.mean(measure(*alone))

    return jax.vmap(one)(outputs, examples)


def own_task(
    own: Own, data: DataConfig, model: ModelConfig, seed: int, **classification: Any
) -> Task:
    """Makes a task of what a user brings.

    Args:
      own: What it is.
      data: Settings of the data.
      model: Settings of the network.
      seed: As for `open_dataset`.
      **classification: Fields of `Classification`.
    Raises:
      UserError: Parts do not fit each other, or settings say something of what they
        know nothing of.
    """
    dataset: Dataset
    if own.data is None:
        dataset = open_named(data, seed)
        if not isinstance(dataset, ImageDataset):
            check_defaults(
                "data", data, ("loader", *OF_IMAGES), f"arrays of {data.dir}"
            )
    else:
        check_defaults("data", data, _OF_OUR_DATA, "data of your own")
        dataset = open_own(own.data, data)
    first = dataset.train.finished(dataset.train.evaluation_batch(np.arange(1)))
    examples = examples_of(first)
    read = _reading(own.inputs, examples)
    inputs = read(examples)
    if own.model is None:
        network = _our_model(model, dataset, inputs)
    else:
        check_defaults("model", model, _OF_OUR_MODELS, "a model of your own")
        network = own_model(own.model, inputs)
        check_norm_scope(model, network, "a model without statistics of batches")
    objective = _objective(own, read, examples, classification)
    if not isinstance(objective, Classification):
        check_defaults("data", data, MIXING, "a loss of your own")
    answers, warnings = _check_objective(own, objective, network, first)
    warnings += check_examples(dataset, has_own_loss=callable(own.loss))
    if isinstance(objective, Classification):
        warnings += check_labels(dataset, answers.shape[-1])
    else:
        few = dataset.train.evaluation_batch(np.arange(min(len(dataset.train), FEW)))
        batch = dataset.train.finished(few)
        answers = answers_of(network, jax.eval_shape(objective.inputs, batch))
        warnings += check_teaches(lambda x: objective.loss(x, batch), answers)
    return Task(dataset, network, objective, warnings)


def examples_of(batch: Batch) -> PyTree:
    """The examples of a batch as the user knows them."""
    if EXAMPLE in batch:
        return batch[EXAMPLE]
    return {name: batch[name] for name in ("image", "label")}


def _reading(
    inputs: Callable[[PyTree], PyTree] | Any, examples: PyTree
) -> Callable[[PyTree], PyTree]:
    if callable(inputs):
        return inputs
    key = inputs
    if key is None and not isinstance(examples, dict | tuple):
        return lambda examples: examples
    if key is None:
        key = 0 if isinstance(examples, tuple) else "image"
    if isinstance(examples, dict) and key not in examples:
        raise UserError(
            f"inputs={key!r} is no entry of an example, which has "
            f"{', '.join(map(repr, examples))}; name the one that the network reads, "
            "or give a function of examples"
        )
    return lambda examples: examples[key]


def _our_model(config: ModelConfig, dataset: Dataset, inputs: PyTree) -> Model:
    if isinstance(dataset, ImageDataset):
        return make_model(config, dataset.image_shape, dataset.num_classes)
    shape = np.shape(inputs)[1:] if isinstance(inputs, np.ndarray) else ()
    problem = dataset.train.why_no_labels()
    if len(shape) != 3 or problem:
        raise UserError(
            f"config.model.name={config.name!r} classifies images, and the data that "
            "were given are no pairs (images[n, height, width, channels], labels[n]); "
            "give a model of your own"
        )
    return make_model(config, shape, int(dataset.train.labels().max()) + 1)


def _objective(
    own: Own,
    read: Callable[[PyTree], PyTree],
    examples: PyTree,
    classification: Mapping[str, Any],
) -> Objective:
    labels, loss = labels_of(examples), own.loss
    taken = {"loss", "accuracy", "correct", "examples"} & set(own.metrics)
    if taken:
        raise UserError(f"metrics has {taken.pop()!r}, which has a meaning; rename it")
    measured = tuple((k, _measured(measure)) for k, measure in own.metrics.items())

    def inputs_of(batch: Batch) -> PyTree:
        return read(examples_of(batch))

    if loss is None:
        loss = "regression" if labels is None else "classification"
    if loss == "classification":
        if labels is None:
            raise UserError(
                "loss='classification' needs labels, integers[n], as the second of a "
                "pair or as entry 'label' of examples"
            )
        is_pair = isinstance(examples, tuple)
        return Classification(
            inputs_of=inputs_of,
            labels_of=lambda batch: examples_of(batch)[1 if is_pair else "label"],
            example="ex",
            measured=measured,
            **classification,
        )
    if loss == "regression":
        if not (isinstance(examples, tuple) and len(examples) == 2):
            raise UserError(
                "loss=None needs examples (x, y) with the numbers y to be met, and "
                "these are others; give a loss(answers, examples)"
            )
        loss = _squared_error
    if not callable(loss):
        raise UserError(
            f"loss={loss!r} is neither a function of answers and examples, nor "
            "'classification' or 'regression'"
        )
    if classification.get("label_smoothing"):
        raise UserError(
            f"config.optimizer.label_smoothing={classification['label_smoothing']:g} "
            "is for classes, and the loss is another one; set it to 0"
        )
    return OwnObjective(untyped(loss), inputs_of, measured)


def _measured(measure: OwnMeasure) -> Measure:
    called = untyped(measure)
    return lambda outputs, batch: each_of(called, outputs, examples_of(batch))


def _squared_error(answers: PyTree, examples: PyTree) -> jax.Array:
    """Mean squared error of every example."""
    _, wanted = examples
    errors = (answers - wanted.reshape(answers.shape)) ** 2
    return jnp.mean(errors.reshape(errors.shape[0], -1), axis=1)


def _check_objective(
    own: Own, objective: Objective, model: Model, first: Batch
) -> tuple[PyTree, tuple[str, ...]]:
    """Calls everything once, in shapes, before anything is compiled.

    Returns:
      Shapes of the answers for `ROWS` examples, and warnings.
    """
    batch = jax.tree.map(lambda x: np.repeat(x[:1], ROWS, axis=0), dict(first))
    examples = examples_of(batch)
    measures = {**own.metrics, "loss": getattr(objective, "loss_of", None)}
    try:
        answers = answers_of(model, jax.eval_shape(objective.inputs, batch))
        problem = without_rows(answers)
        # A mean is taken example by example where networks are scored, and then answers
        # have rows; a loss of each example may read others beside them.
        needs_rows = not callable(own.loss)
        for name, measure in measures.items():
            if measure is not None:
                found = jax.eval_shape(measure, answers, examples)
                _check_measure(name, found)
                needs_rows |= found.shape != (ROWS,)
        if problem and needs_rows:
            raise UserError(f"{problem}; give one row per example")
        if isinstance(objective, Classification):
            _check_scores(answers)
        valid = {VALID: np.ones(ROWS, np.float32)}
        jax.eval_shape(objective.score, answers, {**batch, **valid})
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            "loss or metrics cannot be called with the answers of the network and an "
            f"example: {one_line(error, 300)}"
        ) from error
    return answers, (problem,) if problem else ()


def _check_scores(answers: PyTree) -> None:
    shapes = [x.shape for x in jax.tree.leaves(answers)]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        said = ", ".join(str(list(shape)) for shape in shapes)
        raise UserError(
            f"the network answers {ROWS} examples with numbers of shape {said}, and "
            "integer targets are classes: give one number per class, [examples, "
            "classes], or a loss(answers, examples) of your own"
        )


def _check_measure(name: str, found: PyTree) -> None:
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    has_rows = shape is not None and shape[:1] in ((), (ROWS,))
    if not has_rows or not (is_float or name != "loss"):
        said = type(found).__name__ if shape is None else f"{dtype}{list(shape)}"
        raise UserError(
            f"{name} gives {said} for {ROWS} examples; give one number, or one for "
            "every example"
        )
