"""Keeps a second run out of a run folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from prunex_jax.base.errors import UserError


@contextlib.contextmanager
def alone_in(workdir: Path | str, is_primary: bool) -> Iterator[None]:
    """Keeps a second run out of a folder, which would spoil the first.

    The folder is locked until the context is left or the process has ended, however it
    ends. File systems that cannot lock, such as some of networks, keep nobody out.

    Args:
      workdir: A run folder, made if it is missing.
      is_primary: Whether this process writes; others do nothing.
    Raises:
      UserError: Another process trains into it.
    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, alone_in(folder, True):
      ...     with alone_in(folder, True):  # doctest: +ELLIPSIS
      ...         pass
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: --workdir=... is in use: ...
    """
    if not is_primary:
        yield
        return
    path = Path(workdir).expanduser().absolute()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--workdir={workdir} is in use: another process trains into it; wait "
                "for its end, stop it, or choose another folder"
            ) from error
        except OSError:
            pass  # What cannot be made or read is refused by `RunFolder.open`.
        yield
