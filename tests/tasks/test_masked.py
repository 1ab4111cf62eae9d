"""Masked text: which tokens are asked for, and what answers to them are worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.data import ASKED, EXAMPLE, TARGET, VALID, Masking, make_loader
from prunex_jax.data.settings import DataConfig
from prunex_jax.models.settings import ModelConfig
from prunex_jax.tasks import MaskedLanguage, make_task
from tests.helpers.common import assert_close

LENGTH, TOKENS = 40, 50
MASKING = Masking(mask=TOKENS, num_tokens=TOKENS, length=LENGTH)
TEXT = np.random.default_rng(0).integers(0, TOKENS, (500, LENGTH + 1)).astype(np.int32)
BATCH = MASKING.batch(TEXT, np.arange(500), seed=3)


def test_every_sequence_is_asked_for_as_many_tokens():
    """So that means over devices are means over tokens, on any mesh."""
    assert (BATCH[ASKED].sum(axis=1) == 6).all()  # 15 % of 40
    short = Masking(9, 9, 3).batch(TEXT[:, :3], np.arange(500), 0)
    assert (short[ASKED].sum(axis=1) == 1).all()


def test_what_is_not_asked_for_stays():
    is_asked = BATCH[ASKED] > 0
    np.testing.assert_array_equal(BATCH[TARGET], TEXT[:, :LENGTH])
    np.testing.assert_array_equal(
        BATCH[EXAMPLE][~is_asked], TEXT[:, :LENGTH][~is_asked]
    )
    positions = is_asked.sum(axis=0)
    assert positions.min() > 40 and positions.max() < 110, "75 at each on average"


def test_most_are_hidden_and_some_replaced():
    """Devlin et al.: 80 % hidden, 10 % replaced at random, 10 % as they were."""
    is_asked = BATCH[ASKED] > 0
    read, target = BATCH[EXAMPLE][is_asked], BATCH[TARGET][is_asked]
    hidden, same = (read == TOKENS).mean(), (read == target).mean()
    assert hidden == pytest.approx(0.8, abs=0.03)
    assert same == pytest.approx(0.1 + 0.1 / TOKENS, abs=0.025)
    other = read[(read != TOKENS) & (read != target)]
    assert len(other) > 200 and len(np.unique(other)) > 0.9 * TOKENS


def test_the_choice_follows_seed_and_position_row_by_row():
    rows = np.array([400, 7, 31])
    alone = MASKING.batch(TEXT[rows], rows, seed=3)
    for name, wanted in BATCH.items():
        np.testing.assert_array_equal(alone[name], wanted[rows])
    for other in (
        MASKING.batch(TEXT, np.arange(500), seed=4),
        MASKING.batch(TEXT, np.arange(500) + 500, seed=3),
    ):
        assert (other[ASKED] != BATCH[ASKED]).any(axis=1).mean() > 0.99


@pytest.fixture(scope="module")
def task():
    data = DataConfig(name="stdlib", sequence_length=LENGTH, batch_size=8)
    return make_task(data, ModelConfig(name="bert", width=0.25), seed=0), data


@pytest.mark.slow
def test_training_hides_other_tokens_in_every_epoch_and_evaluation_the_same(task):
    made, data = task
    split = made.dataset.train
    first = split.training_batch(np.arange(8), np.arange(8), 0)
    later = split.training_batch(np.arange(8), np.arange(8) + len(split), 0)
    np.testing.assert_array_equal(first[TARGET], later[TARGET])
    assert (first[ASKED] != later[ASKED]).any()
    whole = split.evaluation_batch(np.arange(8))
    part = split.evaluation_batch(np.arange(4, 8))
    np.testing.assert_array_equal(part[EXAMPLE], whole[EXAMPLE][4:])
    assert whole[EXAMPLE].max() == 256, "a token that no text has"
    loader = make_loader(split, data, rows=np.arange(8), seed=0, num_hosts=2)
    half = make_loader(split, data, rows=np.arange(4, 8), seed=0, num_hosts=4)
    with loader.batches(3) as batches, half.batches(3) as halves:
        np.testing.assert_array_equal(next(halves)[EXAMPLE], next(batches)[EXAMPLE][4:])


OBJECTIVE = MaskedLanguage(LENGTH)
LOGITS = np.random.default_rng(1).normal(size=(12, LENGTH, TOKENS)).astype(np.float32)
ROWS = {name: value[:12] for name, value in BATCH.items()}


def test_training_minimises_what_evaluation_measures():
    sums = OBJECTIVE.score(LOGITS, {**ROWS, VALID: np.ones(12, np.float32)})
    measured = OBJECTIVE.measures(sums)
    assert_close(OBJECTIVE.loss(LOGITS, ROWS), measured["loss"])
    is_asked = ROWS[ASKED] > 0
    chosen = jax.nn.log_softmax(LOGITS)[is_asked]
    wanted = -chosen[np.arange(len(chosen)), ROWS[TARGET][is_asked]]
    assert_close(measured["loss"], jnp.mean(wanted))
    right = (LOGITS.argmax(-1) == ROWS[TARGET])[is_asked].mean()
    assert_close(measured["accuracy"], jnp.asarray(right))
    assert_close(measured["perplexity"], jnp.exp(measured["loss"]), 1e-4)


def test_rows_that_fill_up_count_for_nothing():
    def score(rows, padding):
        def padded(x):
            return np.concatenate([x[rows], np.zeros_like(x[:padding])])

        valid = np.arange(len(rows) + padding) < len(rows)
        batch = {name: padded(value) for name, value in ROWS.items()}
        return OBJECTIVE.score(padded(LOGITS), {**batch, VALID: valid.astype("f4")})

    parts = [score(np.arange(5), 0), score(np.arange(5, 12), 4)]
    assert_close(jax.tree.map(jnp.add, *parts), score(np.arange(12), 0))
    assert set(parts[0]) == {"loss", *OBJECTIVE.counted}


def test_only_what_is_asked_for_moves_the_network():
    slope = jax.grad(lambda x: OBJECTIVE.loss(x, ROWS))(jnp.asarray(LOGITS))
    moves = np.abs(slope).max(axis=-1) > 0
    np.testing.assert_array_equal(moves, ROWS[ASKED] > 0)
