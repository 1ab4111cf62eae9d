"""A language model over 4 simulated hosts: bits per byte against bytes over hosts.

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt.py \\
        --workdir=runs/sweeps

GPT of 0.9 million parameters on the source of Python's standard library, byte by byte;
every row sees the same 3.3 million bytes. Which files that are depends on the version
of Python: runs compare where the digest of the start screen is the same.
"""

from typing import Any

from rows import HOSTS

from prunex_jax.bench.study import Row, Sweep, variant_row

_CUT = {
    "sparsity.num_stairs": 3,
    "sparsity.start_share": 0.1,
    "sparsity.freeze_share": 0.4,
    "sparsity.shrink_share": 0.4,
}
_SMALL = {"model.width": 0.7}


def get_study() -> Sweep:
    return Sweep(
        name="stdlib-gpt",
        config="../stdlib_gpt_dense.py",
        settings={**HOSTS, "run.checkpoint_every_steps": 200},
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
        *(variant_row(name) for name in ("local-sgd-8-int2", "local-sgd-4-top64")),
        variant_row("diloco-8-int8", "diloco"),
        _pruned(30),
        _pruned(50),
        variant_row(
            "dense", "small", "small network from scratch, every step", **_SMALL
        ),
    )


def _pruned(percent: int, **settings: Any) -> Row:
    return variant_row(
        "hsadmm-8-int8",
        f"hsadmm-{percent}",
        f"H-SADMM, {percent} % of the channels removed, every 8 steps, int8",
        **{"sparsity.sparsity": percent / 100, **_CUT, **settings},
    )
