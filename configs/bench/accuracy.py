"""Time to an accuracy on CIFAR-10 over 4 hosts, on links too slow for dense averaging.

Every row has its own length, since what counts is when it passes a validation accuracy:
twice as many steps, and twice the learning rate, where hosts step by themselves.

    python -m prunex_jax.bench --study=configs/bench/accuracy.py --workdir=runs/accuracy

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

from collections.abc import Mapping
from typing import Any

from methods import entry_rows, torch_rows
from network import NETWORK

from prunex_jax.bench.studies import Row, Study

DATA = {
    "data.augment": "none",
    "data.validation_share": 0.05,
    "data.eval_batch_size": 500,
}
TRAINING = {
    "optimizer.learning_rate": 0.025,
    "optimizer.warmup_share": 0.1,
    "run.epochs": 0.0,
    "run.steps": 300,
    "run.eval_every_steps": 25,
    "run.log_every_steps": 50,
    "run.checkpoint_every_steps": 0,
}
# Local steps see a quarter of a batch each: more of them are needed, of larger size.
LONGER = {"run.steps": 600, "optimizer.learning_rate": 0.05}
EVERY_8 = {"method.hsadmm.sync_period": 8, "method.wire_dtype": "int8"}
HALF = {"sparsity.sparsity": 0.5, "sparsity.num_stairs": 1}
# The first rounds prune and freeze, and the small network trains nearly all the time.
EARLY = {"sparsity.start_share": 0.01, "sparsity.freeze_share": 0.03}


def get_study() -> Study:
    return Study(
        name="accuracy",
        config="../cifar10_resnet20_dense.py",
        settings={**NETWORK, **DATA, **TRAINING},
        rows=make_rows(LONGER),
        num_hosts=(4,),
        links=("r=20",),
        goal="accuracy",
        target_accuracies=(0.40, 0.45),
        limit_seconds=1800.0,
    )


def make_rows(longer: Mapping[str, Any]) -> tuple[Row, ...]:
    """All rows; those that step by themselves get these settings too."""
    hsadmm = {"method.name": "hsadmm", **HALF, **EVERY_8, **EARLY, **longer}
    every_8 = {"method.local_sgd.sync_period": 8, **longer}
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
        *entry_rows(),
        Row(
            "local-sgd",
            "local SGD, every 8 steps",
            settings={"method.name": "local_sgd", **every_8},
        ),
        Row(
            "diloco",
            "DiLoCo, every 8 steps, int8",
            settings={
                "method.name": "diloco",
                "method.wire_dtype": "int8",
                **every_8,
            },
        ),
        Row("none", "no exchange", settings={"method.name": "none"}),
        *torch_rows(),
    )
