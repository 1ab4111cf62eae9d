"""A language model over 4 simulated hosts: bits per byte against bytes over hosts.

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt.py \\
        --workdir=runs/sweeps

GPT of 0.9 million parameters on the source of Python's standard library, byte by byte;
every row sees the same 1.6 million bytes. Which files that are depends on the version
of Python: runs compare where the digest of the start screen is the same.
"""

from typing import Any

from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row

# Heads, their features and hidden units, but not the stream.
_CUT = {
    "sparsity.scope": "inner",
    "sparsity.num_stairs": 3,
    "sparsity.start_share": 0.1,
    "sparsity.freeze_share": 0.4,
    "sparsity.shrink_share": 0.4,
    "method.hsadmm.sync_period": 2,
}
# As wide as what is left at 30 %.
_SMALL = {
    **{"model.gpt.heads": 3, "model.gpt.key_heads": 3},
    **{"model.gpt.head_width": 24, "model.gpt.hidden": 248},
}


def get_study() -> Sweep:
    return Sweep(
        name="stdlib-gpt",
        config="../stdlib_gpt_dense.py",
        settings={
            **HOSTS,
            "run.checkpoint_every_steps": 800,
            "run.log_every_steps": 50,
        },
        rows=make_rows(),
        baselines=("dense", "small"),
        metric="bits_per_byte",
        less_is_better=True,
        health_rows=("hsadmm-30",),
    )


def make_rows() -> tuple[Row, ...]:
    return (
        variant_row("dense", label="dense, every step"),
        variant_row("local-sgd-8-int8", "local-sgd"),
        variant_row("local-sgd-4-top64"),
        variant_row("diloco-8-int8", "diloco", **{"method.rounds.outer": "law"}),
        _pruned("hsadmm-30", 30),
        _pruned("hsadmm-50", 50),
        variant_row(
            "dense", "small", "small network from scratch, every step", **_SMALL
        ),
    )


def _pruned(name: str, percent: int) -> Row:
    """H-SADMM that removes a share of heads, their features and hidden units."""
    title = (
        f"H-SADMM, {percent} % of heads and hidden units removed, every 2 steps, "
        "64 of 4,096 numbers, int2"
    )
    settings: dict[str, Any] = {**_CUT, "sparsity.sparsity": percent / 100}
    return variant_row("hsadmm-4-top64", name, title, **settings)
