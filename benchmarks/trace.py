"""How long channel groups take to find: ResNet-152, here and in Torch-Pruning.

Ours is `trace_channels` from a function and shapes to groups, tracing included. Theirs
is `DependencyGraph().build_dependency` for the same network; listing its groups comes
on top and is printed beside it. The two take turns, in two processes, garbage being
collected before every turn and in none, as `timeit` has it. Prints medians.
It needs a quiet machine: torch shares its work over cores and waits for the slowest, so
that other work slows theirs many times more than ours.

    make benchmark-trace            # sets up an environment for torch
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from prunex_jax.channels import trace_channels
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink.cost import count_params

THEIR_SIDE = Path(__file__).with_name("trace_torch.py")
WARM_UP = 1
# Average number of running processes from which on nothing can be concluded.
BUSY_LOAD = 0.7


def main() -> None:
    """Times both, in turn, and prints one line for each and the quotient."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=15)
    # Ours sees shapes only; theirs computes on an example of this size.
    parser.add_argument("--side", type=int, default=224)
    arguments = parser.parse_args()
    gc.disable()
    load = os.getloadavg()[0]
    shape = (arguments.side, arguments.side, 3)
    model = make_model(ModelConfig(name="resnet152", stem="imagenet"), shape, 1000)
    params, running = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *shape), np.float32)

    def trace() -> float:
        gc.collect()
        start = time.perf_counter()
        # A function that jax has not seen, so that no trace of it is remembered.
        found = trace_channels(
            lambda *given: model.apply(*given), params, image, statistics=running
        )
        seconds = time.perf_counter() - start
        assert found.prunable_share() > 0.999, "channels were not found"
        return seconds

    with Theirs(arguments.torch_python, arguments.side) as theirs:
        assert theirs.about["params"] == count_params(params), "another network"
        first = trace(), *theirs.build()
        for _ in range(WARM_UP):
            trace(), theirs.build()
        rounds = [(trace(), *theirs.build()) for _ in range(arguments.rounds)]
    ours, graph, groups = zip(*rounds, strict=True)
    about = f"{theirs.about['versions']}, {arguments.side}x{arguments.side} example"
    write("prunex_jax, trace to groups", first[0], ours, f"jax {jax.__version__}")
    write("Torch-Pruning, dependency graph", first[1], graph, about)
    write("Torch-Pruning, its groups on top", first[2], groups, about)
    ratios = [own / their for own, their, _ in rounds]
    low, median, high = statistics.quantiles(ratios, n=4)
    verdict = "reached" if median <= 1.0 else "missed"
    if load > BUSY_LOAD:
        verdict = f"not to be judged, the machine was busy (load {load:.1f} before)"
    sys.stdout.write(
        f"ours / their graph: median {median:.3f}, quartiles {low:.3f} to {high:.3f}, "
        f"n={len(ratios)} pairs; at most 1 wanted: {verdict}\n"
    )


def write(name: str, first: float, seconds: tuple[float, ...], about: str) -> None:
    """One line: median, quartiles, the fastest, and the first, cold call."""
    low, median, high = statistics.quantiles(seconds, n=4)
    sys.stdout.write(
        f"{name}: median {median:.3f} s, quartiles {low:.3f} to {high:.3f}, fastest "
        f"{min(seconds):.3f}, n={len(seconds)}; the first {first:.3f} s; {about}\n"
    )


class Theirs:
    """A process that builds the graph of Torch-Pruning whenever it is asked."""

    def __init__(self, python: str, side: int) -> None:
        self.command = [python, str(THEIR_SIDE), str(side)]

    def __enter__(self) -> "Theirs":
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.communicate()

    def build(self) -> tuple[float, float]:
        """Seconds for the graph, and for listing its groups."""
        self.process.stdin.write("build\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["graph"], answer["groups"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(
                f"{self.command[0]} cannot build the graph of Torch-Pruning; give a "
                "Python with torch and torch-pruning==1.6.1 as --torch-python"
            )
        return json.loads(line)


if __name__ == "__main__":
    main()
