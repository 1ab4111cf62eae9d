"""What programs become on GPUs, compiled for two hosts with eight H100 each.

No GPU is needed, and nothing is run: these tests read what the compiler has made.
"""

import dataclasses
import json
import os
import sys

import pytest

from prunex_jax.comm import wire_bytes
from prunex_jax.mesh import HOST_AXIS
from prunex_jax.train.changes.ahead import exchanges_to_come
from tests.helpers.common import run_script
from tests.helpers.gpu_programs import (
    DEVICES_PER_HOST,
    NUM_HOSTS,
    Compiled,
    GpuPrograms,
    list_compiled,
    needs_compiler,
)
from tests.train.test_cuda import CONFIGS, config_of

DIGITS = [path for path in CONFIGS if path.stem.startswith("digits_")]
# Methods whose state is also compiled in slices over the devices of a host.
IN_SLICES = ("dense", "diloco", "hsadmm")
CASES = [(path, "none") for path in DIGITS]
CASES += [
    (path, shard)
    for path in DIGITS
    for shard in ("state", "params")
    if path.stem.endswith(IN_SLICES)
]
SHAPE = {"host": NUM_HOSTS, "device": DEVICES_PER_HOST}


def programs_of(path, shard="none", **changes) -> GpuPrograms:
    config = config_of(path)
    topology = dataclasses.replace(config.topology, shard=shard)
    data = dataclasses.replace(config.data, batch_size=NUM_HOSTS * DEVICES_PER_HOST * 8)
    method = dataclasses.replace(config.method, **changes)
    return GpuPrograms(
        dataclasses.replace(config, data=data, method=method, topology=topology)
    )


def compiled_of(programs: GpuPrograms) -> dict[str, Compiled]:
    """The first local step, and the first exchange if there is one."""
    found = {"local_step": programs.local_step()}
    first = first_exchange(programs)
    if first is not None:
        found["exchange"] = programs.exchange(first)
    return found


def first_exchange(programs: GpuPrograms):
    """Options of the first exchange; None if there is none."""
    return next(exchanges_to_come(programs.experiment), None)


def resnet50_on_gpus(**rounds) -> GpuPrograms:
    """H-SADMM of ResNet-50 on images of full size."""
    (path,) = (path for path in CONFIGS if path.stem == "imagenet_resnet50_hsadmm")
    config = config_of(path)
    data = dataclasses.replace(config.data, synthetic_examples=256, batch_size=128)
    changed = dataclasses.replace(config.method.rounds, **rounds)
    method = dataclasses.replace(config.method, rounds=changed)
    return GpuPrograms(dataclasses.replace(config, data=data, method=method))


def places_of(start: str, schedule: list[str]) -> list[int]:
    return [at for at, name in enumerate(schedule) if name.startswith(start)]


@pytest.fixture(
    params=CASES,
    ids=lambda case: f"{case[0].stem.split('_')[-1]}-{case[1]}",
    scope="module",
)
def compiled(request):
    return compiled_of(programs_of(*request.param))


PARTS = """
  %p = f32[4]{0} parameter(0)
  %q = s8[2,3]{1,0} parameter(1)
  %r.1 = (f32[4]{0}, s8[2,3]{1,0}) all-reduce-start(%p, %q), channel_id=1, GROUPS
"""
ROWS = "{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (f"replica_groups={{{ROWS}}}, use_global_device_ids=true", ("device",)),
        ("replica_groups=[2,8]<=[16]", ("device",)),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", ("host",)),
        ("replica_groups=[1,16]<=[16]", ("host", "device")),
        ("source_target_pairs={{0,8},{8,0}}", ("host",)),
        ("source_target_pairs={{0,1},{1,0}}", ("device",)),
    ],
)
def test_compiled_collectives_are_listed(groups, axes):
    listed = list_compiled(PARTS.replace("GROUPS", groups))
    found = [(c.kind, c.axes, c.num_elements, c.dtype) for c in listed]
    assert found == [("sum", axes, 4, "float32"), ("sum", axes, 6, "int8")]


def test_groups_across_both_axes_are_refused():
    with pytest.raises(AssertionError):
        list_compiled(PARTS.replace("GROUPS", "replica_groups=[8,2]<=[16]"))


@needs_compiler
def test_compiled_bytes_are_traced_bytes(compiled):
    """Of every collective, axis by axis: hosts and devices are kept apart."""
    for name, program in compiled.items():
        assert wire_bytes(program.collectives, SHAPE) == dict(program.sent), name


@needs_compiler
def test_donated_state_is_where_the_new_one_is(compiled):
    for name, program in compiled.items():
        missing = program.state - program.aliased
        # What a program does not read is not given to it.
        assert missing <= 0.005 * program.state, name


