"""What every method computes per exchange, and what choosing entries costs.

Trees have the size of ResNet-18. Communication is removed: each collective is replaced
by what it would return if all hosts had sent the same, so that a method does all the
work of a run on several hosts, and nothing travels. The inner optimizer is left out, so
`dense` is what fusing and averaging cost. Methods with rounds are timed in a round, the
others in a step. Prints two tables: methods, with their share of the training steps to
the next exchange, and ways to choose the largest entries, of which
`sparsity.selection` takes the fastest.

    make benchmark-compression
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from benchmarks.shrunk_step import make_step
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.comm import FORMATS, dense_size
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS
from prunex_jax.methods import (
    METHODS,
    MethodConfig,
    Recipe,
    all_variants,
    config_of,
    make_method,
    method_config,
)
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import trace_model
from prunex_jax.sparsity import (
    CountLimits,
    entry_count,
    selection,
    uniform_keep_counts,
)

IMAGE_SHAPE = (32, 32, 3)
NUM_CLASSES = 10
DENSITY = 0.5
TOTAL_STEPS = 1000
WARM_UP = 2
STEPS = 5  # Training steps that are timed.
SELECTED = (0.001, 0.01)
# Variants that are timed beside the methods: few bits, and the largest of chunks.
VARIANTS = (
    *("dense-int2", "local-sgd-8-int8", "local-sgd-8-int2", "local-sgd-4-top64"),
    *("local-sgd-8-top64-owners", "hsadmm-4-top64", "topk-chunks", "dgc-chunks"),
)

Call = Callable[[], object]


def main() -> None:
    """Times what was asked for and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--wire-dtype", default="float32", choices=FORMATS)
    parser.add_argument("--batch-size", type=int, default=128, help="0: time no step")
    parser.add_argument("--only", nargs="*", help="methods, variants, selection")
    arguments = parser.parse_args()
    names = arguments.only or [*METHODS, *VARIANTS, "selection"]
    recipe = make_recipe(arguments.model, arguments.wire_dtype)
    size = dense_size(recipe.shapes)
    kind = jax.devices()[0].device_kind
    write(f"{size / 1e6:.1f} M entries, {arguments.hosts} hosts, {kind}")
    step = step_milliseconds(arguments.model, arguments.batch_size)
    write(f"a training step of {arguments.batch_size} images: {step:.0f} ms, n={STEPS}")
    write(f"{'':32} {'median':>9} {'quartiles':>19}    n {'of its period':>14}")
    with no_communication(arguments.hosts):
        for name in METHODS:
            if name in names:
                config = dataclasses.replace(recipe.config, name=name)
                call, steps = method_call(recipe, config)
                report(name, call, arguments.repeats, steps * step)
        for variant in all_variants():
            if variant.name in set(names) - set(METHODS):
                call, steps = method_call(recipe, config_of(variant))
                report(variant.name, call, arguments.repeats, steps * step)
    if "selection" in names:
        for label, call in selections(size):
            report(label, call, arguments.repeats)


