"""A small BERT on the source of Python's standard library, with H-SADMM.

Of every sequence of 128 bytes, 15 % are asked for, and most of these are hidden. Text
and hosts are those of stdlib_gpt_hsadmm. Heads, their features, hidden units and the
stream lose 30 % of their channels.

    python -m prunex_jax.train --workdir=runs/stdlib_bert \\
        --config=configs/stdlib_bert_hsadmm.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what gpt
ends at, which predicts the next byte.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.model.name = "bert"
    config.optimizer.learning_rate = 1e-3
    return config
