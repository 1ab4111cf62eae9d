"""A small table of texts that all processes of a run share, without collectives.

It is the key-value store of jax's coordination service, in process 0. jax has no public
name for it, nor for whether it has been used; this module asks for both.
"""

from typing import Any

import jax
from jax._src import distributed, xla_bridge

_PREFIX = "prunex_jax"


def is_used() -> bool:
    """Whether jax has been used, so that processes cannot be joined any more."""
    return xla_bridge.backends_are_initialized()


class StoreError(RuntimeError):
    """Raised when process 0, which keeps the table, does not answer."""


class Store:
    """The table; its calls wait for an answer of process 0, perhaps for long.

    Args:
      name: Keeps apart what has nothing to do with each other, such as two runs of one
        program.
    """

    def __init__(self, name: str) -> None:
        self._folder = f"{_PREFIX}/{name}"
        client: Any = distributed.global_state.client
        assert client is not None, "the processes have not been joined"
        self._client = client

    def exchange(self, key: str, text: str, seconds: float) -> list[str]:
        """Lets every process know a text of each; all call this.

        Args:
          key: Of this exchange, and of no other of the same store.
          text: Of this process.
          seconds: How long to wait for the others.
        Returns:
          The texts, in the order of processes.
        Raises:
          StoreError: Somebody does not come.
        """
        self.write(f"{key}/{distributed.global_state.process_id}", text)
        try:
            barrier = f"{self._folder}/{key}".replace("/", "-")
            self._client.wait_at_barrier(barrier, int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error)) from error
        found = self.read_all(key)
        return [found[process] for process in sorted(found, key=int)]

    def write(self, key: str, text: str) -> None:
        """Sets an entry.

        Raises:
          StoreError: There is no answer.
        """
        try:
            self._client.key_value_set(f"{self._folder}/{key}", text, True)
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error)) from error

    def read_all(self, folder: str) -> dict[str, str]:
        """Reads all entries whose key begins with `folder` and a slash.

        Returns:
          What follows the slash -> text.
        Raises:
          StoreError: There is no answer.
        """
        start = f"{self._folder}/{folder}/"
        try:
            found = self._client.key_value_dir_get(start)
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error)) from error
        return {key.rpartition("/")[2]: text for key, text in found}
