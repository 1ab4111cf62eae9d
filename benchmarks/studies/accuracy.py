"""Time to an accuracy on CIFAR-10 over 4 hosts, on links too slow for dense averaging.

What counts is when a row passes a validation accuracy, so each has the length and
the learning rate that suit it, chosen on validation data: twice as many steps where
hosts step by themselves, half of the rate where gradients are compressed.

    python -m benchmarks links --study=benchmarks/studies/accuracy.py \\
        --workdir=runs/accuracy

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

import dataclasses

from benchmarks.studies.methods import torch_rows
from benchmarks.studies.network import NETWORK
from benchmarks.study import LinkRow, LinkStudy, variant_row, variant_rows

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
# Few bits make frequent rounds cheap; then fewer steps do, at a rate of their own.
OFTEN = {
    "method.hsadmm.sync_period": 4,
    "method.wire_dtype": "int2",
    "optimizer.learning_rate": 0.07,
    "run.steps": 180,
    # Pruned and frozen at once, and cut out after step 8.
    "sparsity.freeze_share": 0.01,
    "sparsity.shrink_share": 0.02,
}
# The first rounds prune and freeze, and the small network trains nearly all the time.
EARLY = {"sparsity.start_share": 0.01, "sparsity.freeze_share": 0.03}
AT_ONCE = {"sparsity.num_stairs": 1}


def get_study() -> LinkStudy:
    return LinkStudy(
        name="accuracy",
        config="../../configs/cifar10_resnet20_dense.py",
        settings={**NETWORK, **DATA, **TRAINING},
        rows=make_rows(),
        num_hosts=(4,),
        links=("r=20",),
        goal="accuracy",
        targets=(0.40, 0.45),
        limit_seconds=1800.0,
    )


def make_rows() -> tuple[LinkRow, ...]:
    hsadmm = variant_row("hsadmm-8-int8", "hsadmm", **AT_ONCE, **EARLY, **LONGER)
    cut = {**hsadmm.settings, "sparsity.shrink_share": 0.04}
    often = "H-SADMM, half of the channels, every 4 steps, int2, cut out after step 8"
    *torch_averaging, torch_powersgd = torch_rows()
    return (
        variant_row("dense"),
        dataclasses.replace(
            hsadmm,
            name="hsadmm-small",
            label=f"{hsadmm.label}, cut out at 4 %",
            settings=cut,
        ),
        LinkRow("hsadmm-often", often, {**cut, **OFTEN}),
        hsadmm,
        variant_row("pactrain", **AT_ONCE),
        *map(compressed, variant_rows("topk", "dgc", "powersgd", "importance")),
        variant_row("local-sgd-8-int8", "local-sgd", **LONGER),
        variant_row("diloco-8-int8", "diloco", **LONGER),
        variant_row("none"),
        *torch_averaging,
        compressed(torch_powersgd),
    )


def compressed(row: LinkRow) -> LinkRow:
    return dataclasses.replace(row, settings={**row.settings, **COMPRESSED})
