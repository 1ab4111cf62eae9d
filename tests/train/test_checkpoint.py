"""Tests of saving and restoring: bit for bit, atomic, and safe against damage."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.train.records.checkpoint import Checkpointer
from tests.helpers.common import free_port

REPOSITORY = Path(__file__).parents[2]
Pair = namedtuple("Pair", "first second")


def small_state(scale=1.0):
    """A state of every kind of leaf."""
    return {
        "params": {"conv": {"kernel": scale * jnp.arange(12.0).reshape(3, 4)}},
        "half": jnp.asarray([1.5, -2.25, scale], jnp.bfloat16),
        "mask": jnp.asarray([True, False, True]),
        "count": jnp.asarray(7, jnp.int32),
        "special": jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-45]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
        "pair": Pair(jnp.ones(2), [jnp.zeros((0, 3)), None]),
    }


def abstract(state, sharding=None):
    """What `restore` is given: shapes and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding or x.sharding
        ),
        state,
    )


def bits(leaf):
    """The bytes of a leaf, so that NaN and -0.0 count."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, leaf in flatten_by_path(expected).items():
        found = flatten_by_path(actual)[path]
        assert found.dtype == leaf.dtype, path
        assert found.shape == leaf.shape, path
        assert bits(found) == bits(leaf), f"{path} changed its bits"


def save_one_of(directory, steps, keep=5):
    with Checkpointer(directory, keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, small_state(float(step)), {"step": step})


def test_restores_every_kind_of_leaf_bit_for_bit(tmp_path):
    state = small_state()
    extra = {"position": [1, 2], "share": 0.1, "name": "x"}
    with Checkpointer(tmp_path / "new" / "checkpoints", keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(5, state, extra, wait=True)
    with Checkpointer(tmp_path / "new" / "checkpoints", keep=2) as checkpointer:
        assert checkpointer.latest_step() == 5
        restored, restored_extra = checkpointer.restore(abstract(state))
    assert_same(restored, state)
    assert restored_extra == extra
    drawn = jax.random.normal(restored["keys"][1], (3,))
    np.testing.assert_array_equal(drawn, jax.random.normal(state["keys"][1], (3,)))


def test_what_is_saved_beside_the_state_tells_its_shapes(tmp_path):
    """States that shrink in the course of a run, also where the newest is damaged."""

    def abstract_of(extra, leaves):
        assert leaves == {"x": f"float32[{extra['size']}]"}
        return {"x": jax.ShapeDtypeStruct((extra["size"],), np.float32, sharding=here)}

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, size in ((1, 8), (2, 3)):
            checkpointer.save(step, {"x": jnp.arange(float(size))}, {"size": size})
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, size in ((2, 3), (1, 8)):
            restored, extra = checkpointer.restore(abstract_of, step)
            assert restored["x"].shape == (size,) and extra == {"size": size}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        (tmp_path / "2" / "manifest.json").write_text("{")
        restored, extra = checkpointer.restore(abstract_of)
    assert restored["x"].shape == (8,) and extra == {"size": 8}


def test_restores_onto_another_sharding(tmp_path):
    mesh = jax.make_mesh((2, 2), ("host", "device"), devices=jax.devices()[:4])
    by_host = NamedSharding(mesh, P("host"))
    state = {
        "weight": jax.device_put(jnp.arange(32.0).reshape(4, 8), by_host),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 4), by_host),
        "step": jax.device_put(jnp.asarray(3), NamedSharding(mesh, P())),
    }
    wanted = {
        "weight": NamedSharding(mesh, P(None, ("host", "device"))),
        "keys": NamedSharding(mesh, P("device")),
        "step": jax.sharding.SingleDeviceSharding(jax.devices()[1]),
    }
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state, {}, wait=True)
        restored, _ = checkpointer.restore(jax.tree.map(abstract, state, wanted))
    for name, sharding in wanted.items():
        leaf = restored[name]
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
        assert bits(leaf) == bits(state[name]), name


def test_arrays_may_be_donated_after_saving_and_after_restoring(tmp_path):
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(200_000.0)
    seen = {}
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for number in (1, 2, 3):
            seen[number] = np.array(x)
            checkpointer.save(number, {"x": x}, {})
            for _ in range(5):
                x = step(x)  # While the save is in flight.
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for number in (3, 2, 1):
            restored, _ = checkpointer.restore({"x": x}, step=number)
            np.testing.assert_array_equal(restored["x"], seen[number])
            np.testing.assert_array_equal(step(restored["x"]), seen[number] * 2 + 1)


def test_extra_is_the_one_given_at_the_time_of_the_call(tmp_path):
    extra = {"position": [1]}
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, small_state(), extra)
        extra["position"].append(2)
        assert checkpointer.restore(small_state())[1] == {"position": [1]}


def test_keeps_the_newest(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 30, 4000):
            checkpointer.save(step, small_state(), {})
        checkpointer.wait()
        assert checkpointer.steps() == (30, 4000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["30", "4000"]


def test_saving_asks_nothing_of_the_service_by_which_runs_stop(tmp_path, monkeypatch):
    """It would be told steps here and questions by the loop, and mix up the two."""
    asked = []
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", asked.append
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, small_state(), {}, wait=True)
    assert asked == []


def test_saving_a_step_twice_leaves_the_first(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(4, small_state(1.0), {"save": 1})
        checkpointer.save(4, small_state(2.0), {"save": 2}, wait=True)
        restored, extra = checkpointer.restore(small_state())
        assert extra == {"save": 1}
        assert_same(restored, small_state(1.0))


def test_going_back_abandons_what_came_after(tmp_path):
    save_one_of(tmp_path, (2, 4, 6))
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(ValueError, match="step 3 below the existing step 6"):
            checkpointer.save(3, small_state(), {})
        checkpointer.restore(small_state(), step=2)
        assert checkpointer.latest_step() == 2
        assert (tmp_path / "6").exists(), "restoring must not delete"
        checkpointer.save(3, small_state(3.0), {"step": 3}, wait=True)
        assert checkpointer.steps() == (2, 3)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.steps() == (2, 3)
        assert checkpointer.restore(small_state())[1] == {"step": 3}


def damage(folder, name, how):
    """Damages the largest file of that name below a folder."""
    path = max(folder.rglob(name), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["deleted", "cut", "altered"])
@pytest.mark.parametrize("name", ["manifest.json", "_METADATA", "d/*"])
def test_falls_back_from_a_damaged_checkpoint(tmp_path, caplog, name, how):
    save_one_of(tmp_path, (1, 2))
    damage(tmp_path / "2", name, how)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored, extra = checkpointer.restore(small_state())
        assert extra == {"step": 1}
        assert checkpointer.latest_step() == 1
        assert_same(restored, small_state(1.0))
        if (name, how) != ("manifest.json", "deleted"):  # Else it was never complete.
            assert f"{tmp_path / '2'} is damaged" in caplog.text
        checkpointer.save(2, small_state(2.0), {"step": 2}, wait=True)
        restored, extra = checkpointer.restore(small_state())
    assert extra == {"step": 2}
    assert_same(restored, small_state(2.0))


def test_refuses_when_every_checkpoint_is_damaged(tmp_path):
    save_one_of(tmp_path, (1, 2))
    for step in ("1", "2"):
        damage(tmp_path / step, "d/*", "altered")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(UserError, match=r"no readable checkpoint .*2, 1.*--fresh"):
            checkpointer.restore(small_state())


def test_does_not_fall_back_from_a_step_asked_for(tmp_path):
    save_one_of(tmp_path, (1, 2))
    damage(tmp_path / "2", "d/*", "altered")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(UserError, match=r"no readable checkpoint .*tried: 2"):
            checkpointer.restore(small_state(), step=2)


def wider():
    state = small_state()
    state["params"]["conv"]["kernel"] = jnp.zeros((3, 8))
    return state


def other_type():
    return {**small_state(), "count": jnp.asarray(7.0)}


def other_key():
    return {**small_state(), "key": jax.random.key(3, impl="rbg")}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (wider(), r"params/conv/kernel is float32\[3,4\] there and float32\[3,8\]"),
        (other_type(), r"count is int32\[\] there and float32\[\] here"),
        (other_key(), r"key is key<fry>\[\] there and key<rbg>\[\] here"),
        (
            {**small_state(), "new": jnp.ones(1)},
            r"new is absent there and float32\[1\]",
        ),
        ({"count": jnp.asarray(7)}, r"half is bfloat16\[3\] there and absent here"),
    ],
)
def test_refuses_a_checkpoint_of_another_state(tmp_path, caplog, state, message):
    save_one_of(tmp_path, (1, 2))
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(UserError, match=message + r".*--fresh to start over"):
            checkpointer.restore(state)
    assert "damaged" not in caplog.text


def test_refuses_an_unknown_format(tmp_path):
    save_one_of(tmp_path, (1,))
    path = tmp_path / "1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(UserError, match="has format 99, this version reads 1"):
            checkpointer.restore(small_state())


def test_names_what_is_there_when_a_step_is_missing(tmp_path):
    save_one_of(tmp_path, (1, 2))
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(UserError, match=r"no checkpoint of step 7 .*: 1, 2"):
            checkpointer.restore(small_state(), step=7)
    with Checkpointer(tmp_path / "empty", keep=2) as checkpointer:
        with pytest.raises(UserError, match=r"no checkpoint of any step .*: none"):
            checkpointer.restore(small_state())


def test_refuses_leaves_and_extras_that_it_cannot_store(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(TypeError, match=r"'a/b' is float, no jax.Array"):
            checkpointer.save(1, {"a": {"b": 1.0}}, {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpointer.save(1, small_state(), {"a": jnp.ones(1)})
        checkpointer.save(1, small_state(), {}, wait=True)
        assert checkpointer.steps() == (1,)


def test_refuses_an_impossible_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep checkpoints in .*--workdir"):
        Checkpointer(tmp_path / "file" / "checkpoints", keep=1)


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_failed_write_is_reported_once_and_leaves_the_previous(
    tmp_path, monkeypatch, caplog, kind
):
    def full(folder):
        raise kind("No space left on device")

    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, small_state(1.0), {}, wait=True)
    monkeypatch.setattr("prunex_jax.train.records.checkpoint.digests_of", full)
    checkpointer.save(2, small_state(2.0), {})
    with pytest.raises(UserError, match=r"No space left on device.*free space"):
        checkpointer.close()
    assert not caplog.records
    monkeypatch.undo()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.steps() == (1,)
        assert_same(checkpointer.restore(small_state())[0], small_state(1.0))


def test_a_failed_write_is_known_without_waiting_for_it(tmp_path, monkeypatch):
    def full(folder):
        raise OSError("No space left on device")

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, small_state(1.0), {}, wait=True)
        monkeypatch.setattr("prunex_jax.train.records.checkpoint.digests_of", full)
        checkpointer.check()
        checkpointer.save(2, small_state(2.0), {})
        with pytest.raises(UserError, match=r"of step 2 to .*No space left .*free sp"):
            for _ in range(300):
                checkpointer.check()
                time.sleep(0.1)
        checkpointer.check()
    monkeypatch.undo()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.steps() == (1,)


def test_is_silent_at_info_level_and_only_while_open(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        save_one_of(tmp_path, (1, 2))
        with Checkpointer(tmp_path, keep=2) as checkpointer:
            checkpointer.restore(small_state())
            logging.getLogger("absl").info("of somebody else")
    assert [record.getMessage() for record in caplog.records] == ["of somebody else"]
    assert not logging.getLogger("absl").filters


ENDLESS_SAVES = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from prunex_jax.train.records.checkpoint import Checkpointer
with Checkpointer(Path(sys.argv[1]), keep=1) as checkpointer:
    step = checkpointer.latest_step() or 0
    while True:
        step += 1
        x = jnp.full((500_000,), step, jnp.float32) + jnp.arange(500_000) % 7
        checkpointer.save(step, {"x": x}, {"step": step})
        checkpointer.wait()
        print(step, flush=True)
"""


