"""Turns a function into a StableHLO program of flat arrays, and back.

Parameters cross as one flat dict from path to array, so that whoever can read the
arrays can call the program. An input or output that is one array stays one; any other
tree is a flat dict by path as well, which keeps the classes of trees out of the file.

The batch is symbolic. Some functions cannot be traced with one, because they look at
every size, as the shrunk functions of `shrink` do; where examples do not influence each
other, such a function of one example is mapped over the batch instead.

How long a program can be read is up to jax: by versions up to six months newer and
three weeks older than the one that wrote it, as https://docs.jax.dev/en/latest/export/
export.html#compatibility-guarantees says. The arrays have no such limit.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.imports import need_package
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.shrink import certify

# What a program is lowered for, wherever that is possible.
PLATFORMS = ("cpu", "cuda", "tpu")
# jax's setting for the folders of source files, which the program would name.
_SOURCE_FILES = "jax_hlo_source_file_canonicalization_regex"


@dataclasses.dataclass(frozen=True, eq=False)
class SerializedProgram:
    """A program that can be written to a file."""

    content: bytes  # The file's bytes.
    # Platforms, batch, inputs and outputs, as plain values.
    description: Mapping[str, Any]


def flat_arrays(params: PyTree) -> dict[str, np.ndarray]:
    """Lists parameters by path, as they are stored and given to the program.

    Returns:
      Path -> array on the host, contiguous.
    Raises:
      UserError: Two leaves share a path, or a leaf is no array of numbers.
    Example:
      >>> list(flat_arrays({'dense': {'kernel': np.ones((2, 3))}}))
      ['dense/kernel']
    """
    _check_paths(params, "parameters")
    arrays = {}
    for path, leaf in flatten_by_path(params).items():
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.extended):
            raise UserError(
                f"parameter {path!r} is {leaf.dtype}, which is no array of numbers; "
                "give jax.random.key_data of it"
            )
        array = np.asarray(jax.device_get(leaf))
        # In the type in which jax computes. Files hold values in order, whatever the
        # order in memory.
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        arrays[path] = np.asarray(array, dtype, order="C")
    return arrays


def make_program(
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    *,
    fixed_batch: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    in_float32: Callable[..., PyTree] | None = None,
) -> SerializedProgram:
    """Traces a function and lowers it.

    Args:
      apply: (params, *inputs) -> any tree of arrays.
      params: Arrays, or their shapes.
      inputs: Arrays, or their shapes. The first axis of each is the batch and becomes
        symbolic; inputs without axes are left as they are. If any shape has symbolic
        dimensions (`jax.export.symbolic_shape`), all are used as they are given. A
        function that cannot be traced with a symbolic batch is mapped over examples,
        if arrays are given and prove on them that this is the same.
      fixed_batch: Keep all shapes as they are.
      platforms: Lower for these; those that fail are left out, but for that of the
        current device.
      in_float32: `apply` without its rounding to fewer digits, to prove things on.
    Returns:
      The program, called as (flat_arrays(params), *inputs).
    Raises:
      UserError: The function cannot be lowered at all, or only for a fixed batch.
    """
    for index, tree in enumerate(inputs):
        _check_paths(tree, f"input {index}")
    fixed = [jax.tree.map(_shape_of, tree) for tree in inputs]
    ways = symbolic_functions(apply, params, inputs, fixed_batch, in_float32)
    _, shapes = next(ways)
    need_package("flatbuffers", "export", "An export")
    flat = {path: _shape_of(leaf) for path, leaf in flatten_by_path(params).items()}

    def lower(apply: Callable[..., PyTree], inputs: Sequence[PyTree]) -> Any:
        return _lower(_of_flat_arrays(apply, params, fixed), flat, inputs, platforms)

    with _without_source_folders():
        is_mapped = False
        try:
            exported = lower(apply, shapes)
        except Exception as error:
            if not _is_possible(lower, apply, fixed):
                raise UserError(
                    f"the function cannot be exported ({one_line(error, 200)}); it "
                    "must be traceable by jax.jit with these parameters and inputs, "
                    "and use operations that jax.export allows"
                ) from error
            mapped, _ = next(ways, (None, shapes))
            if mapped is None or not _is_possible(lower, mapped, shapes):
                raise fixed_batch_error(error) from error
            exported, is_mapped = lower(mapped, shapes), True
        if exported.nr_devices != 1:
            raise UserError(
                f"the function runs on {exported.nr_devices} devices; export one that "
                "runs on a single device, outside of shard_map and meshes"
            )
        content = bytes(exported.serialize())
    return SerializedProgram(content, _describe(exported, is_mapped))


def symbolic_functions(
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    fixed_batch: bool,
    in_float32: Callable[..., PyTree] | None,
) -> Iterator[tuple[Callable[..., PyTree], Sequence[PyTree]]]:
    """The ways in which a function may be traced, with shapes of its inputs.

    Yields:
      The function; then, if the batch is free, what `_mapped_over_examples` proves.
    """
    fixed = [jax.tree.map(_shape_of, tree) for tree in inputs]
    shapes = fixed if fixed_batch else _with_symbolic_batch(fixed)
    yield apply, shapes
    if not fixed_batch:
        mapped = _mapped_over_examples(apply, params, inputs, in_float32 or apply)
        if mapped is not None:
            yield mapped, shapes


def load_program(content: bytes, written_by: str | None) -> export.Exported:
    """Reads a program.

    Raises:
      UserError: This jax cannot read it.
    """
    need_package("flatbuffers", "export", "Reading an exported program")
    try:
        exported = export.deserialize(bytearray(content))
        if written_by != jax.__version__:
            exported.mlir_module()  # Otherwise read at the first call only.
        return exported
    except Exception as error:
        raise UserError(
            f"jax {jax.__version__} cannot read the program, which jax "
            f"{written_by or 'of unknown version'} wrote ({one_line(error, 200)}); use "
            "that version, or export again with this one"
        ) from error


def runs_here(exported: export.Exported) -> bool:
    """Whether a program was made for the current device."""
    return export.default_export_platform() in exported.platforms


def plain_tree(tree: PyTree) -> PyTree:
    """Gives a tree as programs take it: one array as it is, others as a flat dict.

    Example:
      >>> plain_tree({'image': {'left': 1, 'right': 2}})
      {'image/left': 1, 'image/right': 2}
      >>> plain_tree(3)
      3
    """
    return tree if _is_one(jax.tree.structure(tree)) else flatten_by_path(tree)


def _of_flat_arrays(
    apply: Callable[..., PyTree], params: PyTree, inputs: Sequence[PyTree]
) -> Callable[..., PyTree]:
    """The same function of flat dicts."""
    paths = list(flatten_by_path(params))
    structure = jax.tree.structure(params)
    inner = [(list(flatten_by_path(x)), jax.tree.structure(x)) for x in inputs]

    def fn(arrays: Mapping[str, Any], *given: Any) -> PyTree:
        tree = jax.tree.unflatten(structure, [arrays[path] for path in paths])
        trees = [
            x if _is_one(s) else jax.tree.unflatten(s, [x[path] for path in names])
            for x, (names, s) in zip(given, inner, strict=True)
        ]
        outputs = apply(tree, *trees)
        _check_paths(outputs, "outputs")
        return plain_tree(outputs)

    return fn


def _lower(
    fn: Callable[..., PyTree],
    arrays: Mapping[str, Any],
    inputs: Sequence[PyTree],
    platforms: Sequence[str],
) -> export.Exported:
    """Exports for all platforms for which that is possible.

    Raises:
      Exception: What jax raises, if it is not possible for the current one.
    """

    def run(platforms: Sequence[str]) -> export.Exported:
        exporter = export.export(jax.jit(fn), platforms=tuple(platforms))
        return exporter(arrays, *map(plain_tree, inputs))

    try:
        return run(platforms)
    except Exception:
        here = run([export.default_export_platform()])
    possible = []
    for platform in platforms:
        with contextlib.suppress(Exception):
            run([platform])
            possible.append(platform)
    with contextlib.suppress(Exception):
        return run(possible)
    return here


def _is_possible(
    lower: Callable[..., Any], apply: Callable[..., PyTree], inputs: Sequence[PyTree]
) -> bool:
    try:
        lower(apply, inputs)
    except Exception:
        return False
    return True


def _describe(exported: export.Exported, is_mapped: bool) -> dict[str, Any]:
    """What a reader has to know to call the program."""
    return {
        "call": "jax.export.deserialize(bytearray(content)).call(arrays, *inputs)",
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "is_mapped_over_examples": is_mapped,
        **describe_shapes(exported),
    }


def describe_shapes(exported: export.Exported) -> dict[str, Any]:
    """Types and shapes of inputs and outputs, as JSON can hold them."""
    (_, *inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    described = [jax.tree.map(shape_word, tree) for tree in inputs]
    found = {"inputs": described, "outputs": jax.tree.map(shape_word, outputs)}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def shape_word(shaped: Any) -> str:
    """Type and shape in one word, as in `float32[batch,32,32,3]`."""
    return f"{shaped.dtype}[{','.join(map(str, shaped.shape))}]"


def _is_one(structure: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(structure)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _check_paths(tree: PyTree, what: str) -> None:
    num_leaves, num_paths = len(jax.tree.leaves(tree)), len(flatten_by_path(tree))
    if num_leaves != num_paths:
        raise UserError(
            f"{num_leaves} arrays of the {what} have {num_paths} different paths; "
            "rename keys that contain a slash or differ in type only"
        )


@contextlib.contextmanager
def _without_source_folders() -> Iterator[None]:
    """Keeps folder names of this machine out of the program; it names files only."""
    before = getattr(jax.config, _SOURCE_FILES)
    jax.config.update(_SOURCE_FILES, r".*/")
    try:
        yield
    finally:
        jax.config.update(_SOURCE_FILES, before)


def _with_symbolic_batch(shapes: Sequence[PyTree]) -> list[PyTree]:
    """Replaces first axes by a symbolic size.

    Returns:
      The same, of any batch size; as they are, if the caller has made some symbolic.
    Raises:
      UserError: First axes differ, so that the batch is not known.
    """
    leaves = [x for x in jax.tree.leaves(list(shapes)) if x.shape]
    if any(map(_is_symbolic, leaves)):
        return list(shapes)
    sizes = sorted({x.shape[0] for x in leaves})
    if len(sizes) > 1:
        raise UserError(
            f"inputs have first axes of {sizes[0]} and {sizes[1]}, so which of them is "
            "the batch is not clear; give shapes with jax.export.symbolic_shape, or "
            "fixed_batch=True"
        )
    (batch,) = export.symbolic_shape("batch")

    def widen(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) if x.shape else x

    return jax.tree.map(widen, list(shapes))


def one_more(inputs: Sequence[PyTree]) -> list[PyTree] | None:
    """Gives inputs one example more, to try a program at another batch size.

    A function may be lowered for any batch and hold a fixed one all the same, say in a
    reshape: jax finds out only when the program is compiled for another one.

    Returns:
      Inputs whose last example is there twice, or their shapes; None if shapes have
      symbolic dimensions of the caller's.
    Example:
      >>> one_more([np.array([1, 2])])[0].tolist()
      [1, 2, 2]
    """
    if any(map(_is_symbolic, jax.tree.leaves(list(inputs)))):
        return None

    def more(x: Any) -> Any:
        if not np.ndim(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)
        return jnp.concatenate([x, x[-1:]])

    return jax.tree.map(more, list(inputs))


def _mapped_over_examples(
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    proven: Callable[..., PyTree],
) -> Callable[..., PyTree] | None:
    """Makes a function of a batch from what it computes of single examples.

    Returns:
      A function of the same arguments that traces `apply` for one example whatever the
      batch; None if it is not the same, or nothing is there to prove it with.
    Example:
      >>> apply = lambda params, x: x * params
      >>> mapped = _mapped_over_examples(apply, 2.0, [np.ones((3, 2))], apply)
      >>> mapped(2.0, np.ones((5, 2))).shape
      (5, 2)
      >>> apply = lambda params, x: x - x.mean(0, keepdims=True)
      >>> _mapped_over_examples(apply, 2.0, [np.eye(3)], apply) is None
      True
    """
    leaves = jax.tree.leaves((params, list(inputs)))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None

    def mapped(apply: Callable[..., PyTree], params: PyTree, *inputs: PyTree) -> PyTree:
        axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, inputs)
        batched = jax.tree.map(lambda x: bool(np.ndim(x)), inputs)

        def of_one(*rows: PyTree) -> PyTree:
            batch = jax.tree.map(
                lambda x, is_in: x[None] if is_in else x, rows, batched
            )
            return jax.tree.map(_only, apply(params, *batch))

        return jax.vmap(of_one, in_axes=axes)(*inputs)

    try:
        same = certify(
            proven,
            functools.partial(mapped, proven),
            params,
            params,
            one_more(inputs) or [],
            take=lambda tree: tree,
            gradients=False,
            vary=False,
        )
    except Exception:
        return None
    return functools.partial(mapped, apply) if same.is_equal else None


def fixed_batch_error(error: Exception) -> UserError:
    """Says that a function can be exported for one batch size only."""
    return UserError(
        "the function cannot be exported for batches of any size "
        f"({one_line(error, 200)}); its program holds a fixed one: give "
        "fixed_batch=True to export it for the size of the inputs given"
    )


def _only(y: jax.Array) -> jax.Array:
    """What an output says of the only example of a batch."""
    if y.shape[:1] != (1,):
        raise ValueError(f"output {y.shape} does not have the batch in front")
    return y[0]


def _is_symbolic(leaf: Any) -> bool:
    return any(map(export.is_symbolic_dim, np.shape(leaf)))
