"""From the command to the first step: where the time of a short run goes.

Every run is a process of its own that trains what `make demo` trains. Cold runs start
with an empty folder for compiled programs, warm ones with what a cold run has left
there. Seconds are counted from the start of the process. Prints the phases of each kind
of run, what each program took to build, and the figures of version 0.1.

    make benchmark-start
"""

import argparse
import collections
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).parents[1] / "configs" / "digits_resnet20_hsadmm.py"
# Of the demo at version 0.1 and 60 steps, two quiet cores, no cache, n=1.
EARLIER = {
    "end of the first step": 27.0,
    "share of building in 60 steps": 0.76,
    "run of 60 steps": 95.0,
}


def main() -> None:
    """Runs the demo again and again, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", default=str(DEMO))
    parser.add_argument("--steps", type=int, default=0, help="0: as configured")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run_one(arguments.config, arguments.steps, Path(arguments.one))
        return
    cold, warm = [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(start(arguments, cache))
            warm.append(start(arguments, cache))
    for label, runs in (("cold", cold), ("warm", warm)):
        write(f"\n{label}, seconds: median, range, n={len(runs)}")
        for phase in runs[0]["phases"]:
            row(phase, [run["phases"][phase] for run in runs])
        write("programs: how many, seconds until they are built")
        for name in runs[0]["programs"]:
            each = [run["programs"][name] for run in runs]
            medians = [statistics.median(column) for column in zip(*each, strict=True)]
            write(f"  {name:28} {medians[0]:4.0f} {medians[1]:8.2f}")
    write("\nversion 0.1, cold, two cores")
    for phase, value in EARLIER.items():
        write(f"  {phase:32} {value:8.2f}")


def start(arguments: argparse.Namespace, cache: str) -> dict:
    """Runs the demo in a process of its own and returns what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.start"]
        command += ["--one", folder, "--config", arguments.config]
        command += ["--steps", str(arguments.steps)]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["PRUNEX_STARTED"] = repr(time.time())
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "start.json").read_text(encoding="utf-8"))


def run_one(config_file: str, steps: int, folder: Path) -> None:
    """Trains, and writes when what was done."""
    started = float(os.environ["PRUNEX_STARTED"])
    phases = {}

    def reached(phase: str) -> None:
        phases.setdefault(phase, time.time() - started)

    from prunex_jax.train import console, train

    reached("imports done")
    config = runpy.run_path(config_file)["get_config"]()
    if steps:
        config.run.steps, config.run.epochs = steps, 0.0
    progresses = []

    def watch(progress, state) -> None:
        del state
        reached(("state made", "end of the first step")[min(progress.step, 1)])
        progresses[:] = [progress]

    write_line = console.Console.line

    def line(self, text: str) -> None:
        write_line(self, text)
        reached("start screen")

    console.Console.line = line
    programs = watched_programs()
    result = train(config, folder / "run", after_step=[watch])
    reached("end of the run")
    progress = progresses[0]
    phases["building programs"] = sum(row[1] for row in programs.values())
    phases["in steps"] = progress.position.clock.seconds_in_steps
    phases["one step, median"] = result.summary["seconds_per_step_median"]
    found = {"phases": phases, "programs": programs}
    (folder / "start.json").write_text(json.dumps(found), encoding="utf-8")


def watched_programs() -> dict[str, list]:
    """Counts, from now on, what programs are built, and for how long a run waits."""
    from prunex_jax.train.steps.compiled import Program

    found, build = collections.defaultdict(lambda: [0, 0.0]), Program.compile

    def compile_and_count(self, *args, **static):
        started, is_new = time.perf_counter(), not self.is_compiled(**static)
        compiled = build(self, *args, **static)
        if is_new:
            found[self.name][0] += 1
            found[self.name][1] += time.perf_counter() - started
        return compiled

    Program.compile = compile_and_count
    return found


def row(label: str, values: list[float]) -> None:
    """Writes the median of values and their range."""
    median = statistics.median(values)
    write(f"  {label:32} {median:8.2f} {min(values):8.2f} to {max(values):.2f}")


def write(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
