"""Starts the processes of a run, and knows who is there, alive and slow.

In: flags, the environment and the settings `topology.*`. Out: processes that jax has
joined, and a heartbeat that ends all of them when one is lost. In reading order:

    launcher           several processes? which is this, and which GPUs are its own?
    environments       what each launcher says in environment variables
    gpus               which GPUs of a machine a process takes, none of them twice
    registry           where one process takes down who is there
    rendezvous         waits for all processes, and says for whom
    start              acts on the answer, before jax computes anything
    compilation_cache  what jax has compiled stays on disk for the next process
    memory             what jax frees on CPU stays for its next step
    store              a table of texts that the processes share, without collectives
    stragglers         which processes are slow, from what their own steps take
    heartbeat          who is lost, and where: ends all instead of waiting for ever
"""

from prunex_jax.processes.compilation_cache import keep_compiled
from prunex_jax.processes.heartbeat import Heartbeat, Limits
from prunex_jax.processes.launcher import Launch, LaunchFlags
from prunex_jax.processes.memory import keep_freed_memory
from prunex_jax.processes.registry import LastStart
from prunex_jax.processes.start import start_processes
from prunex_jax.processes.stragglers import StepTimes

__all__ = [
    "Heartbeat",
    "LastStart",
    "Launch",
    "LaunchFlags",
    "Limits",
    "StepTimes",
    "keep_compiled",
    "keep_freed_memory",
    "start_processes",
]