def write(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def step_milliseconds(model_name: str, batch_size: int) -> float:
    """Median of a training step of the network on one device; 0 for no images."""
    if not batch_size:
        return 0.0
    model = make_model(ModelConfig(name=model_name), IMAGE_SHAPE, NUM_CLASSES)
    step = make_step(model, *jax.jit(model.init)(jax.random.key(0)), batch_size)
    step()
    return statistics.median(_milliseconds(step) for _ in range(STEPS))


def report(label: str, call: Call, repeats: int, period: float = 0.0) -> None:
    """Times a call and prints its row; `period` is that of its steps in ms."""
    for _ in range(WARM_UP):
        call()
    times = [_milliseconds(call) for _ in range(repeats)]
    low, median, high = statistics.quantiles(times, n=4)
    spread = f"{low:.1f} to {high:.1f}"
    share = f"{100 * median / period:.2f} %" if period else ""
    write(f"{label:32} {median:6.1f} ms {spread:>16} ms {repeats:4} {share:>14}")


def _milliseconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def make_recipe(
    model_name: str,
    wire_dtype: str = "float32",
    image_shape: tuple[int, int, int] = IMAGE_SHAPE,
    num_classes: int = NUM_CLASSES,
) -> Recipe:
    """The recipe that the trainer would make, without an inner optimizer."""
    model = make_model(ModelConfig(name=model_name), image_shape, num_classes)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    trace = trace_model(model)
    sizes = {group.name: group.size for group in trace.groups}
    return Recipe(
        config=method_config(wire_dtype=wire_dtype),  # type: ignore[arg-type]
        inner=optax.identity(),
        learning_rate=optax.constant_schedule(0.1),
        groups=trace.groups,
        keep_counts=uniform_keep_counts(CountLimits(sizes), DENSITY),
        shapes=shapes_by_path(params),
        total_steps=TOTAL_STEPS,
    )


def method_call(recipe: Recipe, config: MethodConfig) -> tuple[Call, int]:
    """One exchange of a method in its steady state, until it is done.

    Returns:
      It, and the steps from one to the next.
    """
    method = make_method(dataclasses.replace(recipe, config=config))
    params = draw(recipe.shapes, 0)
    state = jax.jit(method.transform.init)(params)
    full = {group.name: group.size for group in recipe.groups}
    counts = recipe.keep_counts if method.pruning.in_rounds else full
    rounds = method.rounds
    if rounds is None:
        grads = draw(recipe.shapes, 1)
        options = method.step_options.at(TOTAL_STEPS - 1)

        def one(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return method.transform.update(grads, state, params, **options)

    else:

        def one(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return rounds.exchange(params, state, counts, "frozen")

    # The state is handed over, as the trainer does.
    run = jax.jit(one, donate_argnums=1)

    def call() -> None:
        nonlocal state
        result, state = run(params, state)
        jax.block_until_ready((result, state))

    return call, 1 if method.sync is None else method.sync.period


def draw(shapes: PyTree, seed: int) -> PyTree:
    """Numbers whose magnitudes differ as much as those of gradients."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        path: jax.random.normal(key, shape) ** 3
        for key, (path, shape) in zip(keys, shapes.items(), strict=True)
    }


def selections(size: int) -> Iterator[tuple[str, Call]]:
    """Ways to choose the largest entries: those that are taken, and others."""
    buffer = jax.random.normal(jax.random.key(2), (size,)) ** 3
    ways = {
        "lax.top_k": lambda x, k: jax.lax.top_k(jnp.abs(x), k)[1],
        "lax.approx_max_k": lambda x, k: jax.lax.approx_max_k(jnp.abs(x), k)[1],
        "threshold of a sample": by_sample,
        "by_threshold": selection.by_threshold,
        "by_blocks": selection.by_blocks,
    }
    for density in SELECTED:
        for name, way in ways.items():
            yield f"{density:.1%} {name}", _selection_call(way, buffer, density)


def _selection_call(
    way: Callable[[jax.Array, int], jax.Array], buffer: jax.Array, density: float
) -> Call:
    run = jax.jit(way, static_argnums=1)
    count = entry_count(density, buffer.size)
    return lambda: jax.block_until_ready(run(buffer, count))


def by_sample(buffer: jax.Array, count: int) -> jax.Array:
    """What DGC does: a threshold from one in a hundred entries, then all above it."""
    magnitudes = jnp.abs(buffer)
    sample = magnitudes[::100]
    rank = max(1, round(count * sample.size / buffer.size))
    threshold = jax.lax.top_k(sample, rank)[0][-1]
    return jnp.nonzero(magnitudes >= threshold, size=count, fill_value=buffer.size)[0]


@contextmanager
def no_communication(num_hosts: int) -> Iterator[None]:
    """Lets programs be traced as on several hosts that all have the same numbers."""
    sizes = {HOST_AXIS: num_hosts, DEVICE_AXIS: 1}

    def size_of(axis: str | Sequence[str]) -> int:
        names = (axis,) if isinstance(axis, str) else axis
        return math.prod([sizes[name] for name in names])

    fakes = {
        "axis_size": size_of,
        "axis_index": lambda axis: jnp.int32(0),
        "psum": lambda x, axis: x * size_of(axis),
        "psum_scatter": lambda x, name, *, scatter_dimension, tiled: (
            jnp.split(x, size_of(name), scatter_dimension)[0] * size_of(name)
        ),
        "all_gather": lambda x, name, *, axis, tiled, to=None: jnp.concatenate(
            [x] * size_of(name), axis
        ),
        "all_to_all": lambda x, axis, *_, tiled: x,
        "ppermute": lambda x, axis, ring: x,
    }
    with mock.patch.multiple(jax.lax, **fakes):
        yield


if __name__ == "__main__":
    main()
