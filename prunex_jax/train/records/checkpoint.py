"""Saves and restores the complete state of a run.

On disk, below the given directory (for a run: `checkpoints/`):

    6/                             One folder per kept step.
      state/                       Arrays in Orbax's format (OCDBT, zarr), each named
                                   by its path in the state; no container types, so
                                   a dict may become a NamedTuple between versions.
      manifest.json                `format`; `leaves`: path -> type and shape; `extra`:
                                   what the caller gave; `files`: file of state/ ->
                                   SHA-256.
    8.orbax-checkpoint-tmp/        A save that is being written, or that was killed;
                                   leftovers are removed when a Checkpointer opens.

The manifest is written after the arrays, and one rename shows both; a folder without a
manifest counts as a save that was killed. Orbax notices missing and cut files, but not
altered bytes, and reading damaged arrays with it leaves tasks behind that complain
later; so the files are compared with the manifest before Orbax sees them.

The V0 `CheckpointManager` of Orbax is used: the package exports it at its top, while V1
is still `experimental` and renamed functions as late as 0.12.0. Both run without
warnings and take the same time (120 leaves: 0.05 s blocking, 0.2 s in all).
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from prunex_jax.base.errors import AGREED, UserError, one_line
from prunex_jax.base.files import digests_of, find_damage, write_json
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.mesh import gather_texts

# Orbax is imported where it is used: the start screen need not wait for it.
if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_FORMAT = 1
_STATE = "state"
_MANIFEST = "manifest.json"
# Tensorstore, below Orbax, reports a full disk as ValueError.
_WRITE_ERRORS = (OSError, ValueError)
# How often the folder of a save that is waited for is looked at.
_LOOK_SECONDS = 1.0
# What odd content of a manifest raises, and Orbax where arrays do not fit it.
_READ_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)
_logger = logging.getLogger(__name__)
# From the `extra` of a checkpoint, and path -> type and shape of its leaves, to the
# state that it holds.
AbstractState = Callable[[Mapping[str, Any], Mapping[str, str]], PyTree]
# Parts of the optimizer state of H-SADMM, local SGD and DiLoCo, as they were called
# before its stages had states of their own -> as they are called now.
_FORMER_NAMES = {
    "masks": "channels/masks",
    "is_frozen": "channels/is_frozen",
    "num_changed": "channels/num_changed",
    "gradient_scores": "channels/gradient_scores",
    "error": "sending/error",
    "flight": "sending/flight",
    "global_consensus": "consensus/values",
    "outer_trace": "consensus/momentum",
    "movements": "consensus/movements",
    "host_consensus": "consensus/host/values",
    "host_dual": "consensus/host/dual",
    "device_dual": "consensus/device_dual",
    "rho_device": "consensus/rho_device",
    "rho_host": "consensus/rho_host",
}


class Checkpointer:
    """Keeps the newest checkpoints of one run in one folder.

    Saving is asynchronous: `save` copies the arrays, so that they may be donated at
    once, and writes them while training continues; at most one save is in flight. A
    process killed at any moment leaves the previous checkpoint or the new one complete.

    All processes of a run make the same calls in the same order, on a file system that
    all of them see. One run has one Checkpointer at a time: opening removes leftovers
    of killed saves. While it is open, Orbax logs warnings only.

    Args:
      directory: Folder of the checkpoints; made where it is missing.
      keep: Number of checkpoints that are kept, the newest ones.
      read_only: Leave the folder as it is, also where a run is writing to it; `save`
        does not work then.
    Raises:
      UserError: The folder cannot be used.
    Example:
      >>> import tempfile
      >>> state = {'weight': jax.numpy.arange(3.0)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpointer(Path(folder), keep=2) as checkpointer:
      ...         checkpointer.save(10, state, {'epoch': 1}, wait=True)
      ...         restored, extra = checkpointer.restore(state)
      >>> restored['weight'].tolist(), extra
      ([0.0, 1.0, 2.0], {'epoch': 1})
    """

    def __init__(self, directory: Path, keep: int = 1, *, read_only: bool = False):
        self._directory = Path(directory).absolute()
        # The step in flight and what its manifest will say.
        self._pending: tuple[int, dict[str, Any]] | None = None
        # Why the save in flight cannot be written, from the thread that writes it.
        self._failures: list[BaseException] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(_muted_orbax(self._failures.append))
            self._manager = self._open(keep, read_only)
            # None where nothing is saved, and the folder need not be there.
            self._opened = None if read_only else self._directory.stat()
            steps = self._manager.all_steps()
            sealed = _all_hold([self._is_sealed(step) for step in steps])
            self._muted = stack.pop_all()
        self._complete = {step for step, ok in zip(steps, sealed, strict=True) if ok}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None or issubclass(kind, AGREED):
            self.close()
        else:
            self.abandon()

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending."""
        return tuple(sorted(self._complete.intersection(self._manager.all_steps())))

    def latest_step(self) -> int | None:
        """Newest step that `restore` would try first; None when there is none."""
        return max(self.steps(), default=None)

    def newest_step(self) -> int | None:
        """Newest step that was given to `save`, also where it is still being written.

        It is complete when the Checkpointer is closed. None where there is none.
        """
        in_flight = () if self._pending is None else (self._pending[0],)
        return max((*self.steps(), *in_flight), default=None)

    def check(self) -> None:
        """Raises if the save in flight is known to have failed; waits for nothing.

        A process knows it of its own writing, and need not ask the others.

        Raises:
          UserError: The checkpoint in flight could not be written.
        """
        if self._pending is None or not self._failures:
            return
        failure, (step, _) = self._failures[0], self._pending
        self._pending = None
        if not isinstance(failure, _WRITE_ERRORS):
            raise failure
        raise self._cannot_write(step, failure) from failure

    def save(
        self, step: int, state: PyTree, extra: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Saves the state and `extra` together as the checkpoint of `step`.

        A step that has a checkpoint already is left as it is: the run determines the
        state of a step. Checkpoints newer than the one that `restore` returned belong
        to an abandoned course of the run; the first save deletes them.

        Args:
          step: Number of steps done; larger than that of every checkpoint kept.
          state: Tree of jax.Array, of any type including typed keys, in any sharding,
            also over several processes.
          extra: JSON-able; that of process 0 is written.
          wait: Return only when the checkpoint is complete.
        Raises:
          UserError: This or the previous checkpoint could not be written.
          ValueError: Newer checkpoints exist and none was restored.
          TypeError: A leaf is no jax.Array, or `extra` is not JSON-able.
        """
        import orbax.checkpoint as ocp

        self.wait()
        self._failures.clear()
        if step in self.steps():
            return
        newest = self.latest_step()
        if newest is not None and step < newest:
            raise ValueError(
                f"cannot save step {step} below the existing step {newest}; restore "
                "first, or start in an empty folder"
            )
        manifest = {
            "format": _FORMAT,
            "leaves": _describe_leaves(state),
            # A copy: the caller may change its dict while the save is in flight.
            "extra": json.loads(json.dumps(dict(extra))),
        }
        leaves = flatten_by_path(state)
        stored = {path: _key_data(leaf) for path, leaf in leaves.items() if leaf.size}
        try:
            for leftover in sorted(set(self._manager.all_steps()) - self._complete):
                self._manager.delete(leftover)
            self._pending = (step, manifest)
            args = ocp.args.Composite(state=ocp.args.StandardSave(stored))
            self._manager.save(step, args=args, force=True)
        except _WRITE_ERRORS as error:
            self._pending = None
            raise self._cannot_write(step, error) from error
        if wait:
            self.wait()

    def restore(
        self,
        abstract_state: PyTree | AbstractState,
        step: int | None = None,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Reads a checkpoint into the given shardings, bit for bit.

        Without `step` the newest checkpoint is read. Where that is damaged, a warning
        names it and the one before it is tried, by all processes together.

        Args:
          abstract_state: Tree of jax.ShapeDtypeStruct with sharding (or of arrays) with
            the paths, shapes and types of the saved state. Shardings may differ from
            those at saving. Or a function that makes the tree from the `extra` of the
            checkpoint being read and from what it says of its leaves, as in
            `float32[3,4]`, where shapes change in the course of a run. A leaf without
            sharding is read into host memory, whole, on every process.
          step: The checkpoint to read, without falling back.
        Returns:
          The state, and the `extra` saved with it.
        Raises:
          UserError: No checkpoint, none that can be read, or one of another state.
        """
        self.wait()
        candidates = self.steps()[::-1] if step is None else (step,)
        if not set(candidates) & set(self.steps()):
            which = "any step" if step is None else f"step {step}"
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(
                f"no checkpoint of {which} in {self._directory}; there is: {there}"
            )
        for candidate in candidates:
            restored = self._try_restore(candidate, abstract_state)
            if restored is not None:
                self._complete = {s for s in self._complete if s <= candidate}
                return restored
        tried = ", ".join(map(str, candidates))
        raise UserError(
            f"no readable checkpoint in {self._directory} (tried: {tried}); put back a "
            "copy of it, or start over with --fresh"
        )

    def wait(self) -> None:
        """Returns when no save is in flight.

        Raises:
          UserError: The checkpoint in flight could not be written.
        """
        if self._pending is None:
            return
        step, _ = self._pending
        try:
            self._wait_until_written()
            if _all_hold([self._is_sealed(step)])[0]:
                self._complete.add(step)
        except _WRITE_ERRORS as error:
            raise self._cannot_write(step, error) from error
        finally:
            self._pending = None

    def close(self) -> None:
        """Waits for the save in flight and releases what Orbax holds."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(*_WRITE_ERRORS):  # Again what `wait` reported.
                self._manager.close()
            self._muted.close()

    def abandon(self) -> None:
        """Leaves the save in flight, where other processes may be lost.

        One process writes it to its end. Of several none waits for the others: a save
        that not all of them complete counts as killed.
        """
        if jax.process_count() == 1:
            self.close()
        else:
            self._pending = None
            self._muted.close()

    def _wait_until_written(self) -> None:
        """Waits for the save in flight, as long as its folder is there.

        Of several processes Orbax lets all wait for ten minutes for a folder that was
        moved away, and the save may have made another of the same name.

        Raises:
          OSError: The folder is gone, or the save could not be written.
        """
        written: concurrent.futures.Future[None] = concurrent.futures.Future()

        def wait() -> None:
            try:
                self._manager.wait_until_finished()
                written.set_result(None)
            except BaseException as error:
                written.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        assert self._opened is not None, "saving into what is only read"
        while not concurrent.futures.wait([written], _LOOK_SECONDS).done:
            if not os.path.samestat(self._directory.stat(), self._opened):
                raise FileNotFoundError(errno.ENOENT, "the folder was moved away")
            # Orbax raises it only after a barrier, to which no other process comes.
            if self._failures:
                raise self._failures[0]
        written.result()

    def _open(self, keep: int, read_only: bool) -> "ocp.CheckpointManager":
        import orbax.checkpoint as ocp

        class Manager(ocp.CheckpointManager):
            def reached_preemption(self, step: int) -> bool:
                """Leaves this question to `StopRequest`, which counts otherwise.

                jax's service knows one counter: told two, it names a number that the
                loop never asks with, and the run does not stop.
                """
                del step
                return False

        if read_only:
            options = ocp.CheckpointManagerOptions(
                read_only=True, create=False, save_interval_steps=0
            )
            return Manager(self._directory, options=options)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            cleanup_tmp_directories=True,
            # Called on process 0 after all arrays are written, and before the oldest
            # checkpoint is deleted.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return Manager(self._directory, options=options)
        except OSError as error:
            message = f"cannot keep checkpoints in {self._directory} ({error})"
            raise UserError(f"{message}; choose another --workdir") from error

    def _is_sealed(self, step: int) -> bool:
        """Whether process 0 sees a complete checkpoint; the others trust it."""
        sealed = (self._directory / str(step) / _MANIFEST).is_file()
        return sealed or jax.process_index() != 0

    def _cannot_write(self, step: int, error: BaseException) -> UserError:
        reason = str(error).splitlines()[0]
        return UserError(
            f"cannot write the checkpoint of step {step} to {self._directory} "
            f"({reason}); free space or make it writable, then run the same command "
            "again"
        )

    def _seal(self) -> None:
        """Completes the checkpoint in flight by writing its manifest."""
        assert self._pending is not None
        step, manifest = self._pending
        folder = self._directory / str(step)
        if not folder.exists():  # Its temporary name, as of Orbax 0.12.8.
            folder = next(self._directory.glob(f"{step}.*"))
        manifest["files"] = digests_of(folder / _STATE)
        write_json(folder / _MANIFEST, manifest)

    def _try_restore(
        self, step: int, abstract_state: PyTree | AbstractState
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """Restores one checkpoint; None, on every process, if one finds it damaged."""
        folder = self._directory / str(step)
        manifest: dict[str, Any] = {}
        names: dict[str, str] = {}
        damage = ""
        try:
            manifest = _read_manifest(folder / _MANIFEST)
            names = {_name_now(path): path for path in manifest["leaves"]}
            manifest["leaves"] = {
                name: manifest["leaves"][path] for name, path in names.items()
            }
            if jax.process_index() == 0:  # Only this process reads the files.
                damage = find_damage(manifest["files"], digests_of(folder / _STATE))
        except _READ_ERRORS as error:
            damage = f"{_MANIFEST}: {error}"
        if _found_damage(folder, damage):
            return None
        try:
            if callable(abstract_state):
                abstract_state = abstract_state(manifest["extra"], manifest["leaves"])
            _check_same_leaves(manifest, abstract_state, folder)
        except UserError:  # Of another version, or other settings: not of damage.
            raise
        except _READ_ERRORS as error:
            damage = f"{_MANIFEST}, extra: {one_line(error)}"
        if _found_damage(folder, damage):
            return None
        restored: PyTree = None
        try:
            restored = self._read_state(step, abstract_state, names)
        except _READ_ERRORS as error:
            damage = f"{_STATE}: {one_line(error)}"
        if _found_damage(folder, damage):
            return None
        return restored, manifest["extra"]

    def _read_state(
        self, step: int, abstract_state: PyTree, names: Mapping[str, str]
    ) -> PyTree:
        """The arrays, of which every path is stored under the name that is given."""
        import orbax.checkpoint as ocp

        abstract = flatten_by_path(abstract_state)
        wanted = {
            names[path]: _abstract_data(x) for path, x in abstract.items() if x.size
        }
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        arrays = self._manager.restore(step, args=args)["state"]
        leaves = [
            _as_wanted(arrays.get(names[path]), x) for path, x in abstract.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def saved_steps(directory: Path) -> tuple[int, ...]:
    """Steps of the complete checkpoints in a folder, ascending, without opening it."""
    found = directory.glob(f"*/{_MANIFEST}")
    return tuple(sorted(int(p.parent.name) for p in found if p.parent.name.isdecimal()))


def newest_manifest(directory: Path) -> dict[str, Any]:
    """What the newest complete checkpoint says of itself; {} where none can be read.

    It reads no array, changes nothing, and may be called while a run writes.
    """
    for step in reversed(saved_steps(directory)):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return _read_manifest(directory / str(step) / _MANIFEST)
    return {}


def _read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says.

    Raises:
      OSError: It cannot be read.
      ValueError: It has not the form of one.
    """
    manifest = json.loads(path.read_text(encoding="utf-8"))
    kinds = {"leaves": dict, "extra": dict, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
            raise ValueError(f"it has no {key!r} by name")
    words = [*manifest["leaves"].values(), *manifest["files"].values()]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("'leaves' and 'files' are not of words")
    if "format" not in manifest:
        raise ValueError("it has no 'format'")
    return manifest


def _found_damage(folder: Path, damage: str) -> bool:
    """Whether a process has found damage, of which those that have it warn.

    Collectives:
      Those of `_all_hold`.
    """
    if _all_hold([not damage])[0]:
        return False
    if damage:
        _logger.warning("checkpoint %s is damaged: %s", folder, damage)
    return True


def _name_now(path: str) -> str:
    """What a leaf is called, which older checkpoints may call otherwise.

    Example:
      >>> _name_now('opt_state/global_consensus/kernel')
      'opt_state/consensus/values/kernel'
    """
    parts = path.split("/", 2)
    if parts[0] == "opt_state" and parts[1:] and parts[1] in _FORMER_NAMES:
        parts[1] = _FORMER_NAMES[parts[1]]
    return "/".join(parts)


def _describe_leaves(state: PyTree) -> dict[str, str]:
    """Path -> type and shape in one word, as in `float32[3,4]`."""
    described = {}
    for path, leaf in flatten_by_path(state).items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(f"leaf {path!r} is {type(leaf).__name__}, no jax.Array")
        described[path] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return described


def _check_same_leaves(
    manifest: Mapping[str, Any], abstract_state: PyTree, folder: Path
) -> None:
    """Refuses a checkpoint of another state, naming the first path that differs."""
    if manifest["format"] != _FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {manifest['format']}, this version reads "
            f"{_FORMAT}; use the version of prunex_jax that wrote it"
        )
    saved, wanted = manifest["leaves"], _describe_leaves(abstract_state)
    for path in (*wanted, *saved):
        there, here = saved.get(path, "absent"), wanted.get(path, "absent")
        if there != here:
            raise UserError(
                f"checkpoint {folder} does not fit this run: {path} is {there} there "
                f"and {here} here; use the settings, hosts and devices of the run that "
                "wrote it, another --workdir, or --fresh to start over"
            )


def _is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _abstract_data(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    """Shape, type and sharding of what is stored for a leaf."""
    if leaf.sharding is None:  # Orbax takes it as an example of what it is to give.
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _as_wanted(
    array: jax.Array | np.ndarray | None, leaf: Any
) -> jax.Array | np.ndarray:
    """The leaf made of what was stored for it."""
    if array is None and leaf.size:
        raise ValueError("an array is missing")
    if array is None:  # Without elements, thus not stored.
        empty = np.empty(leaf.shape, leaf.dtype)
        if leaf.sharding is None:
            return empty
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: empty[index]
        )
    if _is_key(leaf) and isinstance(array, jax.Array):
        impl = jax.random.key_impl(jax.numpy.empty((), leaf.dtype))
        return jax.random.wrap_key_data(array, impl=impl)
    return array


def _all_hold(conditions: Sequence[bool]) -> list[bool]:
    """Which of the conditions hold on every process.

    Collectives:
      Those of `mesh.gather_texts`.
    """
    said = gather_texts("".join("01"[bool(ok)] for ok in conditions))
    return ["0" not in answers for answers in zip(*said, strict=True)]


@contextlib.contextmanager
def _muted_orbax(hear: Callable[[BaseException], None]) -> Iterator[None]:
    """Drops 40 lines of Orbax for each save, and tracebacks of what `wait` raises.

    Args:
      hear: Given the errors of these tracebacks.
    """
    # Who asks for its logger first makes it: another than absl's does not know callers.
    from absl import logging as absl_logging

    def is_kept(record: logging.LogRecord) -> bool:
        is_asked_for = str(record.msg).startswith("Given directory is read only")
        is_noise = record.levelno < logging.WARNING or bool(record.exc_info)
        is_noise = is_noise or is_asked_for
        is_of_orbax = "orbax" in Path(record.pathname).parts
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_of_orbax and record.levelno >= logging.ERROR:
            hear(error)
        return not (is_noise and is_of_orbax)

    logger = absl_logging.get_absl_logger()
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)
