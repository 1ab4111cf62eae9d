"""What no network can learn is refused before the first step; what is odd is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data.settings import DataConfig
from prunex_jax.models.settings import ModelConfig
from prunex_jax.tasks import Own, make_task

SIZE, CLASSES = 40, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZE, 4)).astype(np.float32)
LABELS = (np.arange(SIZE) % CLASSES).astype(np.int32)


def network(num_outputs=CLASSES, answer=lambda x: x):
    """A linear network; what it answers may be changed."""

    def init(key):
        return {"w": jax.random.normal(key, (4, num_outputs))}

    return init, lambda params, x: answer(x @ params["w"])


def task_of(data=(X, LABELS), model=None, **given):
    own = Own(model or network(), data, **given)
    return make_task(DataConfig(name="own"), ModelConfig(), 0, own)


def with_one(array, value, place=17):
    changed = array.copy()
    changed[place] = value
    return changed


class Indexed:
    """Examples that are read one by one."""

    def __init__(self, x, labels):
        self.arrays = x, labels

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, number):
        return tuple(array[number] for array in self.arrays)


def test_ordinary_examples_are_taken_without_a_word():
    assert task_of().warnings == ()
    assert task_of(Indexed(X, LABELS)).warnings == ()


@pytest.mark.parametrize(
    ("labels", "outputs", "said"),
    [
        (LABELS - 1, 3, "from -1 to 1"),
        (LABELS + 1, 3, "from 1 to 3"),
        (LABELS % 2 + 1, 2, "from 1 to 2"),
        (np.arange(SIZE) % 5, 2, "from 0 to 4"),
        (with_one(LABELS.astype(np.uint8), 255), 3, "from 0 to 255"),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_labels_without_an_output_are_refused(labels, outputs, said, split):
    data = {"train": (X, np.zeros(SIZE, labels.dtype)), split: (X, labels)}
    with pytest.raises(UserError, match=f"{said}, and the network has {outputs} out"):
        task_of(data, network(outputs))
    if split == "train":
        with pytest.raises(UserError, match=said):
            task_of(Indexed(X, labels), network(outputs))


def test_one_number_is_no_answer_about_classes():
    with pytest.raises(UserError, match="gives 1 number per example"):
        task_of((X, LABELS % 2), network(1))


def test_labels_of_images_are_compared_with_the_outputs():
    def init(key):
        return {"w": jnp.zeros((64, 7))}

    few = init, lambda params, x: x.reshape(len(x), -1) @ params["w"]
    with pytest.raises(UserError, match="from 0 to 9, and the network has 7 outputs"):
        make_task(DataConfig(name="digits"), ModelConfig(), 0, Own(few))


def test_integers_do_not_wrap():
    with pytest.raises(UserError, match="number 4294967297, which does not fit"):
        task_of((X, LABELS.astype(np.int64) + 2**32 * (LABELS == 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_numbers_that_are_not_finite_are_refused(value, split):
    data = {"train": (X, LABELS), split: (with_one(X, value), LABELS)}
    with pytest.raises(UserError, match=rf"entry 0 .* {split} .* 1 of 40 .* 17;"):
        task_of(data)


def test_a_loss_of_ones_own_may_leave_out_what_is_no_number():
    def masked(answers, examples):
        errors = answers - examples[1]
        return jnp.mean(jnp.nan_to_num(errors) ** 2)

    targets = with_one(np.ones((SIZE, CLASSES), np.float32), np.nan)
    (warning,) = task_of((X, targets), loss=masked).warnings
    assert warning.startswith("entry 1 of the examples in train is not finite in 1 of")


def test_losses_of_each_example_may_read_more_than_rows():
    """Such as what layers of experts have to say of a batch; it is a warning."""

    def each(answers, examples):
        return jnp.sum(answers["a"] ** 2, axis=-1) + answers["b"]

    def all_numbers(answers, examples):
        return answers["a"] ** 2

    model = network(answer=lambda x: {"a": x, "b": jnp.mean(x)})
    (warning,) = task_of(model=model, loss=each).warnings
    assert warning.startswith("the network's answer b for 3 examples is float32[]")
    with pytest.raises(UserError, match=r"answer b .* give one row per example"):
        task_of(model=model, loss=lambda a, e: jnp.mean(each(a, e)))
    with pytest.raises(UserError, match="give one row per example"):
        task_of(model=model, loss=all_numbers)
    rows = network(answer=lambda x: {"a": x})
    assert task_of(model=rows, loss=all_numbers).warnings == ()


@pytest.mark.parametrize(
    "loss",
    [
        lambda answers, examples: jnp.ones(len(answers)),
        lambda answers, examples: jnp.mean(jnp.argmax(answers, 1) != examples[1]),
        lambda answers, examples: jnp.mean(jax.lax.stop_gradient(answers) ** 2),
    ],
)
def test_a_loss_without_a_gradient_is_a_warning(loss):
    (warning,) = task_of(loss=loss).warnings
    assert warning.startswith("the loss has no gradient")


def test_files_that_are_mapped_are_not_read_whole(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(SIZE, 4))
    mapped[:] = X
    mapped[38:] = np.nan
    assert task_of((mapped, LABELS)).warnings == ()
    mapped[:8] = np.nan
    with pytest.raises(UserError, match=r"not finite in . of 32 examples"):
        task_of((mapped, LABELS))


def test_numbers_too_large_for_float32_are_refused():
    with np.errstate(over="ignore"), pytest.raises(UserError, match="not finite in 1"):
        task_of((with_one(X.astype(np.float64), 1e300), LABELS))


def test_large_finite_numbers_are_taken():
    assert task_of((X * 1e37, LABELS)).warnings == ()


@pytest.mark.parametrize(
    ("data", "outputs", "warning"),
    [
        ((0 * X, LABELS), 3, "entry 0 of the examples for training are all the same"),
        ((X, LABELS % 2 + 1), 3, "1 of 3 classes have no example for training; the"),
        ((X, 0 * LABELS), 3, "2 of 3 classes have no example for training; the first"),
    ],
)
def test_what_is_odd_is_a_warning(data, outputs, warning):
    (said,) = task_of(data, network(outputs)).warnings
    assert said.startswith(warning)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x[:1], "answer for 3 examples is float32.1, 4."),
        (lambda x: jnp.sum(x), "answer for 3 examples is float32.."),
        (lambda x: {"a": x, "b": x[0]}, "answer b for 3 examples is float32.4."),
        (lambda x: x[..., None], "shape .3, 4, 1., and integer targets are classes"),
        (lambda x: {"a": x, "b": x}, "shape .3, 4., .3, 4., and integer targets"),
    ],
)
def test_answers_have_a_row_for_every_example(answer, said):
    with pytest.raises(UserError, match=said):
        task_of(model=network(4, answer))


def test_networks_of_text_tell_all_tokens_apart():
    def text(num_outputs, answer=lambda x: x):
        def init(key):
            return {"e": jnp.zeros((256, 4)), "w": jnp.zeros((4, num_outputs))}

        return init, lambda params, x: answer(params["e"][x] @ params["w"])

    def make(model):
        data = DataConfig(name="stdlib", sequence_length=16)
        return make_task(data, ModelConfig(), 0, Own(model))

    assert make(text(256)).warnings == ()
    with pytest.raises(UserError, match=r"tells 100 tokens apart, and .* has 256"):
        make(text(100))
    with pytest.raises(UserError, match=r"numbers of shape .3, 256.; give a score"):
        make(text(256, lambda x: x[:, 0]))