def start(code, *arguments):
    """Runs Python code in another process."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
    )


def kill_while_saving(directory, delay):
    """Kills a saving process; returns the last step that it saw complete."""
    process = start(ENDLESS_SAVES, directory)
    completed = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while not list(directory.glob("*.orbax-checkpoint-tmp")):
        assert time.monotonic() < deadline, "no save began"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0].split()
    return int(rest[-1]) if rest else completed


@pytest.mark.slow
def test_a_killed_process_leaves_a_complete_checkpoint(tmp_path):
    previous = 0
    for delay in (0.0, 0.004, 0.012, 0.03):
        completed = kill_while_saving(tmp_path, delay)
        assert completed > previous
        with Checkpointer(tmp_path, keep=1) as checkpointer:
            restored, extra = checkpointer.restore({"x": jnp.zeros(500_000)})
            previous = checkpointer.latest_step()
        assert previous in (completed, completed + 1)
        assert extra == {"step": previous}
        expected = np.full(500_000, previous, np.float32) + np.arange(500_000) % 7
        np.testing.assert_array_equal(restored["x"], expected)
        # Leftovers are removed on opening, in the background.
        deadline = time.monotonic() + 30
        while list(tmp_path.glob("*tmp*")):
            assert time.monotonic() < deadline, "leftovers are not removed"
            time.sleep(0.01)


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
directory, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from prunex_jax.train.records.checkpoint import Checkpointer
mesh = jax.make_mesh((2, 2), ("host", "device"))
def put(value, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])
state = {
    "per_host": put(np.arange(8.0, dtype=np.float32).reshape(2, 4), P("host")),
    "everywhere": put(np.arange(3), P()),
    "key": jax.jit(lambda: jax.random.split(jax.random.key(1), 4),
                   out_shardings=NamedSharding(mesh, P("host")))(),
}
with Checkpointer(directory, keep=2) as checkpointer:
    checkpointer.save(1, state, {"from": index})
    checkpointer.save(2, jax.tree.map(lambda x: x if x.ndim == 1 else x + 1, state), {})
    checkpointer.wait()
    assert checkpointer.steps() == (1, 2), checkpointer.steps()
    if index == 0:
        for path in (directory / "2").rglob("d/*"):
            path.write_bytes(b"")
    from jax.experimental.multihost_utils import sync_global_devices
    sync_global_devices("damaged")
    restored, extra = checkpointer.restore(state)
    assert checkpointer.latest_step() == 1
    assert extra == {"from": 0}, extra
    for name, leaf in state.items():
        data = jax.random.key_data if name == "key" else lambda x: x
        for mine, there in zip(data(leaf).addressable_shards,
                               data(restored[name]).addressable_shards):
            np.testing.assert_array_equal(mine.data, there.data)
print("done")
"""


