"""Exports what a run has learned, from one of its checkpoints.

    prunex-jax export --workdir=FOLDER --out=FOLDER [--step=N]
        [--data_dir=FOLDER] [--overwrite] [--format=onnx] [--compare=1,8,64] [--quiet]
        [--model=MODULE:OBJECT] [--data=MODULE:OBJECT] [--loss=MODULE:OBJECT] ...

Makes a folder of what a run has learned: its network without the dead channels, as
safetensors, a StableHLO program and a JSON manifest, for use without this package. The
run may have ended, been stopped, or still be training; its folder is only read. Masked
and shrunk network are compared first, forward and gradients, and nothing is written if
they differ. --compare also measures both on this device and prints a table. What was
brought to the run in Python is named by --model, --data, --loss, --inputs and
--optimizer, as package.module:object. Exit code 0: written; 2: bad input.

The run is rebuilt on as many devices as it had, simulated on the CPU:

    config.json -> experiment -> checkpoint -> network -> make_cut -> certify -> export
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.export.folder import FORMATS, check_format, check_target
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start_processes
from prunex_jax.train.commands.own import OWN_FLAGS, given_own, named_object
from prunex_jax.train.records.restoring import load_trained, mesh_in_folder

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Run folder.", is_required=True),
        Flag("out", "", "Folder to make.", is_required=True),
        Flag("step", -1, "Checkpoint to export; -1 takes the newest.", at_least=-1),
        Flag("data_dir", "", "Where the data set lies, if not where the run found it."),
        Flag("overwrite", False, "Replace an earlier export in --out."),
        Flag("format", "stablehlo", "onnx: ONNX, too.", FORMATS),
        Flag("compare", "", "Batch sizes, as in 1,8,64, for which both are measured."),
        Flag("quiet", False, "Print nothing but errors."),
        Flag("model", "", "Network that was brought to the run: MODULE:OBJECT."),
        *OWN_FLAGS,
        Flag("optimizer", "", "What makes its optimizer, if that was brought."),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and exports."""
    return run_command(COMMAND, _export, arguments)


def _export(values: Values, rest: list[str]) -> None:
    del rest
    # As many devices as the run had, whatever this machine has.
    hosts, per_host = mesh_in_folder(expanded(values.workdir))
    topology = TopologyConfig(cpu_devices=hosts * per_host)
    start_processes(topology, LaunchFlags(launcher="none", owns_process=True))
    batch_sizes = _batch_sizes(values.compare)
    check_target(values.out, values.overwrite)  # Before all that takes time.
    check_format(values.format)
    step = None if values.step < 0 else values.step
    trained = load_trained(
        values.workdir,
        step=step,
        data_dir=values.data_dir,
        own=given_own(values, named_object(values, "model")),
        own_optimizer=named_object(values, "optimizer"),
    )
    manifest = trained.export(
        values.out, overwrite=values.overwrite, format=values.format
    )
    if not values.quiet:
        sys.stdout.write(_described(manifest, values.out))
    if batch_sizes:
        sys.stdout.write("\n" + trained.compare(batch_sizes).format() + "\n")


def _batch_sizes(text: str) -> list[int]:
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise UserError(
            f"--compare={text} is no list of batch sizes; write them as in 1,8,64"
        )
    return [int(number) for number in numbers]


def _described(manifest: Mapping[str, Any], folder: str) -> str:
    """Says in a few lines what was exported."""
    trained, certificate = manifest["trained"], manifest["certificate"]
    channels, program = manifest["channels"], manifest["program"]
    total = sum(group["size"] for group in channels)
    kept = sum(len(group["kept"]) for group in channels)
    lines = [
        f"exported  step {trained['step']} of {trained['num_steps']} to {folder}",
        f"channels  {kept} of {total} kept",
        f"equal     masked and shrunk differ by {certificate['forward_error']:.1e} "
        f"(outputs) and {certificate['gradient_error']:.1e} (gradients), relative",
        f"program   {program['inputs'][0]} -> {program['outputs']} on "
        f"{', '.join(program['platforms'])}",
        f"check it  python -m prunex_jax evaluate --model={folder}",
    ]
    return "\n".join(lines) + "\n"
