"""Channel groups of the models of this package."""

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.channels import trace_channels
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from tests.helpers.channel_checks import members_of


def model_trace(name, side=32, num_classes=10, **settings):
    model = make_model(ModelConfig(name=name, **settings), (side, side, 3), num_classes)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    return trace_channels(model.apply, params, images, statistics=statistics)


BOTTLENECK_STREAMS = [64, 256, 512, 1024, 2048]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "side", "streams", "inner"),
    [
        ("resnet20", 32, [16, 32, 64], [16] * 3 + [32] * 3 + [64] * 3),
        (
            "resnet18",
            224,
            [64, 128, 256, 512],
            [64] * 2 + [128] * 2 + [256] * 2 + [512] * 2,
        ),
        (
            "resnet50",
            224,
            BOTTLENECK_STREAMS,
            [64] * 6 + [128] * 8 + [256] * 12 + [512] * 6,
        ),
        (
            "wide_resnet50_2",
            32,
            BOTTLENECK_STREAMS,
            [128] * 6 + [256] * 8 + [512] * 12 + [1024] * 6,
        ),
    ],
)
def test_residual_networks(name, side, streams, inner):
    trace = model_trace(name, side)
    kernels = {
        g.name: [m for m in g.members if "kernel" in m.path] for g in trace.groups
    }
    # An inner group is made by one kernel and read by one; all others are streams.
    is_inner = {name: len(members) == 2 for name, members in kernels.items()}
    found = {
        kind: sorted(g.size for g in trace.groups if is_inner[g.name] is kind)
        for kind in (True, False)
    }
    if name in ("resnet50", "wide_resnet50_2"):  # the stem is read by two kernels
        assert len(kernels["stem/conv"]) == 3
    assert found == {True: sorted(inner), False: sorted(streams)}
    assert_only_images_kernels_and_classes_stay(trace)


def assert_only_images_kernels_and_classes_stay(trace):
    first = (
        "stem/conv/kernel"
        if "stem/conv/kernel" in trace.shapes
        else ("features/0/conv/kernel")
    )
    stays = {
        (path, axis)
        for path, shape in trace.shapes.items()
        if len(shape) == 4
        for axis in (0, 1)
    } | {(first, 2), ("classifier/kernel", 1), ("classifier/bias", 0)}
    assert {(m.path, m.axis) for f in trace.frozen for m in f.members} == stays
    channels = sum(s.positions.size for g in trace.groups for s in g.members)
    frozen = sum(s.positions.size for f in trace.frozen for s in f.members)
    assert channels + frozen == sum(sum(shape) for shape in trace.shapes.values())


def test_members_of_a_resnet20_stream():
    groups = members_of(model_trace("resnet20"))
    assert groups["blocks/0/conv1"] == (
        16,
        [
            ("blocks/0/conv1/kernel", 3, 1),
            ("blocks/0/norm1/scale", 0, 1),
            ("blocks/0/norm1/bias", 0, 1),
            ("blocks/0/conv2/kernel", 2, 1),
        ],
    )
    size, members = groups["stem/conv"]
    readers = [path for path, axis, _ in members if axis == 2]
    writers = [path for path, axis, _ in members if axis == 3]
    assert size == 16
    assert readers == [
        *(f"blocks/{i}/conv1/kernel" for i in range(4)),
        "blocks/3/shortcut/conv/kernel",
    ]
    assert writers == [
        "stem/conv/kernel",
        *(f"blocks/{i}/conv2/kernel" for i in range(3)),
    ]


@pytest.mark.parametrize(
    ("side", "hidden", "rows"), [(32, [], 1), (224, [4096, 4096], 49)]
)
def test_vgg16(side, hidden, rows):
    trace = model_trace("vgg16", side)
    convs = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert [g.size for g in trace.groups] == convs + hidden
    reader = "hidden/0/kernel" if hidden else "classifier/kernel"
    assert members_of(trace)["features/12/conv"][1][-1] == (reader, 0, rows)
    assert_only_images_kernels_and_classes_stay(trace)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["resnet32", "resnet34", "resnet101", "resnet152", "vgg19"]
)
def test_other_models_are_prunable_almost_everywhere(name):
    assert model_trace(name, width=0.25).prunable_share() > 0.99
