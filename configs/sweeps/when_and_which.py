"""When hosts meet, and which channels stay: what both are worth in accuracy.

    python -m prunex_jax sweep --sweep=configs/sweeps/when_and_which.py \\
        --workdir=runs/sweeps --seeds=0

ResNet-18 at half of its width on CIFAR-10, 10 epochs, 4 hosts. Its stem for large
images lets two CPU cores train it, and it is large enough to lose accuracy where hosts
meet rarely at high learning rates, and where channels go evenly. Channels go in three
stairs between 2 and 30 % of the run, and are cut out then. Settings may be chosen by
the validation split; the test split is read once per run.
"""

from typing import Any

from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep

_TRAINING = {
    "model.stem": "imagenet",
    "model.width": 0.5,
    "model.compute_dtype": "float32",
    "optimizer.weight_decay": 5e-4,
    "run.epochs": 10.0,
    "run.eval_every_steps": 264,
    "run.log_every_steps": 88,
    "sparsity.num_stairs": 3,
}
# Rounds of at least two steps, and rarer ones as the learning rate falls from 0.2.
_BY_RATE = {"method.rounds.sync_rule": "quadratic", "method.rounds.sync_alpha": 0.283}
_REPAIRED = {"sparsity.criterion": "taylor", "sparsity.repair_batches": 4}
_RANKED = {"sparsity.budget": "global", **_REPAIRED}
_EQUAL = {**_BY_RATE, **_REPAIRED}
_PARAMS = {**_RANKED, "sparsity.unit": "params", "sparsity.sparsity": 0.75}
_MACS = {**_RANKED, "sparsity.unit": "macs", "sparsity.sparsity": 0.72}
_MACS_OF_ALL = {**_MACS, "sparsity.sparsity": 0.75, "sparsity.max_group_sparsity": 0.65}
# Channels go later: between 20 and 40 % of the run.
_LATER = {
    "sparsity.start_share": 0.2,
    "sparsity.freeze_share": 0.4,
    "sparsity.shrink_share": 0.4,
}
_TAUGHT = {"distill.teacher": "self"}


def get_study() -> Sweep:
    return Sweep(
        name="when-and-which",
        config="../cifar10_resnet18_hsadmm.py",
        settings={**HOSTS, **_TRAINING},
        rows=make_rows(),
        baselines=("dense", "small"),
    )


def make_rows() -> tuple[Row, ...]:
    small = {"model.width": 0.25, **_never()}
    return (
        _row("dense", "dense, every step", "dense", **_never()),
        _row("small", "half of the width from scratch, every step", "dense", **small),
        _row("local-8", "local SGD, every 8 steps", "local_sgd", 8, **_never()),
        _row(
            "local-rate", "local SGD, by rate", "local_sgd", 2, **_BY_RATE, **_never()
        ),
        _row("half-8", "half of the channels, every 8 steps", "hsadmm", 8),
        _row("half-rate", "the same by rate, repaired", "hsadmm", 2, **_EQUAL),
        _row("half-later", "the same, later", "hsadmm", 2, **_EQUAL, **_LATER),
        _row(
            *("half-taught", "the same, taught by itself", "hsadmm", 2),
            **{**_EQUAL, **_LATER, **_TAUGHT},
        ),
        _row(
            *("third-rate", "30 % of the channels, by rate, repaired", "hsadmm", 2),
            **{**_EQUAL, "sparsity.sparsity": 0.3},
        ),
        _row(
            "params", "a quarter of the parameters", "hsadmm", 2, **_BY_RATE, **_PARAMS
        ),
        _row(
            "params-4-int4",
            "the same, from every 4 steps, int4",
            "hsadmm",
            4,
            **{
                **_BY_RATE,
                "method.rounds.sync_alpha": 0.4,
                "method.wire_dtype": "int4",
            },
            **_PARAMS,
        ),
        _row(
            "params-top256",
            "the same, 256 of 4,096 numbers, int2",
            "hsadmm",
            2,
            **{"method.rounds.top_k": 256, "method.wire_dtype": "int2"},
            **{**_BY_RATE, **_PARAMS},
        ),
        _row("macs", "28 % of the MACs", "hsadmm", 2, **_BY_RATE, **_MACS),
        _row(
            *("macs-all", "25 %, a third of every group stays", "hsadmm", 2),
            **{**_BY_RATE, **_MACS_OF_ALL},
        ),
    )


def _never() -> dict[str, Any]:
    """Channels are not cut out of what does not lose any."""
    return {"sparsity.shrink_share": 1.0}


def _row(
    name: str, title: str, method: str, sync_period: int = 0, **settings: Any
) -> Row:
    """A row of a method, with rounds of at least so many steps."""
    period = {f"method.{method}.sync_period": sync_period} if sync_period else {}
    return Row(name, title, {"method.name": method, **period, **settings})
