"""Modules of PyTorch answer, learn and keep statistics here as in PyTorch."""

import concurrent.futures
import copy
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from prunex_jax.base.errors import UserError
from prunex_jax.export.program import flat_arrays, load_program, make_program
from prunex_jax.models import check_norm_scope, functions_of, own_model
from prunex_jax.models.base import from_moments, to_moments
from prunex_jax.models.settings import ModelConfig
from tests.helpers.common import make_mesh

torch = pytest.importorskip("torch", reason="needs the extra pytorch")
pytest.importorskip("torchax", reason="needs the extra pytorch")
StochasticDepth = pytest.importorskip("torchvision").ops.StochasticDepth
nn = torch.nn
pytestmark = pytest.mark.pytorch

KEY = jax.random.key(3)
# Sums in another order, through two norms and their gradients.
ROUNDING = 2e-5


class Convolutions(nn.Module):
    """Three kinds of norm, a tied layer, and numbers that are not learned."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, momentum=momentum)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.plain = nn.BatchNorm2d(8, affine=False, momentum=0.3)
        self.hidden = nn.Linear(8, 8)
        self.flat = nn.BatchNorm1d(8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.hidden.weight
        self.out = nn.Linear(8, 5)
        self.register_buffer("factor", torch.tensor(1.5))

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.plain(self.two(x))).mean((2, 3))
        x = torch.tanh(self.flat(self.hidden(x)) * self.factor)
        return self.out(self.again(x))


class Dropping(nn.Module):
    """A layer of the kind that is given, and a parameter."""

    def __init__(self, layer):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(())), layer

    def forward(self, x):
        return self.layer(x * self.scale)


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args)


def images(count=6, seed=0):
    rng = np.random.default_rng(seed)
    return (1 + 2 * rng.normal(size=(count, 3, 6, 6))).astype(np.float32)


def arrays_of(module):
    return {k: v.detach().numpy() for k, v in module.state_dict().items()}


def trained_here(module, x, **options):
    functions = functions_of(module, jnp.asarray(x))
    trees = functions.init(KEY)
    options = {"key": KEY, "axis_name": None, **options}
    return functions.apply_train(*trees, jnp.asarray(x), **options)


def test_training_is_that_of_pytorch():
    """Answers, moved statistics and gradients."""
    module, x = seeded(Convolutions), images()
    functions = functions_of(module, jnp.asarray(x))
    params, statistics = functions.init(KEY)

    def loss(params):
        answers, after = functions.apply_train(params, statistics, x, KEY, None)
        return jnp.sum(jnp.sin(answers)), (answers, after)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, (answers, after)), grads = step(params)
    theirs = copy.deepcopy(module).train()
    wanted = theirs(torch.tensor(x))
    torch.sin(wanted).sum().backward()
    np.testing.assert_allclose(answers, wanted.detach().numpy(), atol=ROUNDING)
    moved = arrays_of(theirs)
    assert after.keys() == {k for k in moved if "running" in k} and len(after) == 6
    for name, value in after.items():
        np.testing.assert_allclose(value, moved[name], atol=1e-6, err_msg=name)
        assert np.abs(moved[name] - arrays_of(module)[name]).max() > 1e-3
    assert grads.keys() == dict(module.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        found, autograd = grads[name], parameter.grad.numpy()
        allowed = ROUNDING * max(1.0, np.abs(autograd).max())
        np.testing.assert_allclose(found, autograd, atol=allowed, err_msg=name)


def test_evaluation_is_that_of_pytorch():
    module, x = seeded(Convolutions), images()
    module(torch.tensor(3 + x))  # Statistics of other images.
    functions = functions_of(module, jnp.asarray(x))
    found = jax.jit(functions.apply)(*functions.init(KEY), x)
    assert module.training, "the module stays as it was"
    wanted = module.eval()(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(
        found, jax.jit(functions.apply)(*functions.init(KEY), x)
    )


def test_the_module_stays_as_it_is():
    module, x = seeded(Convolutions), images()
    module.eval()
    before = copy.deepcopy(module.state_dict())
    trained_here(module, x)
    after = module.state_dict()
    assert not module.training and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.5),
        nn.AlphaDropout(0.5),
        StochasticDepth(0.5, "row"),
        nn.Sequential(nn.Flatten(2), nn.MultiheadAttention(36, 2, 0.5)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_training_draws_by_its_key_and_evaluation_does_not(layer):
    if isinstance(layer, nn.Sequential):
        layer = Attending(*layer)
    functions = functions_of(Dropping(layer), jnp.asarray(images()))
    trees, x = functions.init(KEY), jnp.asarray(images())
    train = jax.jit(lambda key: functions.apply_train(*trees, x, key, None)[0])
    first, same, other = (train(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert float(jnp.abs(first - other).max()) > 1e-3
    apply = jax.jit(functions.apply)
    np.testing.assert_array_equal(apply(*trees, x), apply(*trees, x))
    assert functions.is_random


class Attending(nn.Module):
    def __init__(self, flat, attention):
        super().__init__()
        self.flat, self.attention = flat, attention

    def forward(self, x):
        x = self.flat(x)
        return self.attention(x, x, x, need_weights=False)[0]


def test_dropout_keeps_the_mean():
    x = jnp.ones((64, 100))
    functions = functions_of(Dropping(nn.Dropout(0.2)), x)
    found = functions.apply_train(*functions.init(KEY), x, KEY, None)[0]
    values = np.unique(np.asarray(found))
    np.testing.assert_allclose(values, [0, 1.25], rtol=1e-6)
    assert 0.17 < float((found == 0).mean()) < 0.23


class Slow(nn.Linear):
    """Begins in one mode, and says in which it ends."""

    def forward(self, x):
        y = super().forward(x)
        time.sleep(0.2)
        return y + float(self.training)


def test_threads_trace_one_after_the_other():
    """As where programs are compiled while steps run."""
    functions = functions_of(Slow(3, 3), jnp.ones((1, 3)))
    trees, x = functions.init(KEY), jnp.zeros((1, 3))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        training = pool.submit(lambda: functions.apply_train(*trees, x, KEY, None)[0])
        time.sleep(0.1)
        evaluation = pool.submit(lambda: functions.apply(*trees, x))
        found = training.result() - evaluation.result()
    np.testing.assert_allclose(found, 1.0, rtol=1e-6)


class Stopping(nn.Module):
    def __init__(self, stop):
        super().__init__()
        self.weight, self.stop = nn.Parameter(torch.tensor([2.0, 3.0])), stop

    def forward(self, x):
        return self.weight * x + self.stop(self.weight * self.weight, x)


def without_grad(weight, x):
    with torch.no_grad():
        return weight * x


@pytest.mark.parametrize(
    "stop",
    [
        without_grad,
        lambda weight, x: weight.detach() * x,
        lambda weight, x: weight[:2].detach() * x,
    ],
    ids=["no_grad", "detach", "detached view"],
)
def test_what_pytorch_keeps_from_gradients_has_none_here(stop):
    module, x = Stopping(stop), np.array([[1.0, 4.0]], np.float32)
    functions = functions_of(module, jnp.asarray(x))

    def loss(params):
        return functions.apply_train(params, {}, jnp.asarray(x), KEY, None)[0].sum()

    with torch.no_grad():  # What the caller is in changes nothing.
        found = jax.grad(loss)(functions.init(KEY)[0])["weight"]
    np.testing.assert_allclose(found, x[0])


def test_norms_over_a_host_are_those_of_all_its_examples():
    module, x = seeded(Convolutions), images(8)
    model = own_model(module, x[:1])
    trees = model.init(KEY)

    def on_device(params, statistics, x):
        answers, after = model.apply_train(
            params, statistics, x, axis_name="device", key=KEY
        )
        return answers, jax.tree.map(lambda s: jax.lax.pmean(s, "device"), after)

    mapped = jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh(1, 4),
            in_specs=(P(), P(), P("device")),
            out_specs=(P("device"), P()),
        )
    )
    found, wanted = mapped(*trees, x), trained_here(module, x)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-4)
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, atol=1e-5, err_msg=name)
    host = ModelConfig(norm_scope="host")
    check_norm_scope(host, model, "it")
    with pytest.raises(UserError, match="has no effect on it"):
        check_norm_scope(host, own_model(nn.Linear(2, 3), np.ones((1, 2))), "it")


def test_statistics_of_no_batches_are_those_of_one():
    """As mean squares, variances by the names of state dicts are averaged."""
    model, x = own_model(seeded(Convolutions), images()[:1]), jnp.asarray(images())
    params, statistics = model.init(KEY)
    found = model.reestimate(params, statistics, x, jnp.int32(0))
    wide = model.functions.module.one
    hidden = wide(torch.tensor(images())).detach().numpy()
    axes, count = (0, 2, 3), hidden.size // 8
    variance = hidden.var(axes) * count / (count - 1)
    np.testing.assert_allclose(found["norm.running_mean"], hidden.mean(axes), atol=1e-4)
    np.testing.assert_allclose(found["norm.running_var"], variance, rtol=1e-3)
    moments = to_moments({"a.running_mean": jnp.ones(1), "a.running_var": jnp.ones(1)})
    assert float(moments["a.running_var"][0]) == 2.0
    assert float(from_moments(moments)["a.running_var"][0]) == 1.0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen += x.sum(0)
        return self.layer(x)


class TwoAnswers(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return (y, y) if self.training else y


class Remembers(nn.Module):
    """Keeps in evaluation what it has computed of a parameter, as LeViT does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("at", torch.tensor([0, 3, 3]), persistent=False)
        self.kept = {}

    def train(self, mode=True):
        if mode:
            self.kept = {}
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return x + self.table[self.at].sum(0)
        if "rows" not in self.kept:
            self.kept["rows"] = self.table[self.at].sum(0)
        return x + self.kept["rows"]


