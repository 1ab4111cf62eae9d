"""Rows that studies share: every method at the setting its figures are given for."""

from prunex_jax.bench.study import Row


def every_method() -> tuple[Row, ...]:
    return (*dense_rows(), *pruning_rows(), *entry_rows(), *local_rows())


def dense_rows() -> tuple[Row, ...]:
    return (
        Row("dense", "dense", settings={"method.name": "dense"}),
        Row(
            "dense-flat",
            "dense, flat",
            settings={"method.name": "dense", "method.dense.levels": "flat"},
        ),
        Row(
            "dense-bfloat16",
            "dense, bfloat16",
            settings={"method.name": "dense", "method.wire_dtype": "bfloat16"},
        ),
        Row(
            "dense-int8",
            "dense, int8",
            settings={"method.name": "dense", "method.wire_dtype": "int8"},
        ),
    )


def pruning_rows() -> tuple[Row, ...]:
    half = {"sparsity.sparsity": 0.5}
    hsadmm = {**half, "method.name": "hsadmm"}
    pactrain = {**half, "method.name": "pactrain"}
    return (
        Row(
            "hsadmm",
            "H-SADMM, half of the channels",
            settings={**hsadmm, "method.hsadmm.sync_period": 1},
        ),
        Row(
            "hsadmm-8-int8",
            "H-SADMM, every 8 steps, int8",
            settings={
                **hsadmm,
                "method.hsadmm.sync_period": 8,
                "method.wire_dtype": "int8",
            },
            period=8,
        ),
        Row(
            "hsadmm-8-int8-small",
            "H-SADMM, the same, cut out",
            settings={
                **hsadmm,
                "method.hsadmm.sync_period": 8,
                "method.wire_dtype": "int8",
                "sparsity.shrink_share": 0.6,
            },
            period=8,
        ),
        Row("pactrain", "PacTrain, half of the channels", settings=pactrain),
        Row(
            "pactrain-ternary",
            "PacTrain, 20 % of the weights, ternary",
            settings={
                **pactrain,
                "method.pactrain.structure": "weights",
                "method.pactrain.density": 0.2,
                "method.pactrain.is_ternary": True,
            },
        ),
    )


def entry_rows() -> tuple[Row, ...]:
    return (
        Row("topk", "Top-K, 1 %", settings={"method.name": "topk"}),
        Row("dgc", "DGC, 0.1 %", settings={"method.name": "dgc"}),
        Row("powersgd", "PowerSGD, rank 2", settings={"method.name": "powersgd"}),
        Row(
            "importance",
            "importance, 1 %, one choice in 4 steps",
            settings={
                "method.name": "importance",
                "method.importance.refresh_period": 4,
            },
            period=4,
        ),
    )


def local_rows() -> tuple[Row, ...]:
    eight = {"method.local_sgd.sync_period": 8}
    return (
        Row(
            "local-sgd",
            "local SGD, every 8 steps",
            settings={"method.name": "local_sgd", **eight},
            period=8,
        ),
        Row(
            "diloco",
            "DiLoCo, every 8 steps",
            settings={"method.name": "diloco", **eight},
            period=8,
        ),
        Row("none", "no exchange", settings={"method.name": "none"}),
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
