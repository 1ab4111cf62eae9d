"""What one exchange of every method sends between hosts, against dense float32.

By formula for every number of hosts, and from the traced program for the largest, which
must agree; nothing is compiled or run. Prints the table of docs/results/computation.md.

    python -m benchmarks traffic_table             # ResNet-18, CIFAR shapes
    python -m benchmarks traffic_table --model=resnet50 --image-size=224
"""

import argparse
import dataclasses

from benchmarks.compression import TOTAL_STEPS, make_recipe, write
from prunex_jax.base.errors import UserError
from prunex_jax.comm import dense_size, wire_bytes
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS
from prunex_jax.methods import (
    Method,
    MethodConfig,
    Recipe,
    Variant,
    all_variants,
    config_of,
    make_method,
)
from prunex_jax.methods.traffic import (
    dense_bytes,
    exchange_collectives,
    step_collectives,
)

HOSTS = (2, 4, 8, 64, 1024)
DEVICES_PER_HOST = 8


# Beside the variants of the table of methods.
_MORE = (
    Variant(
        "importance-bfloat16",
        "importance, 1 %, bfloat16",
        {"method.name": "importance", "method.wire_dtype": "bfloat16"},
    ),
    Variant(
        "powersgd-4",
        "PowerSGD, rank 4",
        {"method.name": "powersgd", "method.powersgd.rank": 4},
    ),
    Variant(
        "pactrain-int8",
        "PacTrain, half of the channels, int8",
        {"method.name": "pactrain", "method.wire_dtype": "int8"},
    ),
    Variant(
        "pactrain-weights",
        "PacTrain, 20 % of the weights",
        {
            "method.name": "pactrain",
            "method.pactrain.structure": "weights",
            "method.pactrain.density": 0.2,
        },
    ),
)


def rows() -> dict[str, MethodConfig]:
    """Title -> settings of every variant in the table of methods, and of some more."""
    return {each.title: config_of(each) for each in (*all_variants(), *_MORE)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10)
    arguments = parser.parse_args()
    image_shape = (arguments.image_size, arguments.image_size, 3)
    recipe = make_recipe(
        arguments.model, image_shape=image_shape, num_classes=arguments.classes
    )
    write(f"| method | {' | '.join(f'{n:,} hosts' for n in HOSTS)} |")
    write(f"| --- |{' --- |' * len(HOSTS)}")
    for label, config in rows().items():
        method = make_method(dataclasses.replace(recipe, config=config))
        cells = [_cell(method, recipe, hosts) for hosts in HOSTS]
        write(f"| {label} | {' | '.join(cells)} |")


def _cell(method: Method, recipe: Recipe, num_hosts: int) -> str:
    try:
        return f"{ratio_of(method, recipe, num_hosts):.4f}"
    except UserError:  # A method that takes fewer hosts.
        return "refused"


def ratio_of(method: Method, recipe: Recipe, num_hosts: int) -> float:
    """Bytes that a host sends in an exchange, of those of dense float32.

    Steps of several kinds, such as those with and without a choice of positions, count
    as their mean over the second half of a run, when warm-ups are over.
    """
    mesh_shape = {HOST_AXIS: num_hosts, DEVICE_AXIS: DEVICES_PER_HOST}
    dense = dense_bytes(dense_size(recipe.shapes), mesh_shape)[HOST_AXIS]
    if method.rounds is not None:
        counts = keep_counts(method, recipe)
        listed = exchange_collectives(method, recipe.shapes, mesh_shape, counts)
        return wire_bytes(listed, mesh_shape)[HOST_AXIS] / dense
    steps = range(TOTAL_STEPS // 2, TOTAL_STEPS)
    kinds = [tuple(sorted(method.step_options.at(step).items())) for step in steps]
    total = 0.0
    for kind in sorted(set(kinds)):
        listed = step_collectives(method, recipe.shapes, mesh_shape, **dict(kind))
        total += kinds.count(kind) * wire_bytes(listed, mesh_shape)[HOST_AXIS]
    return total / len(kinds) / dense


def keep_counts(method: Method, recipe: Recipe) -> dict[str, int]:
    """Kept channels at the end, or all of them if the method prunes none."""
    if method.pruning.in_rounds:
        return dict(recipe.keep_counts)
    return {group.name: group.size for group in recipe.groups}


if __name__ == "__main__":
    main()
