"""Bytes and time of a step, for every method, over links from slow to fast.

A narrow ResNet-18 on images of CIFAR-10's shape. Links are chosen by r, the time
of a dense exchange over that of computing a step, which carries over to other machines,
and in Mbit/s.

    python -m benchmarks links --study=benchmarks/studies/steps.py --workdir=runs/steps
"""

from benchmarks.studies.methods import every_method, torch_rows
from benchmarks.studies.network import NETWORK
from benchmarks.study import LinkStudy


def get_study() -> LinkStudy:
    return LinkStudy(
        name="steps",
        config="../../configs/cifar10_resnet20_dense.py",
        settings={**NETWORK, "data.name": "synthetic", "data.image_size": 32},
        rows=(*every_method(), *torch_rows()),
        num_hosts=(2, 4),
        links=(
            *("r=0.25", "r=1", "r=4", "r=20"),
            *("50 Mbit/s", "100 Mbit/s", "1000 Mbit/s"),
        ),
        held_out=("r=1", "r=4", "100 Mbit/s"),
        rounds=4,
    )
