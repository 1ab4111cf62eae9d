"""What one exchange of every method sends between hosts, against dense float32.

By formula for every number of hosts, and from the traced program for the largest, which
must agree; nothing is compiled or run. Prints a table for the README.

    python -m tests.benchmarks.traffic_table             # ResNet-18, CIFAR shapes
    python -m tests.benchmarks.traffic_table --model=resnet50 --image-size=224
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import dense_size, list_collectives, wire_bytes
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, enter, leave, specs_of, vary
from prunex_jax.methods import Method, MethodConfig, Recipe, make_method, method_config
from prunex_jax.methods.dgc import DgcConfig
from prunex_jax.methods.importance import ImportanceConfig
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.pactrain import PactrainConfig
from prunex_jax.methods.powersgd import PowersgdConfig
from prunex_jax.methods.topk import TopkConfig
from tests.benchmarks.compression import TOTAL_STEPS, make_recipe

HOSTS = (2, 4, 8)
DEVICES_PER_HOST = 2

ROWS: Mapping[str, MethodConfig] = {
    "`dense`": method_config("dense"),
    "`dense`, bfloat16": method_config("dense", wire_dtype="bfloat16"),
    "`dense`, int8": method_config("dense", wire_dtype="int8"),
    "`hsadmm`, half of the channels": method_config("hsadmm"),
    "`hsadmm`, half of the channels, int8": method_config("hsadmm", wire_dtype="int8"),
    "`pactrain`, half of the channels": method_config("pactrain"),
    "`pactrain`, half of the channels, int8": method_config(
        "pactrain", wire_dtype="int8"
    ),
    "`pactrain`, 20 % of the weights": method_config(
        "pactrain", pactrain=PactrainConfig(structure="weights", density=0.2)
    ),
    "`pactrain`, 20 % of the weights, ternary": method_config(
        "pactrain",
        pactrain=PactrainConfig(structure="weights", density=0.2, is_ternary=True),
    ),
    "`topk`, 1 %": method_config("topk", topk=TopkConfig(density=0.01)),
    "`dgc`, 0.1 %": method_config("dgc", dgc=DgcConfig(density=0.001)),
    "`powersgd`, rank 2": method_config("powersgd", powersgd=PowersgdConfig(rank=2)),
    "`powersgd`, rank 4": method_config("powersgd", powersgd=PowersgdConfig(rank=4)),
    "`importance`, 1 %, one choice in 4 steps": method_config(
        "importance", importance=ImportanceConfig(density=0.01, refresh_period=4)
    ),
    "`importance`, 1 %, bfloat16": method_config(
        "importance", importance=ImportanceConfig(density=0.01), wire_dtype="bfloat16"
    ),
    "`local_sgd`, `diloco`": method_config("local_sgd", local_sgd=LocalSgdConfig()),
    "`none`": method_config("none"),
}


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
    write(f"| method | {' | '.join(f'{n} hosts' for n in HOSTS)} |")
    write(f"| --- |{' --- |' * len(HOSTS)}")
    for label, config in ROWS.items():
        method = make_method(dataclasses.replace(recipe, config=config))
        ratios = [ratio_of(method, recipe, hosts) for hosts in HOSTS]
        write(f"| {label} | {' | '.join(f'{ratio:.4f}' for ratio in ratios)} |")


def ratio_of(method: Method, recipe: Recipe, num_hosts: int) -> float:
    """Bytes that a host sends in an exchange, of those of dense float32.

    Steps of several kinds, such as those with and without a choice of positions, count
    as their mean over the second half of a run, when warm-ups are over.
    """
    mesh_shape = {HOST_AXIS: num_hosts, DEVICE_AXIS: DEVICES_PER_HOST}
    size = dense_size(recipe.shapes)
    dense = wire_bytes(mesh_sum(size, mesh_shape), mesh_shape)[HOST_AXIS]
    if method.exchange is not None:
        counts = keep_counts(method, recipe)
        formula = method.exchange_formula(mesh_shape, counts, "frozen")
        sent = wire_bytes(formula, mesh_shape)[HOST_AXIS]
        if num_hosts == HOSTS[-1]:
            assert sent == traced_bytes(method, recipe, mesh_shape, {})
        return sent / dense
    steps = range(TOTAL_STEPS // 2, TOTAL_STEPS)
    kinds = [tuple(sorted(method.step_options(step).items())) for step in steps]
    total = 0.0
    for kind in sorted(set(kinds)):
        formula = method.step_formula(mesh_shape, **dict(kind))
        sent = wire_bytes(formula, mesh_shape)[HOST_AXIS]
        if num_hosts == HOSTS[-1]:
            assert sent == traced_bytes(method, recipe, mesh_shape, dict(kind))
        total += kinds.count(kind) * sent
    return total / len(kinds) / dense


def keep_counts(method: Method, recipe: Recipe) -> dict[str, int]:
    """Kept channels at the end, or all of them if the method prunes none."""
    if method.prunes:
        return dict(recipe.keep_counts)
    return {group.name: group.size for group in recipe.groups}


def traced_bytes(
    method: Method, recipe: Recipe, mesh_shape: Mapping[str, int], options: PyTree
) -> float:
    """What the program sends that would run, from its trace on a mesh of no devices."""
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    mesh = jax.sharding.AbstractMesh(sizes, names)
    placements = (method.params_placement, method.opt_placement)
    specs = specs_of(placements)

    def init(params: PyTree) -> PyTree:
        state = leave(placements, (params, method.transform.init(params)))
        axes = {"replicated": (), "per_host": names[:1], "per_device": names}
        return jax.tree.map(lambda p, x: vary(x, axes[p]), placements, state)

    def step(state: PyTree) -> PyTree:
        params, opt_state = enter(placements, state)
        grads = vary(jax.tree.map(jnp.ones_like, params), names)
        updates, opt_state = method.transform.update(
            grads, opt_state, params, **options
        )
        return leave(placements, (optax.apply_updates(params, updates), opt_state))

    def exchange(state: PyTree) -> PyTree:
        assert method.exchange is not None
        counts = keep_counts(method, recipe)
        after = method.exchange(*enter(placements, state), counts, "frozen")
        return leave(placements, after)

    shapes = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in recipe.shapes.items()
    }
    born = jax.shard_map(init, mesh=mesh, in_specs=(jax.P(),), out_specs=specs)
    run = jax.shard_map(
        step if method.exchange is None else exchange,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
    )
    traced = jax.make_jaxpr(run)(jax.eval_shape(born, shapes))
    return wire_bytes(list_collectives(traced), mesh_shape)[HOST_AXIS]


def write(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
