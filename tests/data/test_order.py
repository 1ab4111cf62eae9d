import numpy as np
import pytest

from prunex_jax.data.order import (
    ShuffledOrder,
    permutation,
    split_positions,
    uniforms,
)


def test_every_example_comes_once_per_epoch() -> None:
    order = ShuffledOrder(num_examples=103, seed=3)
    epochs = order(np.arange(3 * 103)).reshape(3, 103)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(103))
    assert (epochs[0] != epochs[1]).any(), "two epochs have the same order"


def test_order_depends_on_position_and_seed_only() -> None:
    positions = np.arange(500)
    whole = ShuffledOrder(num_examples=70, seed=1)(positions)
    # Asked for backwards, in pieces that span epochs, by an object that is reused.
    order = ShuffledOrder(num_examples=70, seed=1)
    pieces = [order(positions[start : start + 33]) for start in range(495, -1, -33)]
    assert np.array_equal(np.concatenate(pieces[::-1]), whole)
    assert not np.array_equal(ShuffledOrder(70, seed=2)(positions), whole)


def test_one_batch_may_be_longer_than_an_epoch() -> None:
    batch = ShuffledOrder(num_examples=3, seed=0)(np.arange(7))
    assert np.bincount(batch[:6]).tolist() == [2, 2, 2]


def test_permutation_is_the_same_on_every_machine() -> None:
    # Golden numbers: a change here would change the data order of a resumed run.
    assert permutation(8, 1, 2).tolist() == [2, 7, 3, 1, 5, 6, 0, 4]


@pytest.mark.parametrize("num_taken", [0, 1, 25, 100])
def test_split_positions_divides_without_overlap(num_taken: int) -> None:
    left, taken = split_positions(100, num_taken, seed=4)
    assert len(taken) == num_taken
    assert sorted([*left.tolist(), *taken.tolist()]) == list(range(100))
    assert (np.diff(left) > 0).all() and (np.diff(taken) > 0).all()


def test_uniforms_belong_to_a_position() -> None:
    positions = np.array([5, 900, 2**40])
    draws = uniforms(7, positions, 4)
    alone = [uniforms(7, positions[k : k + 1], 4)[0] for k in range(3)]
    assert np.array_equal(draws, np.stack(alone))
    assert np.array_equal(uniforms(7, positions, 2), draws[:, :2])
    assert not np.array_equal(uniforms(8, positions, 4), draws)
    assert uniforms(7, positions, 0).shape == (3, 0)


def test_uniforms_are_uniform_and_unrelated() -> None:
    draws = uniforms(0, np.arange(20_000), 3)
    assert draws.min() >= 0 and draws.max() < 1
    # Five standard errors of a mean, a bin share and a correlation of 20,000 draws.
    np.testing.assert_allclose(draws.mean(axis=0), 0.5, atol=5 * 0.289 / 141)
    shares = np.stack([np.bincount((d * 10).astype(int)) for d in draws.T]) / 20_000
    np.testing.assert_allclose(shares, 0.1, atol=5 * 0.3 / 141)
    neighbours = np.column_stack([draws[:-1], draws[1:, 0]])
    correlation = np.corrcoef(neighbours.T) - np.eye(4)
    np.testing.assert_allclose(correlation, 0, atol=5 / 141)
