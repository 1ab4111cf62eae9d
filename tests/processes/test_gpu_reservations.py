"""No GPU is taken by two processes in silence, whatever each of them calls it."""

import jax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start, start_processes
from prunex_jax.processes.gpus import (
    GpuFiles,
    Reservation,
    check_reservations,
    has_gpu_support,
    read_reservation,
    reserve_gpus,
    visible_gpus,
)
from tests.helpers.common import everybody_is_there


def gpu_files(folder, numbers=range(8), barred=(), partitioned=()):
    """A machine with GPUs, of which some are barred for this process."""
    devices, driver = folder / "dev", folder / "driver"
    for number in numbers:
        devices.mkdir(exist_ok=True)
        (devices / f"nvidia{number}").touch()
        about = driver / "gpus" / f"0000:0{number}:00.0"
        about.mkdir(parents=True)
        text = f"GPU UUID: \t GPU-aa{number}-bb\nDevice Minor: \t {number}\n"
        (about / "information").write_text(text)
    for number in partitioned:
        (driver / f"capabilities/gpu{number}/mig/gi3").mkdir(parents=True)
    (devices / "nvidiactl").touch()
    no = {f"nvidia{number}" for number in barred}
    return GpuFiles(devices, driver, lambda file: file.name not in no)


@pytest.mark.parametrize(
    ("environ", "machine", "names"),
    [
        ({}, {}, "01234567"),
        ({}, {"numbers": (3, 5)}, "35"),
        ({"CUDA_VISIBLE_DEVICES": "6,2"}, {}, "62"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"numbers": (3, 5)}, "5"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa4-bb,GPU-aa1"}, {}, "41"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, "01"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"barred": (0, 1, 3, 5, 6, 7)}, "24"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"barred": range(8)}, "01"),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,4"}, {}, "2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, ""),
    ],
    ids=[
        "all",
        "a container's",
        "positions",
        "positions in a container",
        "names of the driver",
        "the first two",
        "the first two of those that are not barred",
        "nothing can be opened",
        "up to the first that is invalid",
        "none",
    ],
)
def test_a_gpu_has_one_name_for_all_processes(tmp_path, environ, machine, names):
    assert visible_gpus(environ, gpu_files(tmp_path, **machine)) == tuple(names)


def test_parts_of_gpus_have_names_of_their_own(tmp_path):
    files = gpu_files(tmp_path, partitioned=(1,))
    by_part = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert reserve_gpus(by_part, None, files).gpus == ("MIG-a", "MIG-b")
    container = {"NVIDIA_VISIBLE_DEVICES": "MIG-c"}
    assert reserve_gpus(container, None, files).gpus == ("MIG-c",)
    # Which part of GPU 1 another process takes, nobody knows.
    assert reserve_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, None, files).gpus == ("0",)


def test_gpus_of_amd_have_names(tmp_path):
    (tmp_path / "dri").mkdir()
    for number in range(128, 136):
        (tmp_path / "dri" / f"renderD{number}").touch()
    (tmp_path / "kfd").touch()
    files = GpuFiles(tmp_path, tmp_path)
    environ = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}
    assert visible_gpus(environ, files) == ("133",)
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "", **environ}, files) == ("133",)
    assert visible_gpus({**environ, "ROCR_VISIBLE_DEVICES": ""}, files) == ()


def test_a_process_claims_its_share(tmp_path):
    files = gpu_files(tmp_path)
    reservation = reserve_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (2, 3), files)
    assert reservation.gpus == ("6", "7") and not reservation.is_shared
    assert read_reservation(reservation.text) == reservation
    # A machine that stands for two hosts has each GPU once.
    other = reserve_gpus({"PRUNEX_HOST_ID": "b"}, None, files)
    assert other.machine == reservation.machine


def reservations_of(*gpus, machines="aaaa", **changes):
    return [
        Reservation(machine, f"node-{machine}", tuple(names), **changes)
        for machine, names in zip(machines, gpus, strict=False)
    ]


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (("0123", "0123"), "GPU 0 of node-a is taken by process 0 and by process 1"),
        (("01", "23", "12"), "GPU 1 of node-a is taken by process 0 and by process 2"),
    ],
    ids=["all of all", "overlapping masks"],
)
def test_a_gpu_that_is_taken_twice_is_refused_with_both(gpus, text):
    with pytest.raises(UserError, match=rf"{text}: .*--gpu-bind.*PRUNEX_SHARE_GPUS=1"):
        check_reservations(reservations_of(*gpus))


def test_other_machines_and_other_gpus_are_no_conflict():
    assert check_reservations(reservations_of("01", "01", machines="ab")) == ""
    assert check_reservations(reservations_of("01", "23", "", "")) == ""


def test_sharing_on_purpose_is_said():
    said = check_reservations(reservations_of("0", "0", is_shared=True))
    assert said.startswith("GPU 0 of node-a is taken by process 0 and by process 1, as")
    one = reservations_of("0", is_shared=True) + reservations_of("0")
    with pytest.raises(UserError, match="taken by process 0 and by process 1"):
        check_reservations(one)


def test_the_cpu_claims_nothing(monkeypatch):
    class Plugin:
        name = "xla_cuda13"

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Plugin])
    assert has_gpu_support(None) and has_gpu_support("cuda,cpu")
    assert not has_gpu_support("cpu")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert not has_gpu_support(None)


@pytest.mark.parametrize(("devices", "is_refused"), [(0, True), (2, False)])
def test_processes_that_start_compare_their_gpus(monkeypatch, devices, is_refused):
    """Two by hand, each of which sees all GPUs."""

    class TwoAlike:
        def __init__(self, name):
            del name

        def exchange(self, key, text, seconds):
            return [text, text]

    monkeypatch.setattr(start, "Store", TwoAlike)
    monkeypatch.setattr(start, "is_used", lambda: False)
    monkeypatch.setattr(start, "has_gpu_support", lambda platforms: True)
    monkeypatch.setattr(start, "register", lambda *args, **_: everybody_is_there(*args))
    for name in ("_request_cpu_devices", "_check_cpu_devices"):
        monkeypatch.setattr(start, name, lambda count: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: None)
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-x,GPU-y"}
    flags = LaunchFlags("head:4000", num_processes=2, process_id=1)
    config = TopologyConfig(cpu_devices=devices)
    if is_refused:
        with pytest.raises(
            UserError, match=r"GPU GPU-x of .* process 0 and by process"
        ):
            start_processes(config, flags, environ)
    else:
        start_processes(config, flags, environ)
