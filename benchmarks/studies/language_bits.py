"""Time to bits per byte of a language model over 2 hosts, PyTorch's DDP beside it.

As `language`, but whole runs: when does a row pass a figure on validation text? Rows
whose hosts step by themselves take twice as many steps. The runs are short: they show
when a network begins to learn, and nothing of the end of long runs.

    python -m benchmarks links --study=benchmarks/studies/language_bits.py \\
        --workdir=runs/language_bits
"""

import dataclasses

from benchmarks.studies import language
from benchmarks.study import LinkRow, LinkStudy

TRAINING = {
    # Small batches: steps count here, and dense ones take long over such links.
    "data.batch_size": 4,
    "run.epochs": 0.0,
    "run.steps": 150,
    "run.eval_every_steps": 15,
    "run.log_every_steps": 15,
    "run.checkpoint_every_steps": 0,
    "run.read_test": False,
}
LONGER = {"run.steps": 300}
# Pruned in one go, frozen and cut out within the first rounds.
EARLY = {
    "sparsity.num_stairs": 1,
    "sparsity.start_share": 0.1,
    "sparsity.freeze_share": 0.2,
    "sparsity.shrink_share": 0.2,
}


def get_study() -> LinkStudy:
    steps = language.get_study()
    return dataclasses.replace(
        steps,
        name="language-bits",
        settings={**steps.settings, **TRAINING},
        rows=tuple(map(in_rounds, language.make_rows(**EARLY))),
        num_hosts=(2,),
        goal="bits_per_byte",
        less_is_better=True,
        targets=(4.5, 4.25),
        scored_examples=256,
    )


def in_rounds(row: LinkRow) -> LinkRow:
    """The row, for twice as long if its hosts step by themselves between rounds."""
    if row.period == 1:
        return row
    return dataclasses.replace(row, settings={**row.settings, **LONGER})