def test_what_modules_keep_for_later_is_computed_of_the_parameters_that_are_given():
    module, x = Remembers(), np.ones((3, 4), np.float32)
    module.eval()(torch.tensor(x))
    model = own_model(module, x)
    params, statistics = model.init(KEY)
    wanted = x + 2 * module.table.detach().numpy()[[0, 3, 3]].sum(0)
    for _ in range(2):  # Of both calls, and of programs that are compiled.
        twice = {"table": 2 * params["table"]}
        np.testing.assert_allclose(model.apply(twice, statistics, x), wanted, rtol=1e-5)
        found = jax.jit(model.apply)(twice, statistics, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert set(module.kept) == {"rows"}, "the module stays as it is"


class Normalized(nn.Linear):
    def forward(self, x):
        return nn.functional.normalize(super().forward(x), dim=-1)


def test_zeros_are_normalized_as_in_pytorch():
    """A derivative of 0, and not one that is not finite."""
    module = Normalized(3, 4)
    x = np.array([[1, 2, 3], [0, 0, 0]], np.float32)
    with torch.no_grad():
        module.bias.zero_()
    model = own_model(module, x)
    params, statistics = model.init(KEY)
    np.testing.assert_allclose(
        model.apply(params, statistics, x), module(torch.tensor(x)).detach(), rtol=1e-5
    )
    weights = np.arange(8, dtype=np.float32).reshape(2, 4)
    (module(torch.tensor(x)) * torch.tensor(weights)).sum().backward()
    found = jax.grad(lambda p: (model.apply(p, statistics, x) * weights).sum())(params)
    for name, tensor in module.named_parameters():
        wanted = tensor.grad.numpy()
        np.testing.assert_allclose(
            found[name], wanted, rtol=1e-4, atol=1e-6 * abs(wanted).max()
        )


class Outside(nn.Linear):
    def forward(self, x):
        skipped = self.training and torch.rand(()) < 0.0
        return x if skipped else super().forward(x)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class StraightThrough(nn.Linear):
    def forward(self, x):
        return Sign.apply(super().forward(x))


def half_frozen():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    return module


REFUSED = {
    "has momentum=None": lambda: nn.BatchNorm1d(3, momentum=None),
    "is InstanceNorm1d with track_running_stats=True": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True)
    ),
    r"parameter '0\.weight' of model=Sequential has requires_grad=False": half_frozen,
    "buffer 'seen' of model=Counting is changed in training": Counting,
    "in training and .* in evaluation": lambda: TwoAnswers(3, 3),
    "draws random numbers outside of torchax": lambda: Outside(3, 3),
    "calls Sign, a torch.autograd.Function": lambda: StraightThrough(3, 3),
    "torchax cannot run Linear on these inputs": lambda: nn.Linear(4, 3),
    "is a class of PyTorch; give an object": lambda: TwoAnswers,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_train_otherwise_is_refused_by_name(said):
    with pytest.raises(UserError, match=said):
        own_model(REFUSED[said](), np.ones((1, 3), np.float32))
    x = torch.ones(2, requires_grad=True)
    Sign.apply(x).sum().backward()
    assert x.grad.tolist() == [1, 1], "elsewhere PyTorch is as it was"


def test_norms_of_one_number_are_refused():
    model = own_model(nn.BatchNorm1d(3), np.ones((1, 3), np.float32))
    with pytest.raises(UserError, match="one number per channel in a step"):
        model.apply_train(*model.init(KEY), jnp.ones((1, 3)), key=KEY)


class Flat(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 3)

    def forward(self, x):
        return torch.flatten(
            nn.functional.adaptive_avg_pool2d(super().forward(x), 1), 1
        )


def test_programs_take_batches_of_any_size():
    """Where torchax reads an open size as 1, programs are mapped over examples."""
    model = own_model(seeded(Flat), images()[:1])

    def apply(trees, x):
        return model.apply(*trees, x)

    trees = model.init(KEY)
    program = make_program(apply, trees, [images(4)], platforms=["cpu"])
    found = load_program(program.content, None).call(flat_arrays(trees), images(7))
    np.testing.assert_allclose(found, apply(trees, images(7)), atol=1e-5)
