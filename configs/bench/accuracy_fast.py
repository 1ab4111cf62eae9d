"""Time to an accuracy on CIFAR-10 over 4 hosts, where PruneX was published.

Dense averaging spends about 73 % of its time computing there, r = 0.37. Batches are
larger than in `accuracy`, because computation has to take longer than an exchange takes
on this machine with no limit at all.

    python -m prunex_jax.bench --workdir=runs/accuracy_fast \\
        --study=configs/bench/accuracy_fast.py

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

import dataclasses

import accuracy

from prunex_jax.bench.studies import Study

LARGE = {
    "data.batch_size": 256,
    "optimizer.learning_rate": 0.05,
    "run.steps": 120,
    "run.eval_every_steps": 10,
}
LONGER = {"run.steps": 240, "optimizer.learning_rate": 0.1}


def get_study() -> Study:
    slow = accuracy.get_study()
    return dataclasses.replace(
        slow,
        name="accuracy-fast",
        settings={**slow.settings, **LARGE},
        rows=accuracy.make_rows(LONGER),
        links=("r=0.37",),
    )
