"""Bytes per device that training takes on H100s, as their compiler has planned them.

Compiled for two hosts, none of which has to be here: `make benchmark-memory` installs
the compiler. Every row is written down when it is compiled, and not compiled again.
Prints the figures of docs/results/memory.md.

    python -m benchmarks memory_table --workdir=runs/memory
    python -m benchmarks memory_table --workdir=runs/memory \\
        --networks=gpt-125m --methods=hsadmm --devices=8 --shards=none,params
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.compression import write
from prunex_jax.base.errors import UserError
from prunex_jax.mesh import described_topology
from prunex_jax.models import as_on_gpus
from prunex_jax.train.build.config import (
    ExperimentConfig,
    default_config,
    resolve_config,
)
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.commands.dry_run import bytes_per_device, find_needs

NUM_HOSTS = 2
# Of an H100, as `--dry_run` describes it.
GPU_BYTES = 84_942_979_072
DEVICES = (1, 4, 8)
SHARDS = ("none", "state", "params")
RECORDS = "records.jsonl"


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, and what a device trains on in a step."""

    title: str
    settings: Mapping[str, Any]  # Dotted key -> value.
    examples: int = 1  # Of a device in a step.


def _gpt(layers: int, width: int, heads: int, hidden: int, **more: Any) -> dict:
    form = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_heads": heads,
        "head_width": width // heads,
        "hidden": hidden,
        **more,
    }
    settings = {f"model.gpt.{name}": value for name, value in form.items()}
    return settings | {"model.name": "gpt", "optimizer.name": "adamw"}


def _images(name: str) -> dict:
    return {
        "model.name": name,
        "data.name": "synthetic",
        "data.image_size": 224,
        "data.synthetic_classes": 1000,
        # No more than a batch of the largest row, and its validation data.
        "data.synthetic_examples": 1200,
        "data.normalization": "half",
        "data.augment": "none",
    }


def _text(length: int, vocabulary: int) -> dict:
    return {
        "data.name": "tokens",
        "data.token_dtype": "uint16",
        "data.sequence_length": length,
        "data.vocabulary": vocabulary,
    }


NETWORKS = {
    "gpt-125m": Network(
        "GPT, one sequence of 1,024 tokens per device",
        _gpt(12, 768, 12, 2048, head="tied") | _text(1024, 50_304),
    ),
    "gpt-1.3b": Network(
        "GPT, one sequence of 2,048 tokens per device, blocks computed again",
        _gpt(24, 2048, 16, 5504, head="tied")
        | _text(2048, 50_304)
        | {"model.recompute": "blocks"},
    ),
    "gpt-7b": Network(
        "GPT, one sequence of 2,048 tokens per device, blocks computed again",
        _gpt(32, 4096, 32, 11_008)
        | _text(2048, 32_000)
        | {"model.recompute": "blocks"},
    ),
    "resnet50": Network(
        "ResNet-50, 64 images of 224 x 224 per device",
        _images("resnet50") | {"model.stem": "imagenet"},
        64,
    ),
    "vit-b": Network(
        "ViT-B, 64 images of 224 x 224 per device",
        _images("vit_b") | {"optimizer.name": "adamw"},
        64,
    ),
}
_HSADMM = {"method.name": "hsadmm", "sparsity.sparsity": 0.5}
_INT8 = _HSADMM | {"method.wire_dtype": "int8"}
METHODS = {
    "dense": ("dense", {"method.name": "dense"}),
    "diloco": ("DiLoCo", {"method.name": "diloco"}),
    "hsadmm": ("H-SADMM, int8", _INT8),
    "hsadmm-bfloat16": (
        "H-SADMM, int8, parameters in bfloat16",
        _INT8 | {"model.param_dtype": "bfloat16"},
    ),
    "hsadmm-top-k": (
        "H-SADMM, 64 of 4,096 numbers, int2",
        _HSADMM | {"method.wire_dtype": "int2", "method.rounds.top_k": 64},
    ),
    "hsadmm-paper": (
        "H-SADMM, form of the paper",
        _HSADMM | {"method.hsadmm.preset": "paper"},
    ),
    "powersgd": ("PowerSGD, rank 2", {"method.name": "powersgd"}),
}


