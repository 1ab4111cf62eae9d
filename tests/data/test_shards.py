"""Data that differ between hosts: who has which examples, and when they come."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import make_loader, open_dataset
from prunex_jax.data.order import ShardedOrder, permutation
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.shards import make_order, make_shards
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import settings

SORTED = DataConfig(
    name="synthetic",
    synthetic_examples=50,
    image_size=8,
    batch_size=16,
    augment="crop_flip",
    shards="label_sorted",
)


def drawn(alpha: float, seed: int = 0) -> DataConfig:
    return DataConfig(shards="dirichlet", dirichlet_alpha=alpha, shuffle_seed=seed)


def labels_of(counts) -> np.ndarray:
    """Labels of as many examples per class, in no order."""
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return labels[permutation(len(labels), 9)]


def class_shares(labels: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Share of every class in every shard, float64[num_hosts, num_classes]."""
    size, num_classes = shards.shape[1], labels.max() + 1
    return np.stack([np.bincount(labels[s], minlength=num_classes) for s in shards]) / (
        size
    )


def skew(labels: np.ndarray, shards: np.ndarray) -> float:
    """Mean distance in total variation between the classes of a host and of the set."""
    everywhere = np.bincount(labels) / len(labels)
    return np.abs(class_shares(labels, shards) - everywhere).sum(1).mean() / 2


CASES = {
    "label_sorted": SORTED,
    **{f"dirichlet {a:g}": drawn(a) for a in (1e-320, 1e-3, 0.3, 30, 1e12, np.inf)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 7])
