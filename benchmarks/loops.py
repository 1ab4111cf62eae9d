"""What loops around convolutions cost: a gradient of ResNet-20 in parts, in two forms.

The gradient of 64 images of 32x32 at once, in 4 parts that are written out, as the
trainer does on CPU, and in 4 turns of a loop, as it does elsewhere; in turn, on one
device. Prints one line each, with the temporary memory of the program.

    make benchmark-loops
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

from benchmarks.pairs import describe_pairs
from prunex_jax.base.timing import time_in_turn
from prunex_jax.base.trees import PyTree
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.train.steps.local_step import accumulated_grads

IMAGES, SHAPE, PARTS, NUM_CALLS = 64, (32, 32, 3), 4, 15
FORMS = {
    "whole": {"num_parts": 1},
    "written out": {"num_parts": PARTS, "unroll": True},
    "in a loop": {"num_parts": PARTS},
}


def main() -> None:
    """Times the three forms in turn."""
    model = make_model(ModelConfig(name="resnet20"), SHAPE, 10)
    params, statistics = jax.jit(model.init)(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (IMAGES, *SHAPE))
    batch = {"image": images, "label": jnp.arange(IMAGES) % 10}

    def loss(
        params: PyTree, statistics: PyTree, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, tuple[PyTree, jax.Array]]:
        logits, after = model.apply_train(params, statistics, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (after, jnp.sum(losses))

    inputs = (params, statistics, batch)
    programs = {
        name: jax.jit(accumulated_grads(jax.value_and_grad(loss, has_aux=True), **form))
        .lower(*inputs)
        .compile()
        for name, form in FORMS.items()
    }
    calls = {name: functools.partial(each, *inputs) for name, each in programs.items()}
    timings = time_in_turn(calls, NUM_CALLS)
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        sys.stdout.write(
            f"{name} / whole: {describe_pairs(timings[name], timings['whole'])}; "
            f"{memory:.0f} MiB\n"
        )


if __name__ == "__main__":
    main()