def config_of(
    network: Network, method: str, devices: int, shard: str, tokens: Path
) -> ExperimentConfig:
    """Settings of a row of the table."""
    config = default_config()
    changes = {
        "data.batch_size": network.examples * devices * NUM_HOSTS,
        "model.compute_dtype": "bfloat16",
        "run.steps": 1000,
        "topology.shard": shard,
        **network.settings,
        **METHODS[method][1],
    }
    if changes["data.name"] == "tokens":
        changes["data.dir"] = str(tokens)
    config.update_from_flattened_dict(changes)
    resolved = resolve_config(config)
    return dataclasses.replace(resolved, model=as_on_gpus(resolved.model))


def compile_row(
    network: str, method: str, devices: int, shard: str, tokens: Path
) -> dict[str, Any]:
    """Bytes per device of a row, or why it is refused.

    Programs are not compiled for a state that does not fit on a GPU.
    """
    row = {"network": network, "method": method, "devices": devices, "shard": shard}
    started = time.monotonic()
    try:
        config = config_of(NETWORKS[network], method, devices, shard, tokens)
        topology = described_topology(f"h100:{NUM_HOSTS}x{devices}")
        experiment = make_experiment(config, topology)
    except UserError as error:
        if shard == "none":
            raise
        return row | {"refused": str(error)}
    row["num_params"] = experiment.num_params
    row["state"] = bytes_per_device(experiment.current.programs.abstract_state())
    if row["state"] <= GPU_BYTES:
        needs = find_needs(experiment)
        row |= {each.program: each.total for each in needs.memory}
    return row | {"seconds": round(time.monotonic() - started)}


def read_rows(records: Path) -> list[dict[str, Any]]:
    """What was compiled before."""
    if not records.exists():
        return []
    return [json.loads(line) for line in records.read_text().splitlines()]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which row of the table it is."""
    return tuple(row[name] for name in ("network", "method", "devices", "shard"))


def cases_of(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, str]]:
    """The rows that are asked for; one device has nothing to share."""
    for network, devices, method, shard in itertools.product(
        arguments.networks, arguments.devices, arguments.methods, arguments.shards
    ):
        if devices > 1 or shard == SHARDS[0]:
            yield network, method, devices, shard


def table(rows: Sequence[Mapping[str, Any]], network: str) -> Iterator[str]:
    """Lines of the table of a network: per number of devices, state, step, exchange."""
    found = {key_of(row): row for row in rows if row["network"] == network}
    sizes = sorted({row["devices"] for row in found.values()})
    some = next(row for row in found.values() if "num_params" in row)
    yield f"{NETWORKS[network].title}; {some['num_params']:,} parameters"
    yield ""
    heads = [f"{n} device{'s' if n > 1 else ''} per host" for n in sizes]
    yield f"| method | slices of | {' | '.join(heads)} |"
    yield f"| --- | --- |{' --- |' * len(sizes)}"
    for method, shard in itertools.product(METHODS, SHARDS):
        cells = [found.get((network, method, size, shard)) for size in sizes]
        if any(cells):
            shown = " | ".join(_cell(cell) for cell in cells)
            yield f"| {METHODS[method][0]} | {shard} | {shown} |"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return "refused"
    programs = ("local_step", "exchange")
    sizes = [row["state"], *(row[name] for name in programs if name in row)]
    return " / ".join(f"{size / 1e9:.2f}" for size in sizes)


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {known}")
        return chosen

    return parse


def main() -> None:
    """Compiles what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True)
    for name, known in (
        ("networks", tuple(NETWORKS)),
        ("methods", tuple(METHODS)),
        ("shards", SHARDS),
    ):
        parser.add_argument(f"--{name}", type=_names(known), default=list(known))
    parser.add_argument(
        "--devices",
        type=lambda text: [int(size) for size in text.split(",")],
        default=list(DEVICES),
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    # What networks of language read: their shapes are all that counts.
    tokens = arguments.workdir / "tokens.npy"
    np.save(tokens, np.arange(200_000).astype(np.uint16) % 32_000)
    records = arguments.workdir / RECORDS
    rows = read_rows(records)
    known = {key_of(row) for row in rows}
    for case in cases_of(arguments):
        if case in known:
            continue
        rows.append(compile_row(*case, tokens))
        with records.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        write(json.dumps(rows[-1]))
        jax.clear_caches()
    for network in arguments.networks:
        if any(row["network"] == network and "state" in row for row in rows):
            write("\n" + "\n".join(table(rows, network)))


if __name__ == "__main__":
    main()
