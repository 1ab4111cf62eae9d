"""Settings of the run itself, and of its teacher."""

import dataclasses
from typing import Literal

from prunex_jax.base.settings import setting


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """What is learned from a trained network beside the labels."""

    # Folder made by `python -m prunex_jax export`; self for the run's own network, from
    # before it lost its first channels; empty for no teacher.
    teacher: str = ""
    # Share of the run until which the teacher is asked.
    until_share: float = setting(1.0, above=0, at_most=1)
    # Of teacher self: share of the run, before the first channels go, over whose rounds
    # networks are averaged.
    average_share: float = setting(0.05, at_least=0, at_most=1)
    # Share of the loss that is the distance to the teacher's answers.
    weight: float = setting(0.5, at_least=0, at_most=1)
    # Divides logits of both: the higher, the more its view of wrong classes counts.
    temperature: float = setting(4.0, above=0)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, and how often it reports, evaluates and saves."""

    # Exactly one of the two is positive.
    steps: int = setting(0, at_least=0)
    epochs: float = setting(0.0, at_least=0)
    log_every_steps: int = setting(20, at_least=1)
    # 0 evaluates at the end only.
    eval_every_steps: int = setting(0, at_least=0)
    # 0 saves at the end, and on a signal, only.
    checkpoint_every_steps: int = setting(200, at_least=0)
    checkpoints_kept: int = setting(2, at_least=1)
    # Training batches, at the end and where dead channels are cut out, from which batch
    # statistics are taken anew; 0 keeps the running ones, which copies have left.
    reestimate_batches: int = setting(0, at_least=0)
    # Stop where copies are further than this from their consensus, as a share of its
    # norm: so H-SADMM diverges, with every loss finite. 0 never stops.
    max_host_drift: float = setting(1.0, at_least=0)
    # False leaves the test split alone, in runs that choose settings.
    read_test: bool = True
    # Where commands keep compiled programs, to start sooner the next time: auto (what
    # JAX_COMPILATION_CACHE_DIR says, or the user's cache folder) | off | a folder.
    compile_cache: str = "auto"
    # Seconds that processes wait for each other at the start.
    join_seconds: int = setting(300, at_least=1)
    # How many processes are enough then, where others do not come; 0 for all of them.
    # A run goes on on fewer hosts with the same batches and the same consensus.
    min_processes: int = setting(0, at_least=0)
    # Seconds without a sign of life after which a process counts as lost: all others
    # say so and end. jax itself gives up ten seconds later, and not before 100.
    silence_seconds: float = setting(60.0, at_least=1, at_most=3600)
    # Seconds that one phase, such as a step or a save, may take: after half of them a
    # warning shows what every thread does. 0 waits for ever. A phase may always take 20
    # times its median.
    stall_seconds: float = setting(3600.0, at_least=0)
    # Whether what a run will need later is compiled while its steps run: auto (unless
    # they run on CPU, where compiling takes cores from them) | on | off.
    compile_ahead: Literal["auto", "on", "off"] = "auto"
    # What else shows the metrics: `tensorboard` (event files in the run folder),
    # `trackio`, `wandb`; the last two with a project, as in `wandb:mine`, which is
    # prunex_jax otherwise. Each is an extra of its name.
    trackers: tuple[str, ...] = ()
    # Steps that jax's profiler traces into the run folder, as in 100:110: from when 100
    # are done until 110 are; empty for none.
    profile_steps: str = ""
