"""Writes an exported function as a folder, and reads it back.

    model.safetensors    parameters by path, float32 unless they were something else
    program.stablehlo    serialized `jax.export.Exported` of (arrays, *inputs)
    manifest.json        what the folder says of itself
    model.onnx           the function and its parameters for ONNX Runtime, if asked for

No file holds code of Python, and none is a pickle: arrays are plain bytes behind a JSON
header, the program is a flatbuffer. The folder appears at once, under its name, when
everything in it has been written and read back.

The manifest is strict JSON:

    format        1; readers refuse a later one
    files         file -> SHA-256
    program       how to call it: platforms, inputs, outputs, as in float32[batch,8,8,1]
    arrays        path -> type and shape
    channels      per group: name, original width `size`, `kept` positions
    certificate   what masked and shrunk function differ by; null if nothing was cut
    versions      of jax, this package, python and others, at the time of the export

and whatever the caller adds. `train.export` adds

    trained       workdir, step and method
    dataset       name; how images become inputs: `preprocessing`; `classes`
    metrics       summary.json of the run, if the export is of its end; `logged`: the
                  last row logged
    config        all settings, resolved
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.base.environment import versions
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import (
    digest_of,
    digests_of,
    expanded,
    find_damage,
    whole_folder,
)
from prunex_jax.base.imports import need_package
from prunex_jax.base.tensor_files import load_tensors, save_tensors
from prunex_jax.base.trees import PyTree
from prunex_jax.export.checks import (
    MOST_OF_MANIFEST,
    MOST_OF_PROGRAM,
    check_calls,
    check_file,
    check_memory,
    most_of_arrays,
)
from prunex_jax.export.onnx import check_onnx, make_onnx
from prunex_jax.export.program import (
    PLATFORMS,
    describe_shapes,
    fixed_batch_error,
    flat_arrays,
    load_program,
    make_program,
    one_more,
    plain_tree,
    runs_here,
    shape_word,
)
from prunex_jax.shrink import Certificate, Cut, certify

ARRAYS = "model.safetensors"
PROGRAM = "program.stablehlo"
MANIFEST = "manifest.json"
ONNX = "model.onnx"
# What programs are written as; the first is always there.
FORMATS = ("stablehlo", "onnx")
_FORMAT = 1
_OWN_KEYS = "format files program arrays channels certificate versions".split()
# Those that are read, and what they are.
_KINDS = {"files": dict, "program": dict, "arrays": dict, "versions": dict}
# What safetensors can give back as numpy arrays.
_STORABLE = (
    *("float32", "bfloat16", "float16", "float64", "complex64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
# The program and the function run the same operations. Compilers may order them
# otherwise, in low precision on some devices; parameters in wrong places give one.
_READBACK_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedModel:
    """A function read from a folder; call it with its inputs.

    Attributes:
      manifest: What the folder says of itself.
      arrays: Path -> parameter.
      program: (arrays, *inputs) -> outputs.
    """

    manifest: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    program: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        """Computes the outputs; compiled once per batch size.

        Raises:
          UserError: The program needs more memory than there is.
        """
        given = tuple(map(plain_tree, inputs))
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
            return self._run(self._placed, *given)  # Part of somebody's program.
        shapes = jax.tree.map(jax.typeof, given)
        key = jax.tree.structure(shapes), tuple(jax.tree.leaves(shapes))
        if key not in self._compiled:
            compiled = self._run.lower(self._placed, *given).compile()
            check_memory(compiled, jax.devices()[0])
            self._compiled[key] = compiled
        return self._compiled[key](self._placed, *given)

    @functools.cached_property
    def _run(self) -> Any:
        return jax.jit(self.program)

    @functools.cached_property
    def _compiled(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def _placed(self) -> Any:
        with jax.ensure_compile_time_eval():  # Also where it is first part of a trace.
            return jax.device_put(dict(self.arrays))


def export_model(
    folder: str | os.PathLike[str],
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    *,
    certificate: Certificate | None,
    cut: Cut | None = None,
    about: Mapping[str, Any] | None = None,
    fixed_batch: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    in_float32: Callable[..., PyTree] | None = None,
    overwrite: bool = False,
    format: str = "stablehlo",
) -> dict[str, Any]:
    """Writes a function and its parameters as a folder that runs without this package.

    Args:
      folder: Made, with its parents; must not exist, or be empty.
      apply: (params, *inputs) -> any tree of arrays: the small function.
      params: The small parameters.
      inputs: Examples or their shapes. First axes are the batch and become symbolic, so
        that the program takes any number of examples; `make_program` has the details.
        Given arrays, the written program is run and compared with `apply`.
      certificate: From `certify`, for what was cut; None if nothing was.
      cut: What was cut, for the manifest.
      about: Further sections of the manifest, JSON-able.
      fixed_batch: Export for the shapes of the inputs only.
      platforms: Lower for these, where that is possible.
      in_float32: `apply` with activations in float32, if it computes in bfloat16;
        `make_program` proves on it what rounding would hide.
      overwrite: Replace an earlier export. Nothing else is ever replaced.
      format: onnx writes model.onnx beside the rest, by the package jax2onnx; ONNX
        Runtime has to answer on the inputs as `apply` does.
    Returns:
      The manifest.
    Raises:
      UserError: The certificate is missing or does not hold, the folder exists or
        cannot be written, or the function cannot be exported.
    Example:
      >>> import tempfile
      >>> apply = lambda params, x: x @ params['kernel']
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     manifest = export_model(f'{parent}/model', apply,
      ...                             {'kernel': np.ones((2, 3), np.float32)},
      ...                             [np.ones((1, 2), np.float32)], certificate=None)
      ...     model = read_model(f'{parent}/model')
      >>> manifest['program']['inputs']
      ['float32[batch,2]']
      >>> model(np.ones((4, 2), np.float32)).shape
      (4, 3)
    """
    path = check_target(folder, overwrite)
    check_format(format)
    about = about or {}
    _check_proven(certificate, cut)
    _check_about(about)
    need_package("safetensors", "export", "An export")
    arrays = flat_arrays(params)
    _check_storable(arrays)
    program = make_program(
        apply,
        params,
        inputs,
        fixed_batch=fixed_batch,
        platforms=platforms,
        in_float32=in_float32,
    )
    onnx = None
    if format == "onnx":
        onnx = make_onnx(
            apply, params, inputs, fixed_batch=fixed_batch, in_float32=in_float32
        )
    try:
        with whole_folder(path) as unfinished:
            if onnx is not None:
                (unfinished / ONNX).write_bytes(onnx)
            (unfinished / PROGRAM).write_bytes(program.content)
            save_tensors(arrays, unfinished / ARRAYS)
            # It lets nobody but the owner read, whatever the user's umask.
            shutil.copymode(unfinished / PROGRAM, unfinished / ARRAYS)
            manifest = {
                "format": _FORMAT,
                **about,
                "channels": [] if cut is None else _kept_channels(cut),
                "certificate": None if certificate is None else certificate.as_dict(),
                "versions": versions(),
                "program": {"file": PROGRAM, **program.description},
                "arrays": {path: shape_word(x) for path, x in arrays.items()},
                "files": digests_of(unfinished),
            }
            content = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
            (unfinished / MANIFEST).write_text(content, encoding="utf-8")
            _check_readback(unfinished, apply, params, inputs, fixed_batch)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error}); choose a folder that can be written"
        ) from error
    return manifest


def read_model(
    folder: str | os.PathLike[str], *, trusted: bool = False
) -> ExportedModel:
    """Reads an exported function, after checking that its files are as written.

    The folder need not be trusted: files are regular and as large as the manifest says,
    nothing is unpickled, and the program calls nothing but libraries that compute
    numbers. It may take as long as it likes; one that needs more memory than the device
    has is refused when it is called.

    Args:
      folder: Made by `export_model`.
      trusted: Whether its program may call anything, such as kernels that it brings
        along, and callbacks into this process; and files may be links.
    Raises:
      UserError: It is no export, was damaged, calls what it may not, or this jax cannot
        read it.
    """
    path = expanded(folder)
    model, exported = _read(path, trusted)
    if not runs_here(exported):
        raise UserError(
            f"the program in {path} was made for {', '.join(exported.platforms)} and "
            "not for the device of this process; set JAX_PLATFORMS="
            f"{exported.platforms[0]}, or export it for this device"
        )
    return model


def read_arrays(
    folder: str | os.PathLike[str], *, links: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what an export holds beside its program, which need not run here.

    Args:
      folder: Made by `export_model`.
      links: Whether its files may be links to regular files, as in a cache.
    Returns:
      The manifest, and path -> parameter.
    Raises:
      UserError: It is no export, or was damaged.
    """
    path = expanded(folder)
    manifest = _read_manifest(path, links)
    wanted = {name: manifest["files"].get(name, "") for name in (ARRAYS, PROGRAM)}
    try:
        check_file(path / ARRAYS, most_of_arrays(manifest["arrays"]), links=links)
        check_file(path / PROGRAM, MOST_OF_PROGRAM, links=links)
        found = {
            name: digest_of(path / name) for name in wanted if (path / name).is_file()
        }
        damage = find_damage(wanted, found)
        if damage:
            raise UserError(f"{path} is damaged: {damage}; copy or export it again")
        return manifest, load_tensors(path / ARRAYS)
    except (OSError, ValueError, TypeError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        raise _cannot_read(path, error) from error


def check_target(folder: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Refuses to replace anything but an export, and that only if asked to.

    Raises:
      UserError: Something else is there, or an export that must not be replaced.
    """
    path = expanded(folder).resolve()
    if not path.exists():
        return path
    if not path.is_dir():
        raise UserError(f"{path} is a file; choose another folder")
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(names - {ARRAYS, PROGRAM, MANIFEST, ONNX})
    if foreign:
        raise UserError(
            f"{path} holds {foreign[0]}, which is not of an export; choose another "
            "folder"
        )
    if names and not overwrite:
        raise UserError(
            f"{path} holds an export already; choose another folder, or overwrite it "
            "(--overwrite)"
        )
    return path


def check_format(format: str) -> None:
    """Refuses a format that is not known, or whose packages are missing.

    Raises:
      UserError: It names the formats, or the package.
    """
    if format not in FORMATS:
        raise UserError(f"format={format!r} is none of {', '.join(FORMATS)}")
    if format == "onnx":
        check_onnx()


def _read(path: Path, trusted: bool) -> tuple[ExportedModel, Any]:
    """The function, and the program as jax knows it."""
    manifest, arrays = read_arrays(path, links=trusted)
    described = {name: shape_word(array) for name, array in arrays.items()}
    if described != manifest["arrays"]:
        raise UserError(
            f"{path} is damaged: {MANIFEST} describes other arrays than {ARRAYS} has; "
            "copy or export it again"
        )
    try:
        content = (path / PROGRAM).read_bytes()
    except OSError as error:
        raise _cannot_read(path, error) from error
    exported = load_program(content, manifest["versions"].get("jax"))
    if not trusted:
        check_calls(exported.mlir_module())
    for key, value in describe_shapes(exported).items():
        if manifest["program"].get(key) != value:
            raise UserError(
                f"{path} is damaged: {MANIFEST} says {key}="
                f"{str(manifest['program'].get(key))[:80]}, and the program has "
                f"{str(value)[:80]}; copy or export it again"
            )
    return ExportedModel(manifest, arrays, exported.call), exported


def _cannot_read(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read ({error}); copy or export it again")


def _read_manifest(folder: Path, links: bool) -> dict[str, Any]:
    check_file(folder / MANIFEST, MOST_OF_MANIFEST, links=links)
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text, object_pairs_hook=_without_repeats)
        written_as = manifest["format"]
        complete = all(key in manifest for key in _OWN_KEYS) and all(
            isinstance(manifest.get(key), kind) for key, kind in _KINDS.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        written_as, complete = _FORMAT, False
    if type(written_as) is not int or written_as != _FORMAT:
        raise UserError(
            f"{folder} has format {written_as} and this version reads {_FORMAT}; use "
            "the version of prunex_jax that wrote it"
        )
    if not complete:
        raise UserError(
            f"{folder} is no exported model: it has no readable {MANIFEST}; give a "
            "folder made by python -m prunex_jax export"
        )
    return manifest


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _check_proven(certificate: Certificate | None, cut: Cut | None) -> None:
    if certificate is not None:
        certificate.check()
    elif cut is not None and not all(np.all(mask) for mask in cut.masks.values()):
        raise UserError(
            "masks say that channels were cut and there is no certificate; give what "
            "prunex_jax.shrink.certify returns"
        )


def _check_about(about: Mapping[str, Any]) -> None:
    """Refuses sections that cannot be written, before long work."""
    for name, section in about.items():
        if name in _OWN_KEYS:
            raise UserError(
                f"about[{name!r}] would replace the manifest's own section; choose "
                "another name"
            )
        try:
            json.dumps(section, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"about[{name!r}] cannot be written as JSON ({error}); give finite "
                "numbers, strings, lists and dicts"
            ) from error


def _kept_channels(cut: Cut) -> list[dict[str, Any]]:
    """Name, original width and kept positions of every group."""
    return [
        {"name": name, "size": mask.size, "kept": np.flatnonzero(mask).tolist()}
        for name, mask in cut.masks.items()
    ]


def _check_storable(arrays: Mapping[str, np.ndarray]) -> None:
    for path, array in arrays.items():
        if array.dtype.name not in _STORABLE:
            raise UserError(
                f"parameter {path!r} is {array.dtype.name}, which safetensors does not "
                f"store; convert it to one of {', '.join(_STORABLE)}"
            )
        # Infinity may be meant, as in a mask of scores.
        if (
            jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
            and np.isnan(array).any()
        ):
            raise UserError(
                f"parameter {path!r} has what is not a number, so the network answers "
                "with none; export one that has not diverged"
            )


def _check_readback(
    folder: Path,
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    fixed_batch: bool,
) -> None:
    """Runs what was written, on one example more than it was traced for.

    Where there are only shapes, it is compiled and not run.
    """
    model, exported = _read(folder, trusted=True)
    given = list(inputs) if fixed_batch else one_more(inputs)
    if given is None or not runs_here(exported):
        return
    leaves = jax.tree.leaves(given)
    try:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            run = jax.jit(model.program)
            run.lower(dict(model.arrays), *map(plain_tree, given)).compile()
            return
        same = certify(
            apply,
            lambda arrays, *given: model.program(arrays, *map(plain_tree, given)),
            params,
            dict(model.arrays),
            given,
            take=lambda tree: tree,
            gradients=False,
            vary=False,
            forward_tolerance=_READBACK_TOLERANCE,
        )
    except UserError:
        raise
    except Exception as error:
        raise fixed_batch_error(error) from error
    if not same.forward_error <= same.forward_tolerance:
        raise UserError(
            f"the written program and the function differ by {same.forward_error:.2g} "
            "of the largest output; the function must compute the same whenever it is "
            "traced"
        )
