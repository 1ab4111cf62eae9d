"""Does an exchange beside the next step cost no time? Rounds whole and in fragments.

Local SGD every 8 steps over links on which a dense exchange takes 20 times as long as
the computation of a step, beside steps that exchange nothing.

    python -m benchmarks links --study=benchmarks/studies/streaming.py \\
        --workdir=runs/beside
"""

from benchmarks.studies.network import NETWORK
from benchmarks.study import LinkRow, LinkStudy, variant_row, variant_rows


def in_fragments(name: str, label: str, fragments: int, delay: int) -> LinkRow:
    return variant_row(
        "local-sgd-8-int8-streaming",
        name,
        f"local SGD, every 8 steps, int8, {label}",
        **{"method.rounds.fragments": fragments, "method.rounds.delay": delay},
    )


def get_study() -> LinkStudy:
    return LinkStudy(
        name="streaming",
        config="../../configs/cifar10_resnet20_dense.py",
        settings={**NETWORK, "data.name": "synthetic", "data.image_size": 32},
        rows=(
            *variant_rows("dense", "none", "local-sgd-8-int8"),
            in_fragments("waits", "8 fragments, waits for each", 8, 0),
            in_fragments("beside", "8 fragments, each beside a step", 8, 1),
        ),
        links=("r=20",),
        rounds=3,
    )
