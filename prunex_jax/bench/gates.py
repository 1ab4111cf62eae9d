"""Gates: where the processes of a run wait for each other and for the runner.

A process that reaches a gate says what happened since the last one and goes on when the
runner says so; in between the runner reads the byte counters and sets the speed of the
links. One line of JSON each way, over two pipes that the process has inherited.
"""

import dataclasses
import json
import os
from typing import IO, Any, Protocol


class Gatekeeper(Protocol):
    """Where a process tells what happened and waits for its orders."""

    def arrive(self, **facts: Any) -> dict[str, Any]:
        """As `Gate.arrive`."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """The process's end of the pipes.

    Attributes:
      news: Lines to the runner.
      orders: Lines from it.
    """

    news: IO[str]
    orders: IO[str]

    @classmethod
    def of(cls, descriptors: str) -> "Gate":
        """Opens the inherited pipes.

        Args:
          descriptors: Their numbers, as in "5,6": to write to, to read from.
        """
        write, read = (int(number) for number in descriptors.split(","))
        return cls(os.fdopen(write, "w"), os.fdopen(read))

    def arrive(self, **facts: Any) -> dict[str, Any]:
        """Tells the runner what happened and waits until it lets the process on.

        Args:
          **facts: Plain values.
        Returns:
          The runner's orders.
        Raises:
          EOFError: The runner is gone.
        """
        self.news.write(json.dumps(facts) + "\n")
        self.news.flush()
        line = self.orders.readline()
        if not line:
            raise EOFError("the runner is gone")
        return dict(json.loads(line))
