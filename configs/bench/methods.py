"""Rows that studies share: every method at the setting its figures are given for."""

from prunex_jax.bench.study import Row, variant_rows


def every_method() -> tuple[Row, ...]:
    return variant_rows(
        *("dense", "dense-flat", "dense-bfloat16", "dense-int8"),
        *("hsadmm", "hsadmm-8-int8", "hsadmm-8-int8-small"),
        *("pactrain", "pactrain-ternary", "topk", "dgc", "powersgd", "importance"),
        *("local-sgd", "diloco", "none"),
    )


def torch_rows() -> tuple[Row, ...]:
    return (
        Row("torch", "PyTorch DDP", runtime="torch"),
        Row("torch-fp16", "PyTorch DDP, fp16 hook", runtime="torch", hook="fp16"),
        Row(
            "torch-powersgd",
            "PyTorch DDP, PowerSGD hook, rank 2",
            runtime="torch",
            hook="powersgd",
        ),
    )
