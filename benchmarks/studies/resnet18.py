"""H-SADMM and dense averaging of a ResNet-18 over 4 hosts x 2 devices, at r = 20.

Beside steps, the dense exchange alone: ours, and PyTorch's all-reduce of as many bytes.

    python -m benchmarks links --study=benchmarks/studies/resnet18.py \\
        --workdir=runs/resnet18
"""

from benchmarks.study import LinkRow, LinkStudy, variant_rows


def get_study() -> LinkStudy:
    return LinkStudy(
        name="resnet18",
        config="../../configs/cifar10_resnet20_dense.py",
        settings={
            "model.name": "resnet18",
            "data.name": "synthetic",
            "data.image_size": 32,
            "data.batch_size": 8,
        },
        rows=(
            *variant_rows("dense", "hsadmm", "hsadmm-8-int8", "hsadmm-8-int8-small"),
            LinkRow(
                "exchange",
                "dense exchange alone",
                settings={"method.bucket_bytes": 6_000_000},
                exchange_only=True,
            ),
            LinkRow(
                "torch-exchange",
                "PyTorch all-reduce alone, a process per host",
                runtime="torch",
                exchange_only=True,
            ),
            LinkRow(
                "torch-exchange-by-device",
                "PyTorch all-reduce alone, a process per device",
                runtime="torch",
                exchange_only=True,
                processes_per_host=2,
            ),
        ),
        num_hosts=(4,),
        devices_per_host=2,
        links=("r=20",),
        rounds=3,
        limit_seconds=1200.0,
    )
