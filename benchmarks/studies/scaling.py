"""Strong scaling over 1, 2, 4 and 8 hosts, with a pause instead of computation.

The hosts of one machine share its cores, so computation would be the limit: images are
tiny, and every step pauses for 0.8 s divided by the number of hosts instead.

    python -m benchmarks links --study=benchmarks/studies/scaling.py \\
        --workdir=runs/scaling
"""

from benchmarks.studies.network import NETWORK
from benchmarks.study import LinkStudy, variant_rows


def get_study() -> LinkStudy:
    return LinkStudy(
        name="scaling",
        config="../../configs/cifar10_resnet20_dense.py",
        settings={
            **NETWORK,
            "data.name": "synthetic",
            "data.image_size": 8,
            "data.batch_size": 8,
        },
        rows=variant_rows(
            *("dense", "hsadmm", "hsadmm-8-int8"),
            *("topk", "powersgd", "diloco", "none"),
        ),
        num_hosts=(1, 2, 4, 8),
        links=("50 Mbit/s",),
        stand_in_seconds=0.8,
        rounds=3,
    )