@needs_compiler
def test_steps_copy_next_to_nothing(compiled, request):
    """Parameters least of all, whatever order in memory convolutions want."""
    step = compiled["local_step"]
    # Top-K with momentum copies what it holds back.
    is_dgc = "dgc" in request.node.callspec.id
    assert step.copied <= (0.1 if is_dgc else 0.02) * step.state


@needs_compiler
@pytest.mark.parametrize(
    ("name", "preset", "trees"),
    [
        ("hsadmm", "paper", 0),
        ("hsadmm", "recommended", 1),
        ("diloco", "recommended", 1),
    ],
)
def test_exchanges_copy_no_tree_but_the_consensus_to_the_copies(name, preset, trees):
    """What a round compares with is read before the new one takes its place."""
    path = next(path for path in DIGITS if path.stem.endswith(name))
    form = dataclasses.replace(config_of(path).method.hsadmm, preset=preset)
    programs = programs_of(path, hsadmm=form)
    exchange = programs.exchange(first_exchange(programs))
    copied = exchange.copied - trees * 4 * programs.experiment.num_params
    assert copied <= 0.05 * exchange.state


@needs_compiler
def test_devices_sum_gradients_beside_the_backward_pass():
    """In parts, of which the first are on their way while others are computed."""
    schedule = resnet50_on_gpus().local_step().schedule
    sums = places_of("all-reduce-start", schedule)
    backward = places_of("cudnn-conv-bw", schedule)
    assert len(sums) > 3
    assert sum(at > sums[0] for at in backward) > 0.2 * len(backward)


def step_with_fragments() -> Compiled:
    """A step of ResNet-50 beside which hosts exchange half of the parameters."""
    programs = resnet50_on_gpus(fragments=2, delay=1)
    setup, sizes = programs.experiment.current, programs.experiment.channels.sizes
    steps = range(programs.experiment.num_steps)
    step = next(at for at in steps if "sends" in setup.step_options(at, sizes))
    return programs.local_step(step)


def convolutions_beside_hosts(schedule: list[str]) -> int:
    """How many convolutions are between begin and end of the first sum."""
    started, *_ = places_of("all-reduce-start", schedule)
    ended, *_ = places_of("all-reduce-done", schedule)
    return len(places_of("cudnn-conv", schedule[started:ended]))


@needs_compiler
def test_hosts_sum_fragments_beside_the_passes():
    """And before devices sum gradients, as one sum is under way at a time."""
    program = step_with_fragments()
    first = next(c for c in program.collectives if c.kind == "sum")
    assert first.axes == (HOST_AXIS,)
    assert convolutions_beside_hosts(program.schedule) > 0


SLOW_LINKS = """
import json
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start_processes
config = TopologyConfig(layout="1", cpu_devices=1, link_gbits=8.0)
start_processes(config, LaunchFlags(launcher="none"))
from tests.train.test_gpu_programs import step_with_fragments
print(json.dumps(step_with_fragments().schedule))
"""


@needs_compiler
def test_sums_over_slow_links_take_more_of_a_step(tmp_path):
    """XLA is told of the links before jax starts, so this takes another process."""
    script = tmp_path / "slow_links.py"
    script.write_text(SLOW_LINKS)
    *_, listed = run_script(script, PYTHONPATH=os.pathsep.join(sys.path)).splitlines()
    schedule = json.loads(listed)
    all_of_them = len(places_of("cudnn-conv", schedule))
    # 9 of 158 without.
    assert convolutions_beside_hosts(schedule) > 0.3 * all_of_them


@needs_compiler
@pytest.mark.parametrize("shard", ["none", "state"])
def test_int8_stays_int8_on_the_wire(shard):
    digits = next(path for path in DIGITS if path.stem.endswith("hsadmm"))
    exchange = compiled_of(programs_of(digits, shard, wire_dtype="int8"))["exchange"]
    over_hosts = [c for c in exchange.collectives if HOST_AXIS in c.axes]
    assert over_hosts and {c.dtype for c in over_hosts} == {"int8"}


@needs_compiler
def test_products_that_triton_has_no_tiles_for_compile():
    """Those of images of 197 patches in bfloat16, with no GPU to try kernels on."""
    path = next(path for path in CONFIGS if path.stem == "cifar10_vit_ti_dense")
    config = config_of(path)
    data = dataclasses.replace(
        config.data,
        name="synthetic",
        image_size=224,
        augment="none",
        batch_size=128,
        synthetic_examples=256,
    )
    vit = dataclasses.replace(config.model.vit, patch=16, layers=1)
    model = dataclasses.replace(config.model, vit=vit, compute_dtype="bfloat16")
    programs = GpuPrograms(dataclasses.replace(config, data=data, model=model))
    assert programs.local_step().collectives
