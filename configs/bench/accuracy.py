"""Time to an accuracy on CIFAR-10 over 4 hosts, on slow links and on faster ones.

r = 20 is far beyond what dense averaging can bear; r = 0.37 is where PruneX was
published: dense averaging spends 73 % of its time computing. Every row has its own
length, since what counts is when it passes a validation accuracy: twice as many steps,
and twice the learning rate, where hosts step by themselves.

    python -m prunex_jax.bench --study=configs/bench/accuracy.py --workdir=runs/accuracy

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

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


def get_study() -> Study:
    return Study(
        name="accuracy",
        config="../cifar10_resnet20_dense.py",
        settings={**NETWORK, **DATA, **TRAINING},
        rows=(
            Row("dense", "dense", settings={"method.name": "dense"}),
            Row(
                "hsadmm-small",
                "H-SADMM, every 8 steps, int8, cut out at 4 %",
                settings={
                    "method.name": "hsadmm",
                    **HALF,
                    **EVERY_8,
                    **LONGER,
                    "sparsity.start_share": 0.01,
                    "sparsity.freeze_share": 0.03,
                    "sparsity.shrink_share": 0.04,
                },
            ),
            Row(
                "hsadmm",
                "H-SADMM, every 8 steps, int8",
                settings={
                    "method.name": "hsadmm",
                    **HALF,
                    **EVERY_8,
                    **LONGER,
                    "sparsity.start_share": 0.01,
                    "sparsity.freeze_share": 0.03,
                },
            ),
            Row(
                "pactrain",
                "PacTrain, half of the channels",
                settings={"method.name": "pactrain", **HALF},
            ),
            *entry_rows(),
            Row(
                "local-sgd",
                "local SGD, every 8 steps",
                settings={
                    "method.name": "local_sgd",
                    "method.local_sgd.sync_period": 8,
                    **LONGER,
                },
            ),
            Row(
                "diloco",
                "DiLoCo, every 8 steps, int8",
                settings={
                    "method.name": "diloco",
                    "method.local_sgd.sync_period": 8,
                    "method.wire_dtype": "int8",
                    **LONGER,
                },
            ),
            Row("none", "no exchange", settings={"method.name": "none"}),
            *torch_rows(),
        ),
        num_hosts=(4,),
        links=("r=20", "r=0.37"),
        goal="accuracy",
        target_accuracies=(0.40, 0.45),
        limit_seconds=1800.0,
    )
