"""A small table of texts that all processes of a run share, without collectives.

It is the key-value store of jax's coordination service, in process 0. jax has no public
name for it, nor for whether it has been used; this module asks for both.
"""

import contextlib
from collections.abc import Iterator
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

    `name` keeps apart what has nothing to do with each other, as two runs of one
    program.
    """

    def __init__(self, name: str) -> None:
        self._folder = f"{_PREFIX}/{name}"
        client: Any = distributed.global_state.client
        assert client is not None, "the processes have not been joined"
        self._client = client

    def exchange(self, key: str, text: str, seconds: float) -> list[str]:
        """The texts of all processes, in their order; all call this with one key, once.

        Raises:
          StoreError: Somebody does not come within so many seconds.
        """
        self.write(f"{key}/{distributed.global_state.process_id}", text)
        barrier = f"{self._folder}/{key}".replace("/", "-")
        with _answered():
            self._client.wait_at_barrier(barrier, int(1000 * seconds))
        found = self.read_all(key)
        return [found[process] for process in sorted(found, key=int)]

    def write(self, key: str, text: str) -> None:
        """Sets an entry."""
        with _answered():
            self._client.key_value_set(f"{self._folder}/{key}", text, True)

    def read_all(self, folder: str) -> dict[str, str]:
        """Entries whose key begins with `folder` and a slash, by what follows it."""
        with _answered():
            found = self._client.key_value_dir_get(f"{self._folder}/{folder}/")
        return {key.rpartition("/")[2]: text for key, text in found}


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Raises StoreError where process 0 does not answer."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise StoreError(str(error)) from error
