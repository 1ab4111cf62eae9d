"""Bytes and time of a step of a language model, PyTorch's DDP with the same beside it.

GPT of 0.9 million parameters on the source of Python's standard library, byte by byte,
over links on which a dense exchange takes 20 times as long as computing a step.

    python -m benchmarks links --study=benchmarks/studies/language.py \\
        --workdir=runs/language
"""

from typing import Any

from benchmarks.studies.methods import torch_rows
from benchmarks.study import LinkRow, LinkStudy, variant_row

TEXT = {
    "data.batch_size": 8,
    "data.sequence_length": 64,
    "data.eval_batch_size": 512,
}
# Heads, their features and hidden units, but not the stream.
CUT = {"sparsity.scope": "inner", "sparsity.sparsity": 0.3}


def get_study() -> LinkStudy:
    # The small network comes with the step after it is cut out.
    return LinkStudy(
        name="language",
        config="../../configs/stdlib_gpt_dense.py",
        settings=TEXT,
        rows=make_rows(**{"sparsity.shrink_share": 0.5}),
        num_hosts=(2, 4),
        links=("r=20",),
        rounds=3,
    )


def make_rows(**pruning: Any) -> tuple[LinkRow, ...]:
    """All rows; settings of pruning are those of the row that prunes."""
    return (
        variant_row("dense"),
        variant_row("local-sgd-8-int8", "local-sgd"),
        variant_row("diloco-8-int8", "diloco"),
        variant_row(
            "hsadmm-8-int8",
            "hsadmm",
            "H-SADMM, 30 % of heads and hidden units removed, every 8 steps, int8",
            **CUT,
            **pruning,
        ),
        variant_row("local-sgd-4-top64", "top64"),
        *torch_rows(),
    )
