"""Which task settings mean."""

import dataclasses
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.imports import import_named, is_named
from prunex_jax.base.settings import OptimizerConfig, check_defaults
from prunex_jax.data import (
    OF_TEXT,
    OWN,
    MaskedSplit,
    Masking,
    TextDataset,
    is_text,
    names_arrays,
    open_dataset,
    open_text,
    without_effect,
)
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import SPLITS
from prunex_jax.models import (
    MASKED_TOKEN,
    NEXT_TOKEN,
    check_norm_scope,
    check_sections,
    is_own,
    make_language_model,
    make_model,
    own_model,
)
from prunex_jax.models.settings import ModelConfig
from prunex_jax.tasks.base import Task
from prunex_jax.tasks.checks import ROWS, answers_of, check_token_scores
from prunex_jax.tasks.classification import Classification
from prunex_jax.tasks.language import Language, MaskedLanguage
from prunex_jax.tasks.own import OF_IMAGE_MODELS, Own, own_task

_LANGUAGE_MODELS = (*NEXT_TOKEN, *MASKED_TOKEN)


def make_task(
    data: DataConfig,
    model: ModelConfig,
    seed: int,
    own: Own | None = None,
    *,
    label_smoothing: float = 0.0,
    teacher_temperature: float = 1.0,
) -> Task:
    """Makes the task of a run.

    Args:
      data: What is read.
      model: What learns it.
      seed: Of the run.
      own: What a user brings instead.
      label_smoothing: As of `Classification`.
      teacher_temperature: As of `Classification`.
    Raises:
      UserError: Something is not known, or does not fit.
    Example:
      >>> task = make_task(DataConfig(name='stdlib'), ModelConfig(name='gpt'), seed=0)
      >>> [metric.name for metric in task.objective.metrics]
      ['loss', 'perplexity', 'bits_per_byte']
    """
    options: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "teacher_temperature": teacher_temperature,
    }
    _check_is_there(data, model, own)
    if own is None and is_named(model.name):
        own = Own(import_named(model.name, "config.model.name"))
    if (own is None or own.data is None) and is_text(data):
        return _language(data, model, own, label_smoothing, teacher_temperature)
    if own is None and model.name in _LANGUAGE_MODELS:
        raise UserError(
            f"config.model.name={model.name!r} reads text, and config.data.name="
            f"{data.name!r} has images; set config.data.name='stdlib', or another model"
        )
    check_defaults("data", data, OF_TEXT, "data without text")
    if own is not None or names_arrays(data):
        check_sections(model)
        return own_task(own or Own(), data, model, seed, **options)
    dataset = open_dataset(data, seed)
    network = make_model(model, dataset.image_shape, dataset.num_classes)
    return Task(dataset, network, Classification(**options))


def _check_is_there(data: DataConfig, model: ModelConfig, own: Own | None) -> None:
    """Refuses settings of a run to which something was brought that is not here."""
    own = own or Own()
    missing = {
        "data": data.name if data.name == OWN and own.data is None else "",
        "model": model.name if is_own(model.name) and own.model is None else "",
    }
    for part, name in missing.items():
        if name:
            raise UserError(
                f"config.{part}.name={name!r} was brought to `train` in Python, and "
                f"settings do not hold it; give the same {part} again: to `train` or "
                f"`open_run`, or on the command line as --{part}=package.module:object"
            )


def _language(
    data: DataConfig,
    model: ModelConfig,
    own: Own | None,
    label_smoothing: float,
    teacher_temperature: float,
) -> Task:
    check_defaults("data", data, without_effect(data), f"text of {data.name!r}")
    smoothing = OptimizerConfig(label_smoothing=label_smoothing)
    check_defaults("optimizer", smoothing, ("label_smoothing",), "text")
    if own is not None and (own.loss, own.inputs, own.metrics) != (None, None, {}):
        raise UserError(
            f"loss, inputs and metrics are those of text with config.data.name="
            f"{data.name!r}; give data of your own beside them, or leave them out"
        )
    has_own = own is not None and own.model is not None
    if not has_own and model.name not in _LANGUAGE_MODELS:
        raise UserError(
            f"config.model.name={model.name!r} reads images, and config.data.name="
            f"{data.name!r} is text; choose one of {', '.join(_LANGUAGE_MODELS)}"
        )
    heeded = set() if has_own else {"compute_dtype", "recompute"}
    fields = sorted({*OF_IMAGE_MODELS} - heeded)
    check_defaults("model", model, fields, "a model of text")
    check_sections(model)
    dataset = open_text(data)
    if not has_own and model.name in MASKED_TOKEN:
        return _masked_language(dataset, model, teacher_temperature)
    objective = Language(dataset.length, dataset.has_bytes, teacher_temperature)
    if own is not None and own.model is not None:
        example = objective.inputs(dataset.train.evaluation_batch(np.arange(1)))
        network = own_model(own.model, example)
        answers = answers_of(network, network.example(ROWS))
        check_token_scores(answers, dataset.length, dataset.num_tokens)
    else:
        network = make_language_model(model, dataset.num_tokens, dataset.length)
    check_norm_scope(model, network, "a model of text")
    return Task(dataset, network, objective)


def _masked_language(
    dataset: TextDataset, model: ModelConfig, teacher_temperature: float
) -> Task:
    """A token of the vocabulary stands for those that are hidden, or one more."""
    size, mask = dataset.num_tokens, dataset.mask
    if mask is None:
        size, mask = size + 1, size
    masking = Masking(mask, num_tokens=dataset.num_tokens, length=dataset.length)
    masked: dict[str, Any] = {
        name: MaskedSplit.of(getattr(dataset, name), masking) for name in SPLITS
    }
    network = make_language_model(model, size, dataset.length)
    check_norm_scope(model, network, "a model of text")
    objective = MaskedLanguage(dataset.length, teacher_temperature)
    return Task(dataclasses.replace(dataset, **masked), network, objective)
