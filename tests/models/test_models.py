"""Models: counts, shapes, laws of batch norm, shrinking by hand, meshes, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.mesh import vary
from prunex_jax.models import (
    MODELS,
    BlockSpec,
    Form,
    Model,
    ResNetSpec,
    VggSpec,
    layers,
    make_model,
    make_resnet,
    make_vgg,
)
from prunex_jax.models.settings import ModelConfig

BASIC = ResNetSpec(
    "cifar",
    4,
    (BlockSpec((3,), 4), BlockSpec((5,), 6, 2, True), BlockSpec((7,), 6)),
)
BOTTLENECK = ResNetSpec(
    "imagenet", 4, (BlockSpec((3, 5), 4), BlockSpec((4, 5), 6, 2, True))
)
VGG = VggSpec(stages=((4,), (5, 6)), hidden=(7, 5))
SPECS = {"basic": BASIC, "bottleneck": BOTTLENECK, "vgg": VGG}


def small_model(name: str, **form) -> Model:
    make = make_vgg if name == "vgg" else make_resnet
    return make(name, SPECS[name], Form(**form), (9, 8, 3), num_classes=5)


def random_state(model: Model):
    """Parameters and statistics of the right shapes, with no zeros or ones in them."""
    rng = np.random.default_rng(0)

    def draw(x):
        if x.ndim == 1:
            return jnp.asarray(rng.uniform(0.3, 1.5, x.shape), x.dtype)
        size = np.prod(x.shape[:-1]) ** -0.5
        return jnp.asarray(rng.normal(scale=1.4 * size, size=x.shape), x.dtype)

    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))


def images_of(model: Model, n: int) -> jax.Array:
    rng = np.random.default_rng(7)
    return jnp.asarray(rng.normal(size=(n, *model.example().shape[1:])), jnp.float32)


def primitives_of(jaxpr) -> set[str]:
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives_of(inner)
    return names


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "side", "num_classes", "expected"),
    [
        ("resnet20", 32, 10, 272_474),
        ("resnet32", 32, 10, 466_906),
        ("resnet56", 32, 10, 855_770),
        ("resnet110", 32, 10, 1_730_714),
        ("resnet18", 224, 1000, 11_689_512),
        ("resnet34", 224, 1000, 21_797_672),
        ("resnet50", 224, 1000, 25_557_032),
        ("resnet101", 224, 1000, 44_549_160),
        ("resnet152", 224, 1000, 60_192_808),
        ("wide_resnet50_2", 224, 1000, 68_883_240),
        ("vgg16", 224, 1000, 138_365_992),
        ("vgg19", 224, 1000, 143_678_248),
    ],
)
def test_published_parameter_counts(name, side, num_classes, expected):
    model = make_model(ModelConfig(name=name), (side, side, 3), num_classes)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize(
    ("shape", "stem"),
    [((8, 8, 1), "cifar"), ((64, 33, 3), "cifar"), ((65, 20, 3), "imagenet")],
)
def test_stem_follows_image_size_and_any_size_runs(shape, stem):
    model = make_model(ModelConfig(name="resnet20", width=0.25), shape, 10)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    size = {"cifar": 3, "imagenet": 7}[stem]
    assert params["stem"]["conv"]["kernel"].shape[0] == size
    images = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
    assert jax.eval_shape(model.apply, params, statistics, images).shape == (3, 10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["resnet20", "resnet18", "wide_resnet50_2", "vgg16"])
def test_every_kind_of_model_traces_with_both_stems(name):
    for stem in ("cifar", "imagenet"):
        config = ModelConfig(name=name, stem=stem, width=0.1)
        model = make_model(config, (32, 32, 3), 10)
        params, statistics = jax.eval_shape(model.init, jax.random.key(0))
        images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
        logits, new = jax.eval_shape(model.apply_train, params, statistics, images)
        assert logits.shape == (2, 10)
        assert new == statistics


def test_every_width_is_scaled_and_stays_positive():
    spec = MODELS["wide_resnet50_2"]("imagenet", scale=0.01)
    assert spec.stem_width == 1
    assert spec.blocks[0] == BlockSpec((1, 1), 3, 1, True)
    assert spec.blocks[-1] == BlockSpec((10, 10), 20)


def test_vgg_flattens_the_map():
    model = make_model(ModelConfig(name="vgg16"), (224, 224, 3), 1000)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert params["hidden"]["0"]["kernel"].shape == (7 * 7 * 512, 4096)
    model = make_model(ModelConfig(name="vgg16"), (64, 64, 3), 10)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert params["classifier"]["kernel"].shape == (2 * 2 * 512, 10)
    assert "hidden" not in params


@pytest.mark.parametrize("name", sorted(SPECS))
def test_trees_are_nested_dicts_with_string_keys(name):
    model = small_model(name)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))

    def check(tree):
        assert type(tree) is dict
        for key, value in tree.items():
            assert type(key) is str
            if not hasattr(value, "dtype"):
                check(value)
            else:
                assert value.dtype == jnp.float32

    check(params)
    check(statistics)
    leaves = {path.split("/")[-1] for path in flatten_by_path(statistics)}
    assert leaves == {"mean", "var"}


def test_initial_values():
    spec = ResNetSpec("cifar", 64, (BlockSpec((64,), 64),))
    model = make_resnet("one", spec, Form(), (8, 8, 3), num_classes=5)
    init = jax.jit(model.init)
    params, statistics = init(jax.random.key(0))
    block = params["blocks"]["0"]
    kernel = block["conv2"]["kernel"]
    assert kernel.std() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.03)
    assert not np.allclose(kernel, block["conv1"]["kernel"])
    # A zero scale at the end of a branch would make the scores of its channels equal.
    assert bool((block["norm2"]["scale"] == 1).all())
    assert bool((block["norm2"]["bias"] == 0).all())
    assert bool((statistics["blocks"]["0"]["norm2"]["var"] == 1).all())
    other, _ = init(jax.random.key(1))
    assert not np.allclose(kernel, other["blocks"]["0"]["conv2"]["kernel"])


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_against_loops(stride):
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 3)).astype(np.float32)
    conv = layers.Conv(3, 4, 3, Form(), stride=stride, has_bias=True, rngs=_rngs())
    conv.bias[...] = jnp.arange(4.0)
    kernel = np.asarray(conv.kernel[...])
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = range(0, 5, stride), range(0, 6, stride)
    expected = np.stack(
        [
            np.stack(
                [
                    np.tensordot(padded[:, i : i + 3, j : j + 3], kernel, 3)
                    for j in columns
                ],
                1,
            )
            for i in rows
        ],
        1,
    )
    y = conv(jnp.asarray(x))
    np.testing.assert_allclose(y, expected + np.arange(4.0), rtol=1e-4, atol=1e-5)


def test_batch_norm_normalises_and_keeps_a_moving_average():
    norm = layers.BatchNorm(3, Form())
    norm.scale[...] = jnp.array([1.0, 2.0, 0.5])
    norm.bias[...] = jnp.array([0.0, 1.0, -1.0])
    x = 3.0 + 2.0 * jax.random.normal(jax.random.key(0), (4, 5, 5, 3))
    y = norm(x)
    np.testing.assert_allclose(y.mean((0, 1, 2)), [0.0, 1.0, -1.0], atol=1e-5)
    np.testing.assert_allclose(y.std((0, 1, 2)), [1.0, 2.0, 0.5], rtol=1e-4)
    np.testing.assert_allclose(norm.mean[...], 0.1 * x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * x.var((0, 1, 2)), rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_evaluation_with_the_statistics_of_the_batch_is_training(name):
    model = small_model(name)
    params, old = random_state(model)
    images = images_of(model, 6)
    logits, new = jax.jit(model.apply_train)(params, old, images)
    decay = layers.STATISTICS_DECAY
    batch = jax.tree.map(lambda n, o: (n - decay * o) / (1 - decay), new, old)
    again = jax.jit(model.apply)(params, batch, images)
    assert logits.std() > 1e-3
    np.testing.assert_allclose(again, logits, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_reestimated_statistics_are_those_of_all_images_together():
    """In front of the first norm, which reads the same whatever the batch."""
    model = small_model("basic")
    params, statistics = random_state(model)
    images = images_of(model, 12) + np.repeat([0.0, 3.0, -6.0], 4)[:, None, None, None]
    for number in range(3):
        part = images[4 * number : 4 * number + 4]
        statistics = model.reestimate(params, statistics, part, jnp.int32(number))
    # One batch of all: from nothing, statistics move by their share.
    nothing = jax.tree.map(jnp.zeros_like, statistics)
    _, moved = model.apply_train(params, nothing, images)
    for key in ("mean", "var"):
        wanted = moved["stem"]["norm"][key] / (1 - layers.STATISTICS_DECAY)
        found = statistics["stem"]["norm"][key]
        np.testing.assert_allclose(found, wanted, rtol=2e-3, err_msg=key)


def test_evaluation_treats_every_image_alone():
    model = small_model("vgg")
    params, statistics = random_state(model)
    images = images_of(model, 4)
    together = jax.jit(model.apply)(params, statistics, images)
    alone = jax.jit(model.apply)(params, statistics, images[2:3])
    np.testing.assert_allclose(together[2:3], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_evaluation_traces_to_ordinary_primitives(name):
    model = small_model(name, convolution="chunked")
    params, statistics = random_state(model)
    images = images_of(model, 2)
    jaxpr = jax.make_jaxpr(model.apply)(params, statistics, images).jaxpr
    known = (
        "add broadcast_in_dim conv_general_dilated convert_element_type "
        "custom_jvp_call div dot_general jit max mul reduce_sum reduce_window_max "
        "reshape rsqrt sub"
    )
    found = primitives_of(jaxpr)
    assert "conv_general_dilated" in found
    assert found <= set(known.split())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "chunk_bytes"), [("basic", 3000), ("bottleneck", 1), ("vgg", 1)]
)
def test_chunked_gradients_are_direct_gradients(name, chunk_bytes, monkeypatch):
    monkeypatch.setattr(layers, "_CHUNK_BYTES", chunk_bytes)
    direct = small_model(name, convolution="direct")
    chunked = small_model(name, convolution="chunked")
    params, statistics = random_state(direct)
    # One byte: eight chunks at most, so five of two images. 3000 bytes: other numbers,
    # with a smaller last chunk.
    images = images_of(direct, 10)

    def gradients(model, params, images):
        def loss(params, images):
            logits, _ = model.apply_train(params, statistics, images)
            return (jax.nn.log_softmax(logits)[:, 0] ** 2).mean()

        return jax.grad(loss, argnums=(0, 1))(params, images)

    expected = jax.jit(gradients, static_argnums=0)(direct, params, images)
    actual = jax.jit(gradients, static_argnums=0)(chunked, params, images)
    for want, got in zip(*map(jax.tree.leaves, (expected, actual)), strict=True):
        tolerance = 1e-4 * float(jnp.abs(want).max()) + 1e-6
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=tolerance)

    def convolutions(model):
        text = str(jax.make_jaxpr(lambda *a: gradients(model, *a))(params, images))
        return text.count("conv_general_dilated[")

    assert convolutions(chunked) > convolutions(direct)


def _rngs():
    from flax import nnx

    return nnx.Rngs(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "axis_name"),
    [("basic", None), ("basic", "device"), ("bottleneck", None), ("vgg", "device")],
)
def test_batch_statistics_on_a_mesh(name, axis_name):
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device")
    )
    model = small_model(name, convolution="chunked")
    params, statistics = random_state(model)
    images = images_of(model, 12)

    def loss(params, images, axis_name):
        logits, new = model.apply_train(params, statistics, images, axis_name)
        return (jax.nn.log_softmax(logits)[:, 0] ** 2).sum(), new

    def step(params, images):
        grads, new = jax.grad(loss, has_aux=True)(params, images, axis_name)
        new = jax.tree.map(lambda x: vary(x[None], ("host", "device")), new)
        return grads, new

    sharded = P(("host", "device"))
    program = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), sharded), out_specs=(P(), sharded)
    )
    grads, new = jax.jit(program)(params, images)

    # Parameters are the same on every device, so jax sums their gradients; each share
    # of the images is a batch of its own.
    share = 3 if axis_name is None else 6
    one = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
    parts = [one(params, images[i : i + share], None) for i in range(0, 12, share)]
    expected = jax.tree.map(lambda *g: sum(g), *[part[0] for part in parts])
    for want, got in zip(*map(jax.tree.leaves, (expected, grads)), strict=True):
        tolerance = 1e-4 * float(jnp.abs(want).max()) + 2e-5
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=tolerance)
    for device in range(4):
        part = parts[device * 3 // share][1]
        for want, got in zip(*map(jax.tree.leaves, (part, new)), strict=True):
            np.testing.assert_allclose(got[device], want, rtol=1e-3, atol=1e-5)


def test_chunks_do_not_multiply_collectives(monkeypatch):
    monkeypatch.setattr(layers, "_CHUNK_BYTES", 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("device",))

    def num_sums(convolution):
        model = small_model("basic", convolution=convolution)
        params, statistics = random_state(model)
        gradient = jax.shard_map(
            jax.grad(lambda p, x: model.apply_train(p, statistics, x)[0].sum()),
            mesh=mesh,
            in_specs=(P(), P("device")),
            out_specs=P(),
        )
        jaxpr = jax.make_jaxpr(gradient)(params, images_of(model, 8))
        return str(jaxpr).count("= psum")

    assert num_sums("chunked") == num_sums("direct") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["basic", "vgg"])
def test_bfloat16_keeps_parameters_statistics_and_logits_in_float32(name):
    model = small_model(name, dtype="bfloat16", convolution="chunked")
    params, statistics = random_state(model)
    images = images_of(model, 8)

    def loss(params):
        logits, new = model.apply_train(params, statistics, images)
        return logits.sum(), (logits, new)

    grads, (logits, new) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert logits.dtype == jnp.float32
    for leaf in jax.tree.leaves((grads, new)):
        assert leaf.dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(model.apply)(params, statistics, images))
    assert "conv_general_dilated" in jaxpr
    for line in jaxpr.splitlines():
        if "= conv_general_dilated" in line:
            assert ":bf16[" in line
    exact, _ = jax.jit(small_model(name).apply_train)(params, statistics, images)
    assert 0 < jnp.abs(logits - exact).max() < 0.1 * jnp.abs(exact).max() + 0.05


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"name": "resnet21"}, (8, 8, 1), "'resnet21' is not known, did you mean"),
        ({"stem": "imagnet"}, (8, 8, 1), "did you mean 'imagenet'"),
        ({"compute_dtype": "float16"}, (8, 8, 1), "compute_dtype='float16'"),
        ({"convolution": "patches"}, (8, 8, 1), "one of auto, direct, chunked"),
        ({"width": 0.0}, (8, 8, 1), "width=0.0 must be positive"),
        ({"width": float("nan")}, (8, 8, 1), "width=nan must be a finite number"),
        ({"name": "vgg16"}, (8, 8, 1), "at least 32x32.*have 8x8.*image_size=32"),
        ({}, (8, 0, 1), r"image_shape=\(8, 0, 1\)"),
    ],
)
def test_bad_settings_are_refused(settings, shape, message):
    with pytest.raises(UserError, match=message):
        make_model(ModelConfig(**settings), shape, 10)


def test_convolution_is_chosen_by_platform():
    def text(convolution):
        config = ModelConfig(width=0.25, convolution=convolution)
        model = make_model(config, (8, 8, 1), 10)
        arrays = jax.eval_shape(model.init, jax.random.key(0))
        return str(jax.make_jaxpr(model.apply_train)(*arrays, model.example(2)))

    expected = "chunked" if jax.default_backend() == "cpu" else "direct"
    assert text("auto") == text(expected)
    assert text("chunked") != text("direct")
