"""A drill on a cluster: every process of its launcher is the supervisor of one."""

import time
from collections.abc import Callable, Sequence

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import read_object, write_json
from prunex_jax.compare.drill.crew import PLAN_FILE, Crew, DrillFailedError, described
from prunex_jax.compare.drill.plan import Plan
from prunex_jax.compare.drill.supervisor import Supervisor
from prunex_jax.compare.drill.table import RESULT_FILE

_LOOK_SECONDS = 0.1


def run_on_cluster(
    process: int, plans: Sequence[Plan], crew: Crew, say: Callable[[str], None]
) -> None:
    """Looks after one process of every run; the other supervisors do the same.

    Raises:
      UserError: The folder holds a drill, or another one than this.
      DrillFailedError: Another process of the drill does not go on.
    """
    _meet(process, plans, crew)
    supervisor = Supervisor(process, crew, say)
    try:
        supervisor.run(plans)
    finally:
        supervisor.kill()


def _meet(process: int, plans: Sequence[Plan], crew: Crew) -> None:
    """Waits until process 0 has written the plan, and compares it with one's own."""
    file, wanted = crew.workdir / PLAN_FILE, described(plans, crew)
    is_first = process == 0
    if (crew.workdir / RESULT_FILE).exists() or (is_first and file.exists()):
        raise UserError(f"{crew.workdir} holds a drill already; name a new --workdir")
    if is_first:
        crew.workdir.mkdir(parents=True, exist_ok=True)
        write_json(file, wanted)
        return
    deadline = time.monotonic() + crew.limit_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise DrillFailedError(
                f"process 0 of the drill has not written {file}: it does not run, or "
                "the folder is not shared"
            )
        time.sleep(_LOOK_SECONDS)
    if read_object(file) != wanted:
        raise UserError(f"{file} is of a drill with other flags; give all the same")
