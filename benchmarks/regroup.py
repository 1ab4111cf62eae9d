"""What going on with other hosts costs: 4, then 2, then 3, against 4 all the way.

Several seeds of short runs on digits, of which some are ended at steps 60 and 110 as by
a crash and go on with another number of simulated hosts. Prints their test accuracies.

    python -m benchmarks regroup
"""

import statistics
import sys
import tempfile
from pathlib import Path

import jax

from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.run import train
from tests.train.test_regroup import run_through, values_of

METHODS = ("hsadmm", "dgc")
NUM_UNDISTURBED = 5
NUM_DISTURBED = 3


def main() -> None:
    """Trains them all, one after the other."""
    jax.config.update("jax_num_cpu_devices", 4)
    for method in METHODS:
        for is_disturbed, count in ((False, NUM_UNDISTURBED), (True, NUM_DISTURBED)):
            found = [_accuracy(method, seed, is_disturbed) for seed in range(count)]
            kind = "4, 2, 3 hosts" if is_disturbed else "4 hosts"
            listed = ", ".join(f"{accuracy:.3f}" for accuracy in found)
            sys.stdout.write(
                f"{method}, {kind}: mean {statistics.mean(found):.3f}, standard "
                f"deviation {statistics.stdev(found):.3f}, n={count} ({listed})\n"
            )


def _accuracy(method: str, seed: int, is_disturbed: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        if is_disturbed:
            result = run_through(method, workdir, seed)
        else:
            values = {**values_of(4, method, 160), "seed": seed}
            result = train(resolve_config(values), workdir)
    return float(result.summary["test_accuracy"])


if __name__ == "__main__":
    main()
