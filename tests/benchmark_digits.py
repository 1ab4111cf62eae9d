"""Every method on handwritten digits: what it reaches, what it sends, how fast it is.

Runs every config `configs/digits_resnet20_*.py` as it is, one after the other, and
prints one table. Runs are kept, and taken from where they are if they are complete, so
that the command can be stopped and given again.

    make bench-digits                    # into runs/digits
    python -m tests.benchmark_digits --only=topk,dgc --seeds=0,1,2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PREFIX = "digits_resnet20_"
# What every method must reach on the test split at its documented setting. `none` is no
# way to train: it shows how fast steps are without exchanges.
LEAST_ACCURACY = 0.95
EXEMPT = ("none",)
COLUMNS = (
    "| method | test accuracy | bytes over the host axis, of dense | "
    "bytes of one exchange, of dense | exchanges | ms per step | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def main() -> int:
    """Runs what is missing and prints the table; 1 if a method stays below its mark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "digits")
    parser.add_argument("--only", default="", help="methods, separated by commas")
    parser.add_argument("--seeds", default="0", help="seeds, separated by commas")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or known_methods()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    write("\n".join(COLUMNS))
    weak = []
    for name in names:
        runs = [summary_of(name, seed, arguments.workdir) for seed in seeds]
        write(row_of(name, runs))
        least = min(run["test_accuracy"] for run in runs)
        if least < LEAST_ACCURACY and name not in EXEMPT:
            weak.append(f"{name} reached {least:.4f}")
    write(f"each at least {LEAST_ACCURACY}: {'; '.join(weak) or 'reached'}")
    return 1 if weak else 0


def known_methods() -> list[str]:
    """Methods that have a config on digits."""
    found = sorted((ROOT / "configs").glob(f"{PREFIX}*.py"))
    return [path.stem.removeprefix(PREFIX) for path in found]


def summary_of(name: str, seed: int, workdir: Path) -> Mapping[str, Any]:
    """Runs one config, unless that was done before; returns its summary."""
    folder = workdir / f"{name}_{seed}"
    command = [
        *(sys.executable, "-m", "prunex_jax.train"),
        f"--config={ROOT / 'configs' / f'{PREFIX}{name}.py'}",
        *(f"--workdir={folder}", f"--config.seed={seed}"),
    ]
    path = folder / "summary.json"
    if not path.exists():
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(path.read_text())


def row_of(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """One row: means over seeds, with the range where there are several."""

    def mean(key: str) -> float:
        return statistics.mean(run[key] for run in runs)

    accuracies = [run["test_accuracy"] for run in runs]
    accuracy = f"{mean('test_accuracy'):.3f}"
    if len(runs) > 1:
        accuracy += f" ({min(accuracies):.3f} to {max(accuracies):.3f}, n={len(runs)})"
    return (
        f"| `{name}` | {accuracy} | {mean('host_wire_ratio'):.4f} | "
        f"{mean('host_payload_ratio'):.4f} | {mean('num_rounds'):.0f} | "
        f"{1000 * mean('seconds_per_step_median'):.0f} | {mean('seconds_total'):.0f} |"
    )


def write(text: str) -> None:
    """Prints at once, since runs take minutes."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
