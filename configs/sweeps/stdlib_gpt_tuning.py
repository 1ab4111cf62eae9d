"""Learning rates and batches of a language model over 4 hosts, on validation data.

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt_tuning.py \\
        --workdir=runs/sweeps

All rows see the same 1.6 million bytes.
"""

from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row


def get_study() -> Sweep:
    return Sweep(
        name="stdlib-gpt-tuning",
        config="../stdlib_gpt_dense.py",
        settings={
            **HOSTS,
            "run.eval_every_steps": 0,
            "run.checkpoint_every_steps": 800,
            "run.log_every_steps": 50,
        },
        rows=make_rows(),
        seeds=(0,),
        baselines=("dense-2",),
        split="validation",
        metric="bits_per_byte",
        less_is_better=True,
    )


def make_rows() -> tuple[Row, ...]:
    large = {"data.batch_size": 32, "run.steps": 400}
    return (
        _row("dense", "dense-2", "dense, learning rate 0.002", 2),
        _row("dense", "dense-4", "dense, learning rate 0.004", 4),
        _row("dense", "dense-large", "dense, rate 0.003, batches of 32", 3, **large),
        _row("local-sgd-8-int8", "local-sgd-2", "local SGD, every 8 steps, int8", 2),
        _row("local-sgd-4-top64", "top64-2", "local SGD, every 4 steps, top 64", 2),
    )


def _row(variant: str, name: str, title: str, thousandths: int, **more: object) -> Row:
    rate = {"optimizer.learning_rate": thousandths / 1000}
    return variant_row(variant, name, title, **rate, **more)