@pytest.mark.parametrize("counts", [(40, 40, 40), (1, 0, 90, 3, 8), (7,)], ids=str)
def test_shards_are_equal_disjoint_and_leave_less_than_one_per_host(
    case: str, num_hosts: int, counts: tuple
) -> None:
    labels = labels_of(counts)
    shards = make_shards(labels, num_hosts, CASES[case])
    assert shards.shape == (num_hosts, len(labels) // num_hosts)
    assert len(np.unique(shards)) == shards.size, "two hosts have the same example"
    assert shards.min() >= 0 and shards.max() < len(labels)


@pytest.mark.parametrize("case", CASES)
def test_no_class_is_left_out_more_than_others(case: str) -> None:
    labels = labels_of([26] * 4)
    left_out = np.zeros(4)
    for seed in range(60):
        config = dataclasses.replace(CASES[case], shuffle_seed=seed)
        shards = make_shards(labels, 5, config)
        left_out += 26 - np.bincount(labels[shards.ravel()], minlength=4)
    assert left_out.sum() == 60 * 4
    # Five standard errors of 240 examples in four classes.
    assert np.abs(left_out - 60).max() < 5 * np.sqrt(240 * 3 / 16)


@pytest.mark.parametrize("case", CASES)
def test_the_shuffle_seed_decides_who_has_what(case: str) -> None:
    labels = labels_of([25] * 5)
    config = CASES[case]
    other = dataclasses.replace(config, shuffle_seed=-1)
    shards = make_shards(labels, 4, config)
    assert np.array_equal(make_shards(labels, 4, config), shards)
    assert not np.array_equal(make_shards(labels, 4, other), shards)


def test_dirichlet_draws_are_the_same_on_every_machine() -> None:
    # Golden numbers: a change here would change the data of a resumed run.
    labels = np.arange(40) % 4
    shards = make_shards(labels, 2, drawn(0.75))
    counts = [np.bincount(labels[shard]).tolist() for shard in shards]
    assert counts == [[4, 5, 10, 1], [6, 5, 0, 9]]


@pytest.mark.parametrize("num_hosts", [2, 4, 5, 8, 20])
def test_sorted_shards_hold_few_classes(num_hosts: int) -> None:
    labels = labels_of([40] * 10)
    shards = make_shards(labels, num_hosts, SORTED)
    held = [np.unique(labels[shard]) for shard in shards]
    for before, after in itertools.pairwise(held):
        assert before.max() <= after.min(), "not cut from a sorted list"
    assert max(map(len, held)) <= -(-10 // num_hosts) + 1


@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_skew_falls_with_alpha_from_that_of_sorted_shards_to_none(
    num_hosts: int,
) -> None:
    labels = labels_of([200] * 10)
    at_random = np.mean(
        [
            skew(labels, permutation(2000, seed).reshape(num_hosts, -1))
            for seed in range(8)
        ]
    )
    skews = [
        np.mean(
            [
                skew(labels, make_shards(labels, num_hosts, drawn(alpha, seed)))
                for seed in range(8)
            ]
        )
        for alpha in (1e-3, 1.0, 10.0, 100.0, 1e6)
    ]
    assert all(np.diff(skews) < 0), skews
    assert skews[0] > 0.95 * skew(labels, make_shards(labels, num_hosts, SORTED))
    # Hosts that draw without regard to others leave the last one twice the noise.
    assert skews[-1] < 2 * at_random


def test_mixtures_have_the_moments_of_their_distribution() -> None:
    # The first host, which no class runs out for: mean p, variance p (1-p) / (a+1) with
    # a the sum of alpha over classes, and on top that of drawing 100 examples.
    counts, alpha, num_draws = np.array([100, 200, 300, 400]), 0.75, 200
    labels = labels_of(counts)
    first = np.stack(
        [
            class_shares(labels, make_shards(labels, 10, drawn(alpha, seed)))[0]
            for seed in range(num_draws)
        ]
    )
    shares = counts / 1000
    spread = shares * (1 - shares)
    variance = spread / (4 * alpha + 1) * (1 - 1 / 100) + spread / 100
    error = 5 * np.sqrt(variance / num_draws)
    np.testing.assert_array_less(np.abs(first.mean(axis=0) - shares), error)
    np.testing.assert_allclose(first.var(axis=0), variance, rtol=0.35)


def test_every_host_sees_its_shard_once_per_epoch() -> None:
    shards = np.sort(permutation(30, 5).reshape(3, 10), axis=1)
    order = ShardedOrder(shards, batch_size=12, seed=1)
    # 10 batches of 12 rows are 4 epochs of 10 examples for each of three hosts.
    stream = (
        order(np.arange(120)).reshape(10, 3, 4).transpose(1, 0, 2).reshape(3, 4, 10)
    )
    for shard, epochs in zip(shards, stream, strict=True):
        for epoch in epochs:
            assert sorted(epoch) == sorted(shard)
        assert (epochs[0] != epochs[1]).any(), "two epochs have the same order"
    both = list(zip(shards, stream, strict=True))
    places = [np.searchsorted(shard, epochs[0]) for shard, epochs in both]
    assert (places[0] != places[1]).any(), "hosts go through their shards in step"


def test_sharded_order_depends_on_position_and_seed_only() -> None:
    shards = permutation(30, 5).reshape(3, 10)
    positions = np.arange(300)
    whole = ShardedOrder(shards, 12, seed=1)(positions)
    order = ShardedOrder(shards, 12, seed=1)
    pieces = [order(positions[start : start + 33]) for start in range(297, -1, -33)]
    assert np.array_equal(np.concatenate(pieces[::-1]), whole)
    assert not np.array_equal(ShardedOrder(shards, 12, seed=2)(positions), whole)


def batches_of(config: DataConfig, rows, start: int, count: int, num_hosts: int = 4):
    train_split = open_dataset(config, seed=0).train
    loader = make_loader(train_split, config, rows=rows, seed=3, num_hosts=num_hosts)
    with loader.batches(start) as iterator:
        return [next(iterator) for _ in range(count)]


def assert_same(ours: list, theirs: list) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for key in a.keys() | b.keys():
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@pytest.mark.parametrize("shards", ["label_sorted", "dirichlet"])
def test_batches_depend_on_step_and_row_only(shards: str) -> None:
    config = dataclasses.replace(SORTED, shards=shards)
    whole = batches_of(config, np.arange(16), 0, 9)
    assert_same(batches_of(config, np.arange(16), 5, 4), whole[5:])
    for rows in (np.arange(4, 8), np.array([15, 0, 6])):
        part = [{key: value[rows] for key, value in batch.items()} for batch in whole]
        assert_same(batches_of(config, rows, 0, 9), part)
    pairs = zip(whole, batches_of(config, np.arange(16), 0, 9, 2), strict=True)
    assert any((a["label"] != b["label"]).any() for a, b in pairs)


def test_iid_is_one_shuffled_stream_for_any_number_of_hosts() -> None:
    config = dataclasses.replace(SORTED, shards="iid", dirichlet_alpha=7.0)
    split = open_dataset(config, seed=0).train
    order = make_order(split, config, num_hosts=4, seed=3)
    epochs = [permutation(45, 1, 3, epoch) for epoch in range(2)]
    np.testing.assert_array_equal(order(np.arange(90)), np.concatenate(epochs))
    one, four = (batches_of(config, np.arange(16), 2, 4, n) for n in (1, 4))
    assert_same(one, four)


@pytest.mark.parametrize(
    ("changes", "num_hosts", "message"),
    [
        (
            {"loader": "grain"},
            2,
            r"'train' is not in memory: set --config\.data\.loader",
        ),
        (
            {"loader": "grain", "augment": "random_resized_crop"},
            2,
            r"loader=memory \(and another data\.augment if images differ in size\)",
        ),
        ({}, 3, r"each of 3 hosts .* data\.batch_size=16: make the batch a multiple"),
        (
            {"synthetic_examples": 4, "batch_size": 8},
            8,
            "each of 8 hosts .* 4 examples",
        ),
    ],
)
def test_impossible_shards_are_refused(changes, num_hosts, message) -> None:
    config = dataclasses.replace(SORTED, **changes)
    with pytest.raises(UserError, match=message):
        batches_of(config, np.arange(1), 0, 1, num_hosts)


@pytest.mark.parametrize(
    ("alpha", "rule"),
    [(0.0, "positive"), (-1.0, "positive"), (float("nan"), "a finite number")],
)
def test_alpha_is_positive(alpha: float, rule: str) -> None:
    values = {"run": {"steps": 1}, "data": {"dirichlet_alpha": alpha}}
    with pytest.raises(UserError, match=rf"data\.dirichlet_alpha=.* must be {rule}"):
        resolve_config(values)


def tiny(**changes):
    data = {"name": "synthetic", "synthetic_examples": 256, "image_size": 8}
    data |= {"shards": "label_sorted", **changes.pop("data", {})}
    run = {"steps": 9, "checkpoint_every_steps": 3, "log_every_steps": 9}
    return settings(data=data, run=run, method={"name": "dense"}, **changes)


def test_devices_of_a_host_get_its_shard_only() -> None:
    config = resolve_config(tiny(topology={"layout": "4"}, data={"augment": "none"}))
    experiment = make_experiment(config, make_topology("4"))
    split, mesh = experiment.task.dataset.train, experiment.mesh
    shards = make_shards(split.labels(), 4, config.data)
    images = split.normalization.apply(split.read(np.arange(len(split)))[0])
    known = {image.tobytes(): example for example, image in enumerate(images)}
    host_of = {device.id: h for h, row in enumerate(mesh.devices) for device in row}
    seen = [set() for _ in shards]
    with experiment.batches() as batches:
        for _ in range(8):  # One epoch of 57 examples in steps of 8 per host.
            for piece in next(batches)["image"].addressable_shards:
                examples = {known[image.tobytes()] for image in np.asarray(piece.data)}
                seen[host_of[piece.device.id]] |= examples
    assert seen == [set(shard.tolist()) for shard in shards]


def test_shards_that_need_labels_are_refused_before_a_run() -> None:
    config = resolve_config(tiny(data={"loader": "grain"}))
    with pytest.raises(UserError, match="'train' is not in memory"):
        make_experiment(config, make_topology("2"))


class StoppedError(Exception):
    pass


def states_up_to_step_5(values, workdir) -> dict[int, dict]:
    """Trains, is killed after step 5, and gives the state after every step."""
    states = {}

    def watch(loop, state) -> None:
        states[loop.step] = jax.device_get(state.params)
        if loop.step == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(values, workdir, after_step=[watch])
    return states


@pytest.mark.slow
def test_a_run_on_shards_resumes_bit_for_bit_on_as_many_hosts(tmp_path, capsys) -> None:
    whole = states_up_to_step_5(tiny(), tmp_path)
    shown = capsys.readouterr().out
    assert "shards    label_sorted: each of 2 hosts has 115 training" in shown
    for changes, key in (
        ({"data": {"shards": "dirichlet"}}, "data.shards"),
        ({"topology": {"layout": "4"}}, "topology.num_hosts"),
    ):
        with pytest.raises(UserError, match=f"holds a run with {key}="):
            train(tiny(**changes), tmp_path, exact_topology=True)
    resumed = states_up_to_step_5(tiny(), tmp_path)
    assert sorted(resumed) == [3, 4, 5]
    for step, params in resumed.items():
        jax.tree.map(np.testing.assert_array_equal, params, whole[step])
