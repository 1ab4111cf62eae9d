"""A host of a study that runs PyTorch: one process, DistributedDataParallel, its gates.

It owns what a process does between gates. It leaves what is trained to `torch_tasks`,
training to `torch_training`, which is loaded here because it needs torch, and links and
counters to the runner.

    python -m prunex_jax.bench.torch.host --spec=FILE --gate=W,R
        --coordinator=HOST:PORT --process_id=I --num_processes=N [--interface=NAME]
"""

import gc
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence

import jax

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import TrainingDivergedError, UserError
from prunex_jax.bench.links.gates import Gate, Gatekeeper, Spec, read_specs
from prunex_jax.bench.links.kernel import forget_peak_memory, share_cores
from prunex_jax.bench.torch.tasks import Seat, make_task
from prunex_jax.mesh import keep_freed_memory, return_freed_memory

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("spec", "", "What to run, written by the runner.", is_required=True),
        Flag("gate", "", "Pipes to the runner.", is_required=True),
        Flag("coordinator", "", "Address and port of process 0.", is_required=True),
        Flag("num_processes", 1, "Processes of the run."),
        Flag("process_id", 0, "Number of this process."),
        Flag("interface", "", "Network interface to exchange over."),
    ),
)


def run_specs(specs: Sequence[Spec], gate: Gatekeeper, seat: Seat) -> None:
    """Runs them on this process, with all others, one after the other.

    Args:
      specs: The same on all processes.
      gate: Where they wait.
      seat: How they find each other.
    Raises:
      UserError: A setting that the PyTorch side lacks.
      TrainingDivergedError: The loss is no longer finite.
    """
    from prunex_jax.bench.torch import training as torch_training

    with torch_training.joined(seat):
        for spec in specs:
            gc.collect()
            return_freed_memory()
            forget_peak_memory()
            task = make_task(spec, seat)
            if spec.exchange_only:
                exchange = torch_training.make_exchange(task)
                pass_gates(spec, gate, exchange, lambda: None, lambda: "")
            else:
                with torch_training.Trainer(task, spec.hook) as trainer:
                    pass_gates(
                        spec, gate, trainer.step, trainer.accuracy, trainer.digest
                    )
            gate.arrive(event="done")


def pass_gates(
    spec: Spec,
    gate: Gatekeeper,
    step: Callable[[], float],
    accuracy: Callable[[], float | None],
    digest: Callable[[], str],
) -> None:
    """Takes timed steps and stops at the gates between them.

    A pause that stands for computation comes before the real one: what PyTorch hides
    behind its backward pass it hides behind the real one only.

    Args:
      spec: Where the gates are.
      gate: Is told the loss of every step on this process, too.
      step: Takes one and returns its loss.
      accuracy: Scores the network; called if the spec asks for it.
      digest: Of the parameters, which must be the same on all processes.
    Raises:
      TrainingDivergedError: A loss is not finite.
    """
    done = 0
    for boundary in spec.boundaries:
        seconds, losses = list[float](), list[float]()
        while done < boundary:
            start = time.perf_counter()
            time.sleep(spec.stand_in_seconds)
            losses.append(step())
            seconds.append(time.perf_counter() - start)
            done += 1
        if not all(map(math.isfinite, losses)):
            raise TrainingDivergedError(f"the loss is not finite at step {done}")
        nothing = dict.fromkeys(("traced_bytes", "formula_bytes", "hops"))
        gate.arrive(
            event="pause",
            step=done,
            seconds=seconds,
            losses=losses,
            digest=digest(),
            **nothing,
        )
        found = accuracy() if spec.evaluates else None
        gate.arrive(event="resume", accuracy=found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one process of a study.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, rest: list[str]) -> None:
    del rest
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed: pip install 'prunex_jax[torch]'")
    # Here jax gives data, schedule and first parameters, and computes nothing else.
    jax.config.update("jax_platforms", "cpu")
    seat = Seat(
        address=values.coordinator,
        process=values.process_id,
        processes=values.num_processes,
        interface=values.interface,
    )
    share_cores(seat.process, seat.processes)
    # As the processes that it is compared with do.
    keep_freed_memory()
    run_specs(read_specs(values.spec), Gate.of(values.gate), seat)


if __name__ == "__main__":
    sys.exit(main())
