"""What half of the channels saves: one training step of ResNet-18, small against dense.

Both are steps of the trainer's kind (loss, gradients, SGD with momentum) on 32x32
images and one device; the small network is the dense one with every channel group cut
to half. The two are timed in turn, so that a machine whose speed drifts slows both.
Prints one line.

    make benchmark-shrunk-step
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import PyTree
from prunex_jax.models import Model, make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import Network, make_cut, trace_model
from prunex_jax.shrink.cost import count_params
from prunex_jax.train.build.optimizer import make_inner

IMAGE_SHAPE = (32, 32, 3)
NUM_CLASSES = 10
WARM_UP = 2
# The acceptance of the project: a step at half the channels against the dense one.
LARGEST_RATIO = 0.45

Step = Callable[[], None]


def main() -> None:
    """Times both steps and prints the ratio, pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    model = make_model(ModelConfig(name=arguments.model), IMAGE_SHAPE, NUM_CLASSES)
    params, statistics_ = jax.jit(model.init)(jax.random.key(0))
    small = halved(model, params, statistics_)
    dense_step = make_step(model, params, statistics_, arguments.batch_size)
    small_step = make_step(*small, arguments.batch_size)
    for _ in range(WARM_UP):
        dense_step()
        small_step()
    pairs = [
        (_seconds(dense_step), _seconds(small_step)) for _ in range(arguments.pairs)
    ]
    ratios = [small_time / dense_time for dense_time, small_time in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    dense_ms, small_ms = (
        1000 * statistics.median(times) for times in zip(*pairs, strict=True)
    )
    share = count_params(small[1]) / count_params(params)
    verdict = "reached" if median <= LARGEST_RATIO else "missed"
    sys.stdout.write(
        f"{arguments.model}, batch {arguments.batch_size}, half of the channels "
        f"({share:.3f} of the parameters) / dense step: median {median:.3f}, quartiles "
        f"{low:.3f} to {high:.3f}, n={len(pairs)} pairs; {small_ms:.0f} ms / "
        f"{dense_ms:.0f} ms on {jax.devices()[0].device_kind}, jax {jax.__version__}; "
        f"at most {LARGEST_RATIO} wanted: {verdict}\n"
    )


def halved(
    model: Model, params: PyTree, statistics_: PyTree
) -> tuple[Model, PyTree, PyTree]:
    """The network with the first half of the channels of every group."""
    trace = trace_model(model)
    masks = {g.name: np.arange(g.size) < g.size // 2 for g in trace.groups}
    cut = make_cut(trace, masks, params, statistics_)
    small = Network(model, params, statistics_).shrunk(cut)
    return small.model, small.params, small.statistics


def make_step(
    model: Model, params: PyTree, statistics_: PyTree, batch_size: int
) -> Step:
    """One compiled training step that is called until it is done."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(batch_size, *IMAGE_SHAPE)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, NUM_CLASSES, batch_size))
    optimizer = make_inner(OptimizerConfig(), optax.constant_schedule(0.01))

    def loss_of(
        params: PyTree, statistics_: PyTree, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        logits, after = model.apply_train(params, statistics_, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), after

    def update(state: tuple[PyTree, ...], *batch: jax.Array) -> tuple[PyTree, ...]:
        params, statistics_, opt_state = state
        gradient = jax.grad(loss_of, has_aux=True)
        grads, statistics_ = gradient(params, statistics_, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics_, opt_state

    compiled = jax.jit(update, donate_argnums=0)
    # Copies, because steps donate what they are given.
    state = jax.tree.map(
        jnp.array, (params, statistics_, jax.jit(optimizer.init)(params))
    )

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(state, images, labels))

    return step


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
