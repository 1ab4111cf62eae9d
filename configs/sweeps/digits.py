"""Accuracy per byte on handwritten digits: every method at its own config.

    python -m prunex_jax sweep --sweep=configs/sweeps/digits.py --workdir=runs/sweeps

2 simulated hosts x 2 devices, 45 epochs, about a minute per run on two CPU cores;
nothing is downloaded.
"""

from pathlib import Path

from prunex_jax.compare.sweep.study import Row, Sweep

CONFIGS = Path(__file__).parent.parent
PREFIX = "digits_resnet20_"


def get_study() -> Sweep:
    methods = sorted(
        path.stem.removeprefix(PREFIX) for path in CONFIGS.glob(f"{PREFIX}*.py")
    )
    # First what all are compared with, and what this is about.
    methods.sort(key=lambda name: (name != "dense", name != "hsadmm"))
    return Sweep(
        name="digits",
        config=f"../{PREFIX}dense.py",
        rows=tuple(
            Row(name.replace("_", "-"), name, config=f"../{PREFIX}{name}.py")
            for name in methods
        ),
        baselines=("dense",),
        health_rows=("hsadmm", "local-sgd", "diloco"),
    )
