"""A float32 training step of ResNet-18 beside PyTorch's on the same cores.

Images of 32x32; loss, gradients and SGD with Nesterov momentum in both. The two take
steps in turn, so that a machine whose speed drifts slows both. Prints one line.
`--layouts nhwc` lays PyTorch's arrays out as ours are.

    make benchmark-torch-step
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.pairs import describe_pairs
from benchmarks.shrunk_step import IMAGE_SHAPE, NUM_CLASSES, make_step
from prunex_jax.base.timing import Timing, time_in_turn
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.processes import keep_freed_memory
from prunex_jax.shrink.cost import count_params

THEIR_SIDE = Path(__file__).with_name("torch_step_torch.py")


def main() -> None:
    """Times our step and theirs in turn, for every layout of theirs that is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", default=["nchw"])
    arguments = parser.parse_args()
    keep_freed_memory()
    model = make_model(ModelConfig(name="resnet18"), IMAGE_SHAPE, NUM_CLASSES)
    params, statistics = jax.jit(model.init)(jax.random.key(0))
    ours = make_step(model, params, statistics, arguments.batch_size)
    for layout in arguments.layouts:
        command = [arguments.torch_python, str(THEIR_SIDE)]
        with subprocess.Popen(
            [*command, str(arguments.batch_size), layout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as theirs:
            about = _read(theirs)
            assert about["params"] == count_params(params), "another network"
            seconds: list[float] = []

            def step(process: Any = theirs, seconds: Any = seconds) -> None:
                process.stdin.write("\n")
                process.stdin.flush()
                seconds.append(_read(process)["seconds"])

            timings = time_in_turn({"ours": ours, "theirs": step}, arguments.pairs)
            theirs.kill()
        measured = Timing(tuple(seconds[-arguments.pairs :]))
        sys.stdout.write(
            f"jax {jax.__version__} / {about['about']}: "
            f"{describe_pairs(timings['ours'], measured)}\n"
        )


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    main()
