import itertools
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, Topology, make_topology
from prunex_jax.mesh.hosts import (
    DeviceRecord,
    arrange_hosts,
    fast_domain,
    gather_machines,
    local_machine,
    parse_layout,
    resolve_layout,
    stand_ins,
)
from tests.helpers.common import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Starting jax twice takes about 5 s here; the rest is for a busy machine.
TIMEOUT_SECONDS = 120


def records(machines, per_process, slices=None):
    """One entry of `machines` per process; device numbers as on several CPUs."""
    counts = (
        [per_process] * len(machines) if isinstance(per_process, int) else per_process
    )
    return [
        DeviceRecord(
            process,
            1000 * process + i,
            machine,
            f"node-{machine}",
            None if slices is None else slices[process],
        )
        for process, machine in enumerate(machines)
        for i in range(counts[process])
    ]


def processes(hosts):
    return [[record.process for record in host.devices] for host in hosts]


@pytest.mark.parametrize(
    ("machines", "per_process", "layout", "expected"),
    [
        ("ab", 2, "host", [[0, 0], [1, 1]]),
        ("aabb", 1, "host", [[0, 1], [2, 3]]),
        ("abab", 2, "host", [[0, 0, 2, 2], [1, 1, 3, 3]]),
        ("ba", 1, "host", [[0], [1]]),
        ("aaaa", 1, "host", [[0, 1, 2, 3]]),
        ("aabb", 2, "process", [[0, 0], [1, 1], [2, 2], [3, 3]]),
        ("abcd", 2, 2, [[0, 0, 1, 1], [2, 2, 3, 3]]),
        ("a", 6, 3, [[0, 0], [0, 0], [0, 0]]),
        ("ab", 4, 4, [[0, 0], [0, 0], [1, 1], [1, 1]]),
    ],
)
def test_layouts_group_processes_into_hosts(machines, per_process, layout, expected):
    assert processes(arrange_hosts(records(machines, per_process), layout)) == expected


def test_stand_ins_are_hosts_of_one_process_and_no_others():
    """The demo simulates hosts, and on a cluster takes those that there are."""
    assert parse_layout("3x2") == "3x2"
    assert stand_ins("3x2") == (3, 2)
    assert stand_ins("auto") is stand_ins("2") is None
    assert resolve_layout("3x2", records("a", 6)) == 3
    assert resolve_layout("3x2", records("ab", 6)) == "host"


@pytest.mark.parametrize("text", ["4xx", "0x2", "2x", "x2", "2x2x2", "100000x100000"])
def test_bad_stand_ins_are_refused(text):
    with pytest.raises(UserError, match=rf"layout='{text}' is unknown: .*such as 2x2"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"slice_index": 3}, 3),
        ({"partition_index": 2, "slice_index": 3}, 2),
        ({"partition_index": 0}, 0),
        ({"platform": "cpu", "slice_index": 0}, None),
        ({"partition_index": None, "slice_index": None}, None),
        ({}, None),
    ],
)
def test_domains_of_fast_links_are_partitions_or_slices(said, expected):
    assert fast_domain(types.SimpleNamespace(**said)) == expected


def test_slices_are_hosts_when_the_platform_tells_them():
    rows = arrange_hosts(records("abcd", 1, slices=[0, 0, 1, 1]), "slice")
    assert processes(rows) == [[0, 1], [2, 3]]
    assert rows[0].machines == ("node-a", "node-b")


@pytest.mark.parametrize("layout", ["host", "process", 1, 2, 3, 6, 12])
def test_any_order_of_devices_gives_the_same_hosts(layout):
    given = records("aabbcc", 2)
    shuffled = random.Random(0).sample(given, len(given))
    hosts = arrange_hosts(shuffled, layout)
    assert hosts == arrange_hosts(given, layout), "hosts depend on the order of devices"
    assert sorted(r for host in hosts for r in host.devices) == sorted(given)
    for host in hosts:
        owners = [record.process for record in host.devices]
        changes = sum(a != b for a, b in itertools.pairwise(owners))
        assert changes == len(set(owners)) - 1, "a process's devices are not adjacent"


def test_uneven_hosts_are_refused_with_every_count():
    text = r"node-a: 4, node-b: 2, node-c: 2.*one of 1, 2, 4, 8"
    with pytest.raises(UserError, match=text):
        arrange_hosts(records("aabc", 2), "host")
    with pytest.raises(UserError, match="process 0: 3, process 1: 1"):
        arrange_hosts(records("aa", [3, 1]), "process")


@pytest.mark.parametrize(
    ("machines", "per_process", "layout", "text"),
    [
        ("a", 6, 4, r"topology.layout=4 .*6 devices of one process.*1, 2, 3, 6.*cpu"),
        ("a", 1, 2, "topology.cpu_devices"),
        ("abcd", 3, 6, r"parts of processes: use one of 1, 2, 4, 12"),
        ("ab", 2, "slice", "do not tell their slice"),
        ("", 1, "host", "no devices"),
    ],
)
def test_impossible_layouts_are_refused(machines, per_process, layout, text):
    with pytest.raises(UserError, match=text):
        arrange_hosts(records(machines, per_process), layout)


