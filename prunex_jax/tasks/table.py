"""Which task settings mean."""

import dataclasses
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig, ModelConfig, check_defaults
from prunex_jax.data import (
    NUM_TOKENS,
    OWN,
    MaskedSplit,
    Masking,
    TextDataset,
    open_dataset,
    open_stdlib,
)
from prunex_jax.models import (
    MASKED_TOKEN,
    NEXT_TOKEN,
    AnyModel,
    is_own,
    make_language_model,
    make_model,
    named_model,
    own_model,
)
from prunex_jax.tasks.base import Task
from prunex_jax.tasks.classification import Classification
from prunex_jax.tasks.language import Language
from prunex_jax.tasks.masked import MaskedLanguage
from prunex_jax.tasks.own import OF_IMAGE_MODELS, Own, own_task

TEXT = "stdlib"
_LANGUAGE_MODELS = (*NEXT_TOKEN, *MASKED_TOKEN)
# Sections of settings, and the networks that heed them.
_SECTIONS = {"gpt": NEXT_TOKEN, "bert": MASKED_TOKEN}


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
    if own is None and ":" in model.name:
        own = Own(named_model(model.name))
    is_text = data.name == TEXT and (own is None or own.data is None)
    if is_text:
        return _language(data, model, own, label_smoothing, teacher_temperature)
    if own is not None:
        _check_sections(model)
        return own_task(own, data, model, seed, **options)
    if model.name in _LANGUAGE_MODELS:
        raise UserError(
            f"config.model.name={model.name!r} reads text, and config.data.name="
            f"{data.name!r} has images; set config.data.name={TEXT!r}, or another model"
        )
    _check_sections(model)
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
                f"settings do not hold it; call `train` with the same {part} again, or "
                "export with `export_model`"
            )


def _check_sections(model: ModelConfig) -> None:
    """Refuses settings of another network than the one that is built."""
    for section, names in _SECTIONS.items():
        if model.name not in names:
            settings = getattr(model, section)
            fields = [field.name for field in dataclasses.fields(settings)]
            what = f"model {model.name}"
            check_defaults(f"model.{section}", settings, fields, what)


def _language(
    data: DataConfig,
    model: ModelConfig,
    own: Own | None,
    label_smoothing: float,
    teacher_temperature: float,
) -> Task:
    for setting, value in (
        ("data.augment", data.augment != "none" and data.augment),
        ("data.image_size", data.image_size),
        (
            "data.normalization",
            data.normalization != "auto" and data.normalization,
        ),
        ("data.dir", data.dir),
        ("optimizer.label_smoothing", label_smoothing),
    ):
        if value:
            raise UserError(
                f"config.{setting}={value!r} is for images, and config.data.name="
                f"{data.name!r} is text; leave it at its default"
            )
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
    heeded = set() if has_own else {"compute_dtype"}
    fields = sorted({*OF_IMAGE_MODELS} - heeded)
    check_defaults("model", model, fields, "a model of text")
    _check_sections(model)
    dataset = open_stdlib(data)
    if not has_own and model.name in MASKED_TOKEN:
        return _masked_language(dataset, model, teacher_temperature)
    objective = Language(dataset.length, teacher_temperature=teacher_temperature)
    network: AnyModel
    if own is not None and own.model is not None:
        example = objective.inputs(dataset.train.evaluation_batch(np.arange(1)))
        network = own_model(own.model, example)
    else:
        network = make_language_model(model, NUM_TOKENS, dataset.length)
    return Task(dataset, network, objective)


def _masked_language(
    dataset: TextDataset, model: ModelConfig, teacher_temperature: float
) -> Task:
    """One token more than text has stands for those that are hidden."""
    masking = Masking(mask=NUM_TOKENS, num_tokens=NUM_TOKENS, length=dataset.length)
    masked = {
        name: MaskedSplit(getattr(dataset, name), masking)
        for name in ("train", "validation", "test")
    }
    network = make_language_model(model, NUM_TOKENS + 1, dataset.length)
    objective = MaskedLanguage(dataset.length, teacher_temperature)
    return Task(dataclasses.replace(dataset, **masked), network, objective)
