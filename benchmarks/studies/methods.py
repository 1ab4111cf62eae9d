"""Rows that studies share: every method at the setting its figures are given for."""

from benchmarks.study import LinkRow, variant_rows


def every_method() -> tuple[LinkRow, ...]:
    return variant_rows(
        *("dense", "dense-flat", "dense-bfloat16", "dense-int8"),
        *("hsadmm", "hsadmm-8-int8", "hsadmm-8-int8-small"),
        *("pactrain", "pactrain-ternary", "topk", "dgc", "powersgd", "importance"),
        *("local-sgd", "diloco", "none"),
    )


def torch_rows() -> tuple[LinkRow, ...]:
    return (
        LinkRow("torch", "PyTorch DDP", runtime="torch"),
        LinkRow("torch-fp16", "PyTorch DDP, fp16 hook", runtime="torch", hook="fp16"),
        LinkRow(
            "torch-powersgd",
            "PyTorch DDP, PowerSGD hook, rank 2",
            runtime="torch",
            hook="powersgd",
        ),
    )