def test_auto_asks_for_machines_only_with_several_processes():
    assert resolve_layout("auto", records("ab", 2)) == "host"
    assert resolve_layout("auto", records("a", 2)) == 1
    assert resolve_layout("process", records("a", 2)) == "process"


@pytest.mark.parametrize("text", ["", "hosts", "0", "-2", "2.5"])
def test_unknown_layouts_are_refused(text):
    with pytest.raises(UserError, match="is unknown: use auto, host, process, slice"):
        parse_layout(text)


def test_machine_identity_prefers_the_user_then_the_kernel(tmp_path):
    boot = tmp_path / "boot_id"
    boot.write_text("1234\n")
    by_kernel = local_machine({}, boot)
    by_name = local_machine({}, tmp_path / "absent")
    chosen = local_machine({"PRUNEX_HOST_ID": "left"}, boot)
    assert by_kernel.name == by_name.name == socket.gethostname()
    assert chosen.name == "left"
    assert len({by_kernel.key, by_name.key, chosen.key}) == 3
    assert local_machine({"PRUNEX_HOST_ID": ""}, boot) == by_kernel


@pytest.mark.parametrize("name", ["node1", "knoten-ü", "two words", "x" * 300])
def test_machines_survive_the_exchange(name, monkeypatch):
    devices = [types.SimpleNamespace(process_index=p) for p in (0, 1)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr("prunex_jax.mesh.hosts.gather_texts", lambda text: [text, text])
    monkeypatch.setenv("PRUNEX_HOST_ID", name)
    assert gather_machines() == (local_machine({"PRUNEX_HOST_ID": name}),) * 2


def test_processes_with_different_numbers_of_devices_are_refused(monkeypatch):
    devices = [types.SimpleNamespace(process_index=p) for p in (0, 0, 1)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(UserError, match=r"\(process 0: 2, process 1: 1\): give each"):
        gather_machines()


def test_the_mesh_of_one_process():
    devices = jax.devices()
    topology = make_topology("auto")
    assert topology.mesh.axis_names == (HOST_AXIS, DEVICE_AXIS) == ("host", "device")
    assert topology.mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert topology.mesh.devices.tolist() == [devices]
    assert topology.is_primary
    assert not topology.is_simulated
    assert (topology.requested_layout, topology.layout) == ("auto", "1")


def test_a_subset_of_devices_in_any_order():
    devices = jax.devices()[:2]
    topology = make_topology(str(len(devices)), devices[::-1])
    assert topology.mesh.devices.tolist() == [[device] for device in devices]
    assert topology.is_simulated == (len(devices) > 1)


def shown(hosts, layout="host"):
    """A topology for its table: hosts as given, and a mesh only for its device kind."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (HOST_AXIS, DEVICE_AXIS))
    return Topology(mesh, hosts, layout, "auto", process_index=1)


def test_the_table_shows_hosts_processes_and_devices():
    topology = shown(arrange_hosts(records("aabb", 2), "host"))
    title, *lines = topology.table().splitlines()
    assert title.startswith("2 hosts x 4 devices (")
    assert title.endswith("4 processes, layout auto -> host")
    assert [line.split() for line in lines] == [
        ["host", "machine", "process:", "devices"],
        ["0", "node-a", "0:", "0-1", "1:", "1000-1001"],
        ["1", "node-b", "2:", "2000-2001", "3:", "3000-3001"],
    ]
    assert not topology.is_primary


def test_the_table_tells_simulated_hosts():
    for hosts in (
        arrange_hosts(records("a", 4), 2),
        arrange_hosts(records("aa", 2), "process"),
    ):
        assert "simulated: hosts share a machine" in shown(hosts).table()


@pytest.mark.parametrize(
    ("slices", "layout", "is_said"),
    [
        ([0, 0, 1, 1], "host", True),
        ([0, 0, 1, 1], "slice", False),
        ([0, 1, 2, 3], "host", False),
        (None, "host", False),
    ],
)
def test_the_table_tells_of_fast_links_between_hosts(slices, layout, is_said):
    found = shown(arrange_hosts(records("abcd", 4, slices), layout), layout).table()
    line = "fast links join several hosts (2 domains): topology.layout=slice makes"
    assert (line in found) == is_said


@pytest.mark.parametrize("num_hosts", [16, 17, 300])
def test_the_table_of_many_hosts_is_short(num_hosts):
    names = [str(i) for i in range(num_hosts)]
    lines = shown(arrange_hosts(records(names, 8), "host")).table().splitlines()
    assert len(lines) == 2 + 16
    assert lines[-1].split()[0] == str(num_hosts - 1)
    if num_hosts > 16:
        assert lines[-2].split() == ["...", str(num_hosts - 15), "more"]


def test_the_table_sums_up_many_processes_of_a_host():
    hosts = arrange_hosts(records("a" * 8 + "b" * 8, 1), "host")
    line = shown(hosts).table().splitlines()[-1]
    assert line.split() == ["1", "node-b", "8-15:", "8", "devices"]


def test_the_description_is_plain_json():
    topology = shown(arrange_hosts(records("ab", 2), "host"))
    described = topology.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["devices"] == [[0, 1], [1000, 1001]]
    assert described["processes"] == [[0, 0], [1, 1]]
    assert described["machines"] == [["node-a"], ["node-b"]]
    assert (described["num_hosts"], described["devices_per_host"]) == (2, 2)


def run_python(*scripts):
    """Runs each script in a process of its own, together; returns what they print."""
    hidden = ("JAX_", "SLURM_", "OMPI_", "XLA_FLAGS", "PRUNEX_", "KUBERNETES_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    env = {k: v for k, v in env.items() if "proxy" not in k.lower()}
    env["PYTHONPATH"] = str(ROOT)
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in scripts
    ]
    outputs = []
    try:
        for process in started:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
            assert process.returncode == 0, err[-3000:]
            outputs.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return outputs


ONE_PROCESS = """
import json
import jax
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.base.errors import UserError
from prunex_jax.mesh import make_topology
from prunex_jax.processes import LaunchFlags, start_processes

def refusal(count, **flags):
    try:
        start_processes(TopologyConfig(cpu_devices=count), LaunchFlags(**flags))
    except UserError as error:
        return str(error)

negative = refusal(-1)
launch = start_processes(TopologyConfig(cpu_devices=4), LaunchFlags())
topology = make_topology("2")
print(json.dumps({
    "negative": negative,
    "launcher": launch.launcher,
    "platforms": jax.config.jax_platforms,
    "table": topology.table(),
    "devices": topology.describe()["devices"],
    "again": refusal(4),
    "other": refusal(3, owns_process=True),
    "elsewhere": refusal(3),
    "none": refusal(0),
    "late": refusal(4, coordinator="localhost:1", num_processes=2, process_id=1),
}))
"""


def test_one_process_simulates_hosts():
    (result,) = run_python(ONE_PROCESS)
    assert "cpu_devices=-1 must lie in [0, 4096]" in result["negative"]
    assert result["launcher"] == "single"
    assert result["devices"] == [[0, 1], [2, 3]]
    assert result["platforms"] == "cpu", "a GPU would be taken instead"
    assert "2 hosts x 2 devices" in result["table"]
    assert "simulated" in result["table"]
    assert result["again"] is None, "a notebook calls it again with the same settings"
    assert "runs with 4 cpu devices" in result["other"]
    assert "restart the kernel" in result["other"], "a command has its own process"
    assert result["elsewhere"] is None, "in a notebook one device simulates them"
    assert result["none"] is None, "no wish for devices cannot be disappointed"
    assert "jax was used before the processes were joined" in result["late"]


TWO_PROCESSES = """
import json
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, make_topology
from prunex_jax.processes import LaunchFlags, start_processes

flags = LaunchFlags("127.0.0.1:{port}", num_processes=2, process_id={process})
config = TopologyConfig(cpu_devices=2)
launch = start_processes(config, flags)

def sum_over_hosts(topology):
    # Device i of the mesh, in order, contributes 10**i.
    spec = P((HOST_AXIS, DEVICE_AXIS))
    sharding = jax.sharding.NamedSharding(topology.mesh, spec)
    values = 10.0 ** np.arange(4, dtype=np.float32)
    array = jax.make_array_from_callback((4,), sharding, lambda i: values[i])
    total = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, HOST_AXIS),
        mesh=topology.mesh, in_specs=spec, out_specs=P(DEVICE_AXIS),
    ))(array)
    return [float(s.data[0]) for s in total.addressable_shards]

