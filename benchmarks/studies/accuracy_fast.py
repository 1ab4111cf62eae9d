"""Time to an accuracy on CIFAR-10 over 4 hosts, where PruneX was published.

As `accuracy`, over links where dense averaging spends about 73 % of its time computing,
r = 0.37.

    python -m benchmarks links --workdir=runs/accuracy_fast \\
        --study=benchmarks/studies/accuracy_fast.py

CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

import dataclasses

from benchmarks.studies import accuracy
from benchmarks.study import LinkStudy


def get_study() -> LinkStudy:
    slow = accuracy.get_study()
    return dataclasses.replace(slow, name="accuracy-fast", links=("r=0.37",))
