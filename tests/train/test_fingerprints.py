"""A run goes on only with the data and the functions that it began with."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import open_dataset, open_own
from prunex_jax.data.fingerprint import fingerprint_of
from prunex_jax.data.settings import DataConfig
from prunex_jax.tasks import Own, make_task
from prunex_jax.train import train
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.fingerprints import fingerprints_of, first_difference
from tests.helpers.common import ROOT

CONTENT = "the content of 58 examples in train"
METRICS = "the function of metrics"
SETTINGS = {"run": {"steps": 8}, "data": {"batch_size": 16}}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int32)
TABLE = np.linspace(0, 1, 2, dtype=np.float32)


def init(key):
    return {"w": jax.random.normal(key, (3, 4)), "out": jnp.zeros((4, 2))}


def network(activation=jnp.tanh, table=TABLE):
    @jax.jit
    def hidden(params, x):
        return activation(x @ params["w"])

    return init, lambda params, x: hidden(params, x) @ params["out"] + table[None]


def distance(answers, examples):
    return jnp.sum((answers - examples[1][:, None]) ** 2, axis=-1)


# What a caller brings, and the same with something else in one place.
OWN = {
    "model": network(),
    "data": (X, LABELS),
    "metrics": {"distance": distance},
}
CHANGED = {
    "activation": ({"model": network(jnp.sin)}, "the network"),
    "constant": ({"model": network(table=TABLE + 1)}, "the network"),
    "example": ({"data": (np.where(X == X[40], 0, X), LABELS)}, CONTENT),
    "labels": ({"data": (X, 1 - LABELS)}, CONTENT),
    "number": ({"data": (X[:-4], LABELS[:-4])}, "the number of examples in train"),
    "type": ({"data": (X.astype("f2"), LABELS)}, "the form of the examples in train"),
    "loss": ({"loss": distance}, "the loss"),
    "inputs": ({"inputs": lambda examples: 2 * examples[0]}, "the function of inputs"),
    "metrics": ({"metrics": {"distance": lambda *a: 2 * distance(*a)}}, METRICS),
    "optimizer": ({"optimizer": optax.adam}, "the optimizer"),
}


def fingerprints(**given):
    optimizer = given.pop("optimizer", None)
    own = Own(**given)
    config = resolve_config(SETTINGS)
    task = make_task(config.data, config.model, 0, own)
    return fingerprints_of(task, config, own, optimizer)


def test_the_same_things_are_the_same():
    """Also functions that were written anew, under other names."""
    data = X.copy(), LABELS.astype(np.int64)
    again = {**OWN, "model": network(), "data": data}
    assert first_difference(fingerprints(**OWN), fingerprints(**again)) is None


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_is_named(name):
    changed, what = CHANGED[name]
    before, now = fingerprints(**OWN), fingerprints(**{**OWN, **changed})
    assert first_difference(before, now)[0] == what
    assert first_difference(json.loads(json.dumps(before)), now)[0] == what


def test_other_versions_trace_differently():
    before, now = fingerprints(**OWN), fingerprints(**OWN, optimizer=optax.adam)
    before["functions"]["the versions of packages"] = "jax 0.1"
    assert first_difference(before, now) is None
    before["data"]["the versions of packages"] = "pillow 1"
    before["data"]["the number of examples in train"] += 1
    assert first_difference(before, now)[0] == "the number of examples in train"


class Augmented:
    """Examples that are never twice the same."""

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number] + RNG.normal(), LABELS[number]


def test_examples_that_vary_are_told_by_their_form():
    """Also where two looks at them agree by chance."""
    first, second = (
        fingerprint_of(open_own(Augmented(), DataConfig())) for _ in range(2)
    )
    assert first == second
    assert not any(key.startswith("the content") for key in first)
    assert first["the form of the examples in train"].startswith("example/0 float32[3]")


SCRIPT = """
import functools, sys, types
import jax, jax.numpy as jnp, numpy as np
from jax._src import pretty_printer
from prunex_jax.base.jaxprs import digest_of
pretty_printer.CAN_USE_COLOR = sys.argv[1] == "terminal"
mesh = jax.make_mesh((1, 1), ("hosts", "devs"), (jax.sharding.AxisType.Auto,) * 2)
spec = jax.P("hosts", "devs")
f = jax.jit(lambda x: jnp.sin(x) + np.arange(4.0)[None])
f.__wrapped__.__name__ = sys.argv[1]
g = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec)
print(digest_of(jax.make_jaxpr(lambda x: f(x) + f(f(x)) + g(x))(jnp.ones((2, 4)))))
"""


@pytest.mark.slow
def test_a_program_is_the_same_in_every_process():
    """Whatever a terminal colours, and the order of sets; names do not count."""
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, where],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for where, seed in (("terminal", "1"), ("file", "2"), ("file", "3"))
    }
    assert len(found) == 1


def test_a_split_that_leaves_memory_is_the_same():
    """The loader may be another one when a run goes on."""
    found = [
        fingerprint_of(open_dataset(DataConfig(name="digits", loader=loader), seed=0))
        for loader in ("memory", "grain")
    ]
    assert first_difference({"data": found[0]}, {"data": found[1]}) is None
    assert "the content of 32 examples in train" in found[1]
    assert (
        found[0]["the form of the examples in train"]
        == "image uint8[8, 8, 1], \
label int32[]"
    )


def test_the_test_split_stays_unread():
    class Unread(Augmented):
        def __getitem__(self, number):
            raise AssertionError("the test split was read")

    dataset = open_own({"train": (X, LABELS)}, DataConfig())
    unread = open_own({"train": Augmented(), "test": Augmented()}, DataConfig())
    object.__setattr__(unread.test.source, "elements", Unread())
    assert fingerprint_of(unread)["the number of examples in test"] == len(X)
    assert fingerprint_of(dataset)["the number of examples in test"] == 0


def test_a_used_folder_refuses_other_things(tmp_path):
    """Before anything is trained, and the folder stays as it was."""
    train(SETTINGS, tmp_path / "run", **OWN)
    files = ("summary.json", "metrics.jsonl", "environment.json", "config.json")
    held = {name: (tmp_path / "run" / name).read_bytes() for name in files}
    for changed, what in CHANGED.values():
        if "optimizer" in changed:
            continue  # Which settings name.
        with pytest.raises(
            UserError, match=rf"a run in which {what} was .* \(fresh=True\)"
        ):
            train(SETTINGS, tmp_path / "run", **{**OWN, **changed})
        assert held == {n: (tmp_path / "run" / n).read_bytes() for n in files}
    manifest = tmp_path / "run" / "checkpoints" / "8" / "manifest.json"
    content = manifest.read_text()
    for counts, said in (
        ({"w": 2, "x": 1}, "has channel group 'x', other than the network; put back"),
        ({}, "misses channel group 'w', other than the network"),
        ({"w": 5}, "keeps 5 of the 4 channels of 'w'; put back"),
    ):
        spoiled = json.loads(content)
        spoiled["extra"]["keep_counts"] = counts
        manifest.write_text(json.dumps(spoiled))
        with pytest.raises(UserError, match=said):
            train(SETTINGS, tmp_path / "run", **OWN)
    changed, _ = CHANGED["activation"]
    result = train(SETTINGS, tmp_path / "run", **{**OWN, **changed}, fresh=True)
    assert result.summary["steps"] == 8


def test_networks_that_settings_name_are_compared_too(tmp_path, monkeypatch):
    found = []
    for activation in ("tanh", "sin"):
        (tmp_path / f"named_{activation}.py").write_text(
            "import jax, jax.numpy as jnp\n"
            "def init(key): return {'w': jax.random.normal(key, (64, 10))}\n"
            "def apply(params, x):\n"
            f"    return jnp.{activation}(x.reshape(len(x), -1)) @ params['w']\n"
            "model = (init, apply)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert importlib.util.find_spec(f"named_{activation}")
        config = resolve_config(
            {**SETTINGS, "model": {"name": f"named_{activation}:model"}}
        )
        task = make_task(config.data, config.model, 0)
        found.append(fingerprints_of(task, config))
    assert first_difference(*found)[0] == "the network"
