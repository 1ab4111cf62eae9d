"""Command line of the export.

    python -m prunex_jax.export --workdir=FOLDER --out=FOLDER [--step=N]
        [--data_dir=FOLDER] [--overwrite] [--quiet]

Makes a folder of what a run has learned: its network without the dead channels, as
safetensors, a StableHLO program and a JSON manifest, for use without this package. The
run may have ended, been stopped, or still be training. Masked and shrunk network are
compared first, forward and gradients, and nothing is written if they differ. Exit code
0: written; 2: bad input.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prunex_jax.cli import Command, Flag, Values, run_command
from prunex_jax.export.trained import export_run, num_devices_of_run
from prunex_jax.settings import TopologyConfig
from prunex_jax.topology import LaunchFlags, start_processes

COMMAND = Command(
    name="prunex_jax.export",
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Run folder of prunex_jax.train.", is_required=True),
        Flag("out", "", "Folder to make.", is_required=True),
        Flag("step", -1, "Checkpoint to export; -1 takes the newest."),
        Flag("data_dir", "", "Where the data set lies, if not where the run found it."),
        Flag("overwrite", False, "Replace an earlier export in --out."),
        Flag("quiet", False, "Print nothing but errors."),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and exports.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    return run_command(COMMAND, _export, arguments)


def _export(values: Values, rest: list[str]) -> None:
    del rest
    # As many devices as the run had, whatever this machine has.
    count = num_devices_of_run(values.workdir)
    start_processes(TopologyConfig(cpu_devices=count), LaunchFlags(launcher="none"))
    manifest = export_run(
        values.workdir,
        values.out,
        step=None if values.step < 0 else values.step,
        data_dir=values.data_dir,
        overwrite=values.overwrite,
    )
    if not values.quiet:
        sys.stdout.write(describe_export(manifest, values.out))


def describe_export(manifest: Mapping[str, Any], folder: str) -> str:
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
        f"check it  python -m prunex_jax.evaluate --model={folder}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
