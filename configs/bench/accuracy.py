"""Time to an accuracy on CIFAR-10 over 4 hosts, on links too slow for dense averaging.

What counts is when a row passes a validation accuracy, so each has the length and
the learning rate that suit it, chosen on validation data: twice as many steps where
hosts step by themselves, half of the rate where gradients are compressed.

    python -m prunex_jax bench --study=configs/bench/accuracy.py --workdir=runs/accuracy

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

import dataclasses

from methods import entry_rows, torch_rows
from network import NETWORK

from prunex_jax.bench.study import LinkStudy, Row

DATA = {
    "data.augment": "none",
    "data.validation_share": 0.05,
    "data.eval_batch_size": 500,
}
TRAINING = {
    "data.batch_size": 256,
    "optimizer.learning_rate": 0.1,
    "optimizer.warmup_share": 0.1,
    "run.epochs": 0.0,
    "run.steps": 120,
    "run.eval_every_steps": 10,
    "run.log_every_steps": 20,
    "run.checkpoint_every_steps": 0,
}
# Local steps see a quarter of a batch each: more of them are needed.
LONGER = {"run.steps": 240}
# What an exchange leaves out comes later, all at once: large steps diverge.
COMPRESSED = {"optimizer.learning_rate": 0.05}
EVERY_8 = {"method.hsadmm.sync_period": 8, "method.wire_dtype": "int8"}
HALF = {"sparsity.sparsity": 0.5, "sparsity.num_stairs": 1}
# The first rounds prune and freeze, and the small network trains nearly all the time.
EARLY = {"sparsity.start_share": 0.01, "sparsity.freeze_share": 0.03}


def get_study() -> LinkStudy:
    return LinkStudy(
        name="accuracy",
        config="../cifar10_resnet20_dense.py",
        settings={**NETWORK, **DATA, **TRAINING},
        rows=make_rows(),
        num_hosts=(4,),
        links=("r=20",),
        goal="accuracy",
        target_accuracies=(0.40, 0.45),
        limit_seconds=1800.0,
    )


def make_rows() -> tuple[Row, ...]:
    hsadmm = {"method.name": "hsadmm", **HALF, **EVERY_8, **EARLY, **LONGER}
    every_8 = {
        "method.local_sgd.sync_period": 8,
        "method.wire_dtype": "int8",
        **LONGER,
    }
    *torch_averaging, torch_powersgd = torch_rows()
    return (
        Row("dense", "dense", settings={"method.name": "dense"}),
        Row(
            "hsadmm-small",
            "H-SADMM, every 8 steps, int8, cut out at 4 %",
            settings={**hsadmm, "sparsity.shrink_share": 0.04},
        ),
        Row("hsadmm", "H-SADMM, every 8 steps, int8", settings=hsadmm),
        Row(
            "pactrain",
            "PacTrain, half of the channels",
            settings={"method.name": "pactrain", **HALF},
        ),
        *map(compressed, entry_rows()),
        Row(
            "local-sgd",
            "local SGD, every 8 steps, int8",
            settings={"method.name": "local_sgd", **every_8},
        ),
        Row(
            "diloco",
            "DiLoCo, every 8 steps, int8",
            settings={"method.name": "diloco", **every_8},
        ),
        Row("none", "no exchange", settings={"method.name": "none"}),
        *torch_averaging,
        compressed(torch_powersgd),
    )


def compressed(row: Row) -> Row:
    return dataclasses.replace(row, settings={**row.settings, **COMPRESSED})
