"""The largest entries, whichever way they are chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.sparsity import entry_count, largest_entries, selection
from tests.helpers.common import make_mesh

# Long enough for every way to be taken, and no multiple of anything.
SIZE = 6007
largest = jax.jit(largest_entries, static_argnums=1)
EXACT = {
    "blocks": jax.jit(selection.by_blocks, static_argnums=1),
    "threshold": jax.jit(selection.by_threshold, static_argnums=1),
}


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


@pytest.mark.parametrize("size", [1, 2, 37, 4096, 4097, SIZE])
def test_any_size_and_density(size):
    buffer = draw("normal", size)
    wanted = np.sort(np.abs(buffer))
    for density in (1e-6, 0.02, 0.03, 1.0):
        count = entry_count(density, size)
        assert count == min(size, max(1, round(density * size)))
        positions = np.asarray(largest(buffer, count))
        check_positions(positions, count, size)
        found = np.sort(np.abs(buffer[positions]))
        np.testing.assert_array_equal(found, wanted[-count:])


def test_they_look_at_every_entry():
    """Also at those at the end that fill no slice."""
    for at in (0, 999, SIZE // 2, *range(SIZE - 70, SIZE)):
        buffer = np.zeros(SIZE, np.float32)
        buffer[at] = -1.0
        for way in EXACT.values():
            assert way(buffer, 1).tolist() == [at]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_chosen(bad):
    """It must reach the parameters, for the loss to show it."""
    buffer = draw("normal")
    buffer[[17, 4000, SIZE - 1]] = bad
    for way in EXACT.values():
        chosen = set(way(buffer, 50).tolist())
        assert {17, 4000, SIZE - 1} <= chosen, way.__name__


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_chooses_for_every_host_of_a_mesh(density):
    """Inside shard_map, where loops insist on types that say what varies."""
    rows = np.stack([draw("normal"), draw("heavy tails")])
    count = entry_count(density, SIZE)

    def choose(row):
        return largest_entries(row[0], count)[None]

    spec = jax.P("host")
    run = jax.shard_map(choose, mesh=make_mesh(2, 1), in_specs=(spec,), out_specs=spec)
    for found, row in zip(jax.jit(run)(rows), rows, strict=True):
        alone = largest(row, count)
        assert set(found.tolist()) == set(alone.tolist())