topologies = {{name: make_topology(name) for name in ("auto", "host", "process", "2")}}
print(json.dumps({{
    "launcher": launch.launcher,
    "again": start_processes(config, flags).launcher,
    "is_primary": topologies["auto"].is_primary,
    "shapes": {{n: t.mesh.devices.shape for n, t in topologies.items()}},
    "processes": {{n: t.describe()["processes"] for n, t in topologies.items()}},
    "simulated": {{n: t.is_simulated for n, t in topologies.items()}},
    "sums": {{n: sum_over_hosts(topologies[n]) for n in ("auto", "process")}},
}}))
"""


@pytest.mark.slow
def test_two_processes_form_hosts():
    port = free_port()
    results = run_python(*(TWO_PROCESSES.format(port=port, process=i) for i in (0, 1)))
    assert [result["is_primary"] for result in results] == [True, False]
    for result in results:
        assert (result["launcher"], result["again"]) == ("flags", "caller")
        assert result["shapes"] == {
            "auto": [1, 4],
            "host": [1, 4],
            "process": [2, 2],
            "2": [2, 2],
        }
        assert result["processes"]["auto"] == [[0, 0, 1, 1]]
        assert result["processes"]["process"] == [[0, 0], [1, 1]]
        assert result["simulated"] == {
            "auto": False,
            "host": False,
            "process": True,
            "2": True,
        }
    # One host: nothing is summed. Two hosts: device i of one with device i of the
    # other.
    assert [result["sums"]["auto"] for result in results] == [[1, 10], [100, 1000]]
    assert [result["sums"]["process"] for result in results] == [[101, 1010]] * 2
