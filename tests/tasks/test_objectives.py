"""Losses and metrics: sums over any batches become the same means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import EXAMPLE, LABEL_SHARE, OTHER_LABEL, VALID
from prunex_jax.data.settings import DataConfig
from prunex_jax.models.settings import ModelConfig
from prunex_jax.tasks import Classification, Own, own_task
from tests.helpers import own_networks
from tests.helpers.common import assert_close

SIZE = 12
X, LABELS = own_networks.problem(SIZE)
LOGITS = np.random.default_rng(1).normal(size=(SIZE, 3)).astype(np.float32)
PAIR = (own_networks.init, own_networks.apply)


def task_of(data=(X, LABELS), model=PAIR, settings=None, label_smoothing=0.0, **own):
    settings = settings or {}
    data_config = DataConfig(validation_share=0.0, **settings.get("data", {}))
    model_config = ModelConfig(**settings.get("model", {}))
    return own_task(
        Own(model, data, **own),
        data_config,
        model_config,
        seed=0,
        label_smoothing=label_smoothing,
    )


def worst(answers, examples):
    return jnp.max(jnp.abs(answers), axis=-1)


def mean_loss(answers, examples):
    return jnp.mean(jnp.sum(answers**2, axis=-1) + examples[1])


def each_loss(answers, examples):
    return jnp.sum(answers**2, axis=-1) + examples[1]


def init_images(key):
    return {"w": jax.random.normal(key, (64, 3))}


def apply_images(params, images):
    return images.reshape(-1, 64) @ params["w"]


def mean_square(answers, examples):
    return jnp.mean(answers**2)


OBJECTIVES = {
    "images": lambda: Classification(),
    "labels": lambda: task_of(metrics={"worst": worst}).objective,
    "numbers": lambda: task_of(data=(X, LOGITS)).objective,
    "mean": lambda: task_of(loss=mean_loss, metrics={"worst": worst}).objective,
    "each": lambda: task_of(loss=each_loss).objective,
}


def batch_of(name, rows, padding=0):
    """These rows, and some that count for nothing."""

    def padded(x):
        return np.concatenate([x[rows], 7 * np.ones_like(x[:padding])])

    target = LOGITS[::-1] if name == "numbers" else LABELS
    batch = {"image": padded(X), "label": padded(target)}
    if name != "images":
        batch = {EXAMPLE: (padded(X), padded(target))}
    valid = np.arange(len(rows) + padding) < len(rows)
    return padded(LOGITS), {**batch, VALID: valid.astype(np.float32)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_sums_over_any_batches_become_the_same_means(name):
    objective = OBJECTIVES[name]()
    whole = objective.measures(objective.score(*batch_of(name, np.arange(SIZE))))
    parts = [
        objective.score(*batch_of(name, rows, padding))
        for rows, padding in ((np.arange(5), 0), (np.arange(5, SIZE), 3))
    ]
    sums = jax.tree.map(jnp.add, *parts)
    assert_close(objective.measures(sums), whole)
    assert set(whole) == {metric.name for metric in objective.metrics}
    assert set(sums) == {"loss", *objective.counted}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_minimises_what_evaluation_measures(name):
    objective = OBJECTIVES[name]()
    outputs, batch = batch_of(name, np.arange(SIZE))
    wanted = objective.measures(objective.score(outputs, batch))["loss"]
    assert_close(objective.loss(outputs, batch), wanted)


def test_a_loss_may_be_a_mean_or_that_of_each():
    mean, each = (OBJECTIVES[name]() for name in ("mean", "each"))
    outputs, batch = batch_of("mean", np.arange(7), padding=2)
    assert_close(mean.score(outputs, batch)["loss"], each.score(outputs, batch)["loss"])


def test_a_dict_names_what_is_read():
    data = {"points": X, "label": LABELS}
    objective = task_of(data, inputs="points").objective
    assert isinstance(objective, Classification)
    np.testing.assert_array_equal(objective.inputs({EXAMPLE: data}), X)
    read = task_of(data, inputs=lambda examples: 2 * examples["points"]).objective
    np.testing.assert_array_equal(read.inputs({EXAMPLE: data}), 2 * X)
    with pytest.raises(UserError, match="inputs='image' is no entry of an example"):
        task_of(data)


def test_our_networks_take_images_of_the_user():
    images = np.zeros((SIZE, 8, 8, 1), np.uint8)
    task = task_of((images, LABELS), model=None, settings={"model": {"width": 0.25}})
    arrays = jax.eval_shape(task.model.init, jax.random.key(0))
    example = task.model.example(2)
    assert example.shape == (2, 8, 8, 1)
    logits = jax.eval_shape(task.model.apply, *arrays, example)
    assert logits.shape == (2, LABELS.max() + 1)
    with pytest.raises(UserError, match="are no pairs"):
        task_of(model=None)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"loss": "hinge"}, "neither a function of answers and examples"),
        ({"loss": lambda a, e: a @ e}, "cannot be called with the answers"),
        ({"loss": lambda a, e: jnp.ones(7)}, "loss gives float32.7. for 3 examples"),
        ({"loss": lambda a, e: jnp.ones((), int)}, "loss gives int32.. for 3 examples"),
        ({"metrics": {"far": lambda a, e: a[:2, 0]}}, "far gives float32.2. for 3"),
        ({"metrics": {"loss": worst}}, "metrics has 'loss', which has a meaning"),
        ({"data": X, "loss": "classification"}, "needs labels"),
        ({"data": X}, "needs examples .x, y."),
        (
            {"settings": {"model": {"width": 2.0}}},
            "config.model.width=2.0 has no effect",
        ),
        ({"settings": {"data": {"augment": "shift"}}}, "config.data.augment='shift'"),
        (
            {"loss": each_loss, "label_smoothing": 0.1},
            "label_smoothing=0.1 is for classes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(own, message):
    with pytest.raises(UserError, match=message):
        task_of(**own)


def mixed_batch():
    rng = np.random.default_rng(3)
    labels, others = rng.integers(0, 3, (2, SIZE))
    share = rng.uniform(size=SIZE).astype(np.float32)
    return {"label": labels, OTHER_LABEL: others, LABEL_SHARE: share}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_taught", [False, True])
def test_loss_of_mixed_images_is_the_weighted_mean(smoothing, is_taught):
    """Of the losses with either label, smoothed and taught as they are alone."""
    batch = mixed_batch()
    if is_taught:
        batch["teacher"] = np.flip(LOGITS, axis=0)
        batch["teacher_weight"] = np.linspace(0, 1, SIZE).astype(np.float32)
    objective = Classification(label_smoothing=smoothing, teacher_temperature=2.0)
    rest = {k: v for k, v in batch.items() if k not in (OTHER_LABEL, LABEL_SHARE)}

    def each(labels):
        alone = [
            {**{k: v[i : i + 1] for k, v in rest.items()}, "label": labels[i : i + 1]}
            for i in range(SIZE)
        ]
        answers = LOGITS[:, None]
        return np.array(
            [objective.loss(a, b) for a, b in zip(answers, alone, strict=True)]
        )

    share = batch[LABEL_SHARE]
    wanted = share * each(batch["label"]) + (1 - share) * each(batch[OTHER_LABEL])
    assert_close(objective.loss(LOGITS, batch), wanted.mean())


def test_answers_for_mixed_images_count_with_their_share():
    batch = mixed_batch()
    answers, share = np.argmax(LOGITS, axis=-1), batch[LABEL_SHARE]
    hits = share * (answers == batch["label"])
    hits += (1 - share) * (answers == batch[OTHER_LABEL])
    assert_close(Classification().count(LOGITS, batch)["correct"], hits.sum())


@pytest.mark.parametrize(
    ("data", "own", "message"),
    [
        ({"mixup": 0.2}, {}, "mixup=0.2 has no effect on data of your own"),
        ({"rand_augment_operations": 1}, {}, "rand_augment_operations=1 has no effect"),
        (
            {"name": "digits", "cutmix": 1.0},
            {"data": None, "loss": mean_square, "model": (init_images, apply_images)},
            "cutmix=1.0 has no effect on a loss of your own",
        ),
    ],
)
def test_mixing_that_nothing_heeds_is_refused(data, own, message):
    with pytest.raises(UserError, match=message):
        task_of(settings={"data": data}, **own)
