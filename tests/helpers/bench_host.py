"""Stands in for a host process of a study: says at its gates what it is told to say.

    python bench_host.py --spec=FILE --gate=W,R --process_id=I ...

Steps of host i last 1 + i seconds, by its word; nothing is computed.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.links.gates import Gate


def main() -> None:
    """Passes the gates of every spec."""
    flags = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
    host = int(flags["process_id"])
    gate = Gate.of(flags["gate"])
    for spec in json.loads(Path(flags["spec"]).read_text()):
        done = 0
        for boundary in spec["boundaries"]:
            steps, done = boundary - done, boundary
            if spec["config"]["seed"] == 13 and host == 1:
                # As an error does that leaves main: the gate closes, then it is said.
                del gate
                time.sleep(0.3)
                sys.exit("out of luck")
            if spec["config"]["seed"] == 99:
                time.sleep(60)
            gate.arrive(
                event="pause",
                step=done,
                seconds=[1.0 + host + (100.0 if n == 0 else 0.0) for n in range(steps)],
                traced_bytes=1000.0 * steps,
                formula_bytes=1000.0 * steps,
                hops=4.0 * steps,
                dense_bytes=5e6,
            )
            value = done / 100 if spec["metric"] else None
            gate.arrive(event="resume", value=value)
        gate.arrive(event="done")


if __name__ == "__main__":
    main()
