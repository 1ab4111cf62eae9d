"""Small networks as people write them, and a problem that they can learn."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

FEATURES, CLASSES, HIDDEN = 12, 3, 16


def problem(size=400, seed=0):
    """Points around one centre per class: (x float32[size, 12], labels int32[size])."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(CLASSES, FEATURES))
    labels = rng.integers(CLASSES, size=size)
    points = centres[labels] + 0.5 * rng.normal(size=(size, FEATURES))
    return points.astype(np.float32), labels.astype(np.int32)


class NnxNet(nnx.Module):
    """Batch statistics, dropout, and a list of layers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.rest = nnx.List(
            [nnx.Linear(HIDDEN, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 3, rngs=rngs)]
        )

    def __call__(self, x):
        x = self.dropout(jax.nn.relu(self.norm(self.first(x))))
        return self.rest[1](jnp.tanh(self.rest[0](x)))


class DigitsNet(nnx.Module):
    """A network that flattens images of 8 x 8."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 10, rngs=rngs)

    def __call__(self, images):
        x = images.reshape(images.shape[0], -1)
        return self.out(jax.nn.relu(self.hidden(x)))


class LinenNet(linen.Module):
    """The same with Linen, told whether it trains."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(HIDDEN)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.2, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(CLASSES)(x)


def init(key):
    """Parameters of `apply`."""
    keys = jax.random.split(key)
    return [
        {"kernel": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / 3},
        {"kernel": jax.random.normal(keys[1], (HIDDEN, CLASSES)) / 4},
    ]


def apply(params, x):
    """A network of two functions."""
    return jnp.tanh(x @ params[0]["kernel"]) @ params[1]["kernel"]


def equinox_net():
    """A network of Equinox, which takes one example, and a key for dropout.

    Raises:
      ImportError: It is not installed.
    """
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        second: eqx.nn.Linear

        def __call__(self, x, key=None):
            x = self.dropout(jax.nn.relu(self.first(x)), key=key)
            return self.second(x)

    keys = jax.random.split(jax.random.key(0))
    return Net(
        eqx.nn.Linear(FEATURES, HIDDEN, key=keys[0]),
        eqx.nn.Dropout(0.2),
        eqx.nn.Linear(HIDDEN, CLASSES, key=keys[1]),
    )
