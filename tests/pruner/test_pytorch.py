"""Modules of PyTorch become smaller functions, and smaller modules where they can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax import UserError, prune, read_model

torch = pytest.importorskip("torch", reason="needs the extra pytorch")
pytest.importorskip("torchax", reason="needs the extra pytorch")
nn = torch.nn
pytestmark = pytest.mark.pytorch


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.groups = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.back = nn.ConvTranspose2d(16, 24, 2, stride=2)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.groups(self.each(x)))
        return self.out(self.back(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.embedding(x) * self.scale)))


class SizeInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)).view(-1, 16))


def trained(module, seed=0):
    """Running statistics and norms as training leaves them: each channel its own."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
                layer.weight.uniform_(0.5, 2.0)
                layer.bias.normal_()
    return module


def answers(module, x):
    with torch.no_grad():
        return module.eval()(x).numpy()


@pytest.mark.parametrize("multiple", [1, 8])
def test_convolutions_become_a_smaller_module(tmp_path, multiple):
    module, x = trained(Convolutions()), torch.randn(4, 3, 8, 8)
    small = prune(module, x, sparsity=0.5, round_to=multiple)
    assert small.certificate.is_equal
    assert small.num_params[1] < 0.5 * small.num_params[0]
    again = small.module()
    np.testing.assert_allclose(
        answers(again, x), small(jnp.asarray(x.numpy())), atol=1e-5
    )
    assert again.one.out_channels == again.norm.num_features == 8
    assert again.each.groups == 8 and module.one.out_channels == 16
    small.export(tmp_path / "small")
    exported = read_model(tmp_path / "small")(x.numpy())
    np.testing.assert_allclose(exported, answers(again, x), atol=1e-5)
    # It trains on in PyTorch, and the small function in JAX.
    again.train()(x).sum().backward()
    assert again.one.weight.grad.shape == again.one.weight.shape
    jax.grad(lambda p: small.apply(p, small.statistics, x.numpy()).sum())(small.params)


def test_what_training_made_goes_into_the_module():
    module, x = trained(Convolutions()), torch.randn(4, 3, 8, 8)
    small = prune(module, x, sparsity=0.5)
    small.params = jax.tree.map(lambda w: 1.5 * w, small.params)
    again = small.module()
    np.testing.assert_allclose(
        answers(again, x), small(x.numpy()), rtol=1e-4, atol=1e-4
    )


def test_attention_is_cut_as_a_function():
    torch.manual_seed(0)
    small = prune(Attention(), torch.randn(3, 5, 16), keep={"up*": 8})
    assert small.params["up.weight"].shape == (8, 16)
    assert small.module().up.out_features == 8
    whole = prune(Attention(), torch.randn(3, 5, 16), sparsity=0.5)
    with pytest.raises(UserError, match="attention is MultiheadAttention and loses"):
        whole.module()


def test_tied_parameters_are_one():
    torch.manual_seed(0)
    module, x = Tied(), torch.arange(8).reshape(2, 4)
    small = prune(module, x, sparsity=0.5)
    assert "head.weight" not in small.params
    again = small.module()
    assert again.head.weight is again.embedding.weight
    np.testing.assert_allclose(
        answers(again, x), small(jnp.asarray(x.numpy())), atol=1e-5
    )


def test_sizes_in_a_forward_pass_are_seen():
    torch.manual_seed(0)
    small = prune(SizeInside(), torch.randn(4, 6), sparsity=0.5)
    assert small(jnp.ones((2, 6))).shape == (2, 3)
    with pytest.raises(UserError, match="full size is left in its forward pass"):
        small.module()


def test_what_cannot_be_run_is_refused():
    class Odd(nn.Linear):
        def forward(self, x):
            if x.sum() > 0:
                return super().forward(x)
            return x

    with pytest.raises(UserError, match="torchax cannot run Odd on these inputs"):
        prune(Odd(4, 4), torch.randn(2, 4), sparsity=0.5)
    with pytest.raises(UserError, match="no inputs"):
        prune(Odd(4, 4), sparsity=0.5)
    with pytest.raises(UserError, match="no module of PyTorch"):
        apply = lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"]  # noqa: E731
        params = {"a": jnp.eye(4, 16), "b": jnp.ones((16, 2))}
        prune(apply, params, jnp.eye(4), sparsity=0.5).module()
