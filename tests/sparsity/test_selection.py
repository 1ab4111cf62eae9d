"""The largest entries, whichever way they are chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.sparsity import entry_count, largest_entries, selection
from tests.helpers.common import make_mesh

# Long enough for every way to be taken, and no multiple of anything.
SIZE = 6007
largest = jax.jit(largest_entries, static_argnums=1, static_argnames="is_exact")
EXACT = {
    "blocks": jax.jit(selection.by_blocks, static_argnums=1),
    "threshold": jax.jit(selection.by_threshold, static_argnums=1),
}
by_buckets = jax.jit(selection.by_buckets, static_argnums=1)


def draw(kind, size=SIZE):
    rng = np.random.default_rng(0)
    normal = rng.normal(size=size).astype(np.float32)
    return {
        "normal": normal,
        "heavy tails": normal**5,
        "ties": np.round(normal),
        "mostly zero": np.where(rng.random(size) < 0.999, 0, normal),
        "large ones at the end": np.sort(np.abs(normal)),
        "large ones side by side": np.where(np.arange(size) < 300, 100, 1) * normal,
        "zero": np.zeros_like(normal),
    }[kind].astype(np.float32)


KINDS = (
    "normal",
    "heavy tails",
    "ties",
    "mostly zero",
    "large ones at the end",
    "large ones side by side",
    "zero",
)


def check_positions(positions, count, size):
    assert positions.dtype == jnp.int32 and positions.shape == (count,)
    assert len(set(positions.tolist())) == count, "one entry is sent twice"
    assert 0 <= positions.min() and positions.max() < size


@pytest.mark.parametrize("count", [1, 60, 121, 3000, SIZE - 1, SIZE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", EXACT)
def test_exact_ways_find_the_largest(way, kind, count):
    buffer = draw(kind)
    positions = np.asarray(EXACT[way](buffer, count))
    check_positions(positions, count, SIZE)
    found, wanted = np.sort(np.abs(buffer[positions])), np.sort(np.abs(buffer))[-count:]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("size", [1, 2, 37, 4096, 4097, SIZE])
def test_any_size_and_density(size, is_exact):
    buffer = draw("normal", size)
    wanted = np.sort(np.abs(buffer))
    for density in (1e-6, 0.02, 0.03, 1.0):
        count = entry_count(density, size)
        assert count == min(size, max(1, round(density * size)))
        positions = np.asarray(largest(buffer, count, is_exact=is_exact))
        check_positions(positions, count, size)
        if is_exact:
            found = np.sort(np.abs(buffer[positions]))
            np.testing.assert_array_equal(found, wanted[-count:])


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_miss_few_and_the_very_largest_never(kind):
    buffer, count = draw(kind, 60_011), 60
    positions = np.asarray(by_buckets(buffer, count))
    check_positions(positions, count, len(buffer))
    found = np.sort(np.abs(buffer[positions]))
    wanted = np.sort(np.abs(buffer))[-count:]
    assert found[-1] == wanted[-1]
    # 95 % are expected; of 60, less than 80 % are once in a million.
    assert np.mean(found >= wanted[0]) >= 0.8


def test_buckets_look_at_every_entry():
    """Also at those at the end that fill no slice."""
    for at in (0, 999, SIZE // 2, *range(SIZE - 70, SIZE)):
        buffer = np.zeros(SIZE, np.float32)
        buffer[at] = -1.0
        for way in (by_buckets, *EXACT.values()):
            assert way(buffer, 1).tolist() == [at]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_chosen(bad):
    """It must reach the parameters, for the loss to show it."""
    buffer = draw("normal")
    buffer[[17, 4000, SIZE - 1]] = bad
    for way in (by_buckets, *EXACT.values()):
        chosen = set(way(buffer, 50).tolist())
        assert {17, 4000, SIZE - 1} <= chosen, way.__name__


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("is_exact", [True, False])
def test_chooses_for_every_host_of_a_mesh(density, is_exact):
    """Inside shard_map, where loops insist on types that say what varies."""
    rows = np.stack([draw("normal"), draw("heavy tails")])
    count = entry_count(density, SIZE)

    def choose(row):
        return largest_entries(row[0], count, is_exact=is_exact)[None]

    spec = jax.P("host")
    run = jax.shard_map(choose, mesh=make_mesh(2, 1), in_specs=(spec,), out_specs=spec)
    for found, row in zip(jax.jit(run)(rows), rows, strict=True):
        alone = largest(row, count, is_exact=is_exact)
        assert set(found.tolist()) == set(alone.tolist())


def test_tpus_choose_by_their_own_means(monkeypatch):
    """What runs on a TPU can be traced anywhere, for large buffers only."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def ways(size, is_exact):
        traced = jax.make_jaxpr(lambda x: largest_entries(x, 9, is_exact=is_exact))
        return "approx_top_k" in str(traced(jnp.zeros(size)))

    assert ways(SIZE, False)
    assert not ways(SIZE, True) and not ways(100, False)