@pytest.mark.slow
def test_two_processes_save_restore_and_fall_back_together(tmp_path):
    port = free_port()
    processes = [start(TWO_PROCESSES, tmp_path, port, index) for index in (0, 1)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.split()[-1] for output in outputs] == ["done", "done"]
    # One process continues from what two wrote.
    wanted = {
        "per_host": jnp.zeros((2, 4)),
        "everywhere": jnp.zeros(3, jnp.int32),
        "key": jax.random.split(jax.random.key(0), 4),
    }
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored, _ = checkpointer.restore(wanted)
    np.testing.assert_array_equal(restored["per_host"], np.arange(8.0).reshape(2, 4))
    assert bits(restored["key"]) == bits(jax.random.split(jax.random.key(1), 4))


def odd(content, **changes):
    """A manifest with other content, as JSON."""
    return json.dumps({**json.loads(content), **changes})


ODD_MANIFESTS = {
    "a number": lambda content: "3",
    "a list": lambda content: "[]",
    "a text": lambda content: '"manifest"',
    "null": lambda content: "null",
    "an empty object": lambda content: "{}",
    "no JSON": lambda content: content[:-9],
    "too deep": lambda content: "[" * 100_000,
    "no leaves": lambda content: odd(content, leaves=None),
    "leaves of numbers": lambda content: odd(content, leaves={"count": 3}),
    "a list of leaves": lambda content: odd(content, leaves=["count"]),
    "no extra": lambda content: odd(content, extra=None),
    "extra of a list": lambda content: odd(content, extra=[1]),
    "files of numbers": lambda content: odd(content, files={"d": 3}),
    "a list of files": lambda content: odd(content, files=[]),
    "files elsewhere": lambda content: odd(content, files={"../../x": "1"}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", ODD_MANIFESTS.values(), ids=ODD_MANIFESTS)
def test_falls_back_from_a_manifest_of_odd_content(tmp_path, caplog, change):
    save_one_of(tmp_path, (1, 2))
    path = tmp_path / "2" / "manifest.json"
    path.write_text(change(path.read_text()))
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored, extra = checkpointer.restore(small_state())
    assert extra == {"step": 1}
    assert_same(restored, small_state(1.0))
    assert f"{tmp_path / '2'} is damaged: " in caplog.text


def test_falls_back_from_an_extra_that_nobody_can_use(tmp_path, caplog):
    save_one_of(tmp_path, (1, 2))

    def state_of(extra, leaves):
        return [None, small_state()][extra["step"]]  # None for no step but 2.

    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored, extra = checkpointer.restore(state_of)
    assert extra == {"step": 1}
    assert_same(restored, small_state(1.0))
    assert f"{tmp_path / '2'} is damaged: manifest.json, extra" in caplog.text


def test_falls_back_from_arrays_that_are_gone_with_their_checksums(tmp_path, caplog):
    save_one_of(tmp_path, (1, 2))
    path = tmp_path / "2" / "manifest.json"
    path.write_text(odd(path.read_text(), files={}))
    shutil.rmtree(tmp_path / "2" / "state")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        _, extra = checkpointer.restore(small_state())
    assert extra == {"step": 1}
    assert f"{tmp_path / '2'} is damaged: state" in caplog.text


def test_the_newest_step_may_be_in_flight(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.newest_step() is None
        checkpointer.save(1, small_state(), {}, wait=True)
        checkpointer.save(2, small_state(), {})
        assert checkpointer.newest_step() == 2
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.newest_step() == checkpointer.latest_step() == 2
