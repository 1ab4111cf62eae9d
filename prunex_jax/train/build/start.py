"""What a run starts from instead of a network drawn at random: trained weights.

`weights` reads them, from a file or from what a run folder says of the file; here they
become a network. Its widths are those of the arrays, so that a network that was shrunk
trains on as it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.channels import ChannelTrace, layouts_of
from prunex_jax.models import Model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.weights import Tensors, to_ours
from prunex_jax.models.weights.files import SETTING
from prunex_jax.shrink import make_cut, trace_model
from prunex_jax.train.steps.state import whole_tree

Shape = tuple[int, ...]
# Layout of what this package has written; others are those of `models.weights`.
OURS = "prunex_jax"
# Parts of a path that hold the logits of classes, last axis of the leaf.
_HEADS = ("classifier", "head")


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Trained weights, or what a run folder remembers of them."""

    source: str  # What the user called them.
    layout: str  # `OURS`, or "" where the names will tell.
    digests: Mapping[str, str]  # File -> SHA-256.
    # Path, as of exports -> shape; {} if they are not ours.
    shapes: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    # Channel group -> its size and the positions that are left, of ours.
    kept: Mapping[str, tuple[int, Sequence[int]]] = dataclasses.field(
        default_factory=dict
    )
    tensors: Tensors | None = None  # None where a checkpoint has what became of them.

    def record(self) -> dict[str, Any]:
        """Plain values for the run folder; `of_record` inverts it but for arrays."""
        record = dataclasses.asdict(dataclasses.replace(self, tensors=None))
        del record["tensors"]
        return record

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """Reads what a run folder remembers."""
        shapes = {path: tuple(shape) for path, shape in record["shapes"].items()}
        kept = {name: (size, at) for name, (size, at) in record["kept"].items()}
        return cls(**{**record, "shapes": shapes, "kept": kept})


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """The network that a run starts from."""

    weights: Weights  # Where it comes from.
    model: Model  # Its functions, with the widths of the arrays.
    # Path, as of exports -> array; leaves without one are drawn. Empty where a
    # checkpoint has them.
    arrays: Mapping[str, np.ndarray]
    described: tuple[str, ...]  # What is worth saying, one line each.


def make_start(weights: Weights, model: Model, config: ModelConfig) -> Start:
    """Fits trained weights to the network that settings name.

    Raises:
      UserError: They are those of another network.
    """
    if weights.layout == OURS:
        return _start_of_ours(weights, model, config.name)
    if weights.tensors is None:
        return Start(weights, model, {}, ())
    leaves = _leaves(model)
    short = {path.partition("/")[2]: path for path in leaves}
    shapes = {path: leaves[whole] for path, whole in short.items()}
    converted = to_ours(weights.tensors, shapes, weights.source, config)
    arrays = {short[path]: array for path, array in converted.arrays.items()}
    fresh = tuple(short[path] for path in converted.fresh)
    notes = (f"{converted.layout}, {len(arrays)} arrays", *converted.notes)
    return Start(weights, model, arrays, (*notes, *_of_fresh(fresh)))


def _start_of_ours(weights: Weights, model: Model, name: str) -> Start:
    problem = f"{SETTING}={weights.source!r} does not fit config.model.name={name!r}"
    full = _leaves(model)
    for path in full:
        if path not in weights.shapes:
            near = suggest(path, weights.shapes.keys() - full.keys())
            raise UserError(f"{problem}: {path} is missing in it{near}")
    for path in weights.shapes:
        if path not in full:
            raise UserError(f"{problem}, which has no {path}")
    small = _with_widths(model, weights, problem)
    wanted = _leaves(small)
    fresh = []
    for path, shape in wanted.items():
        there = weights.shapes[path]
        if there == shape:
            continue
        if not _is_other_head(path, there, shape):
            raise UserError(
                f"{problem}: {path} is {list(there)} in it and {list(shape)} with "
                "these settings; name the model that it was trained as"
            )
        fresh.append(path)
    arrays = {} if weights.tensors is None else weights.tensors.arrays
    taken = {path: arrays[path] for path in arrays if path not in fresh}
    said = [f"{len(wanted) - len(fresh)} arrays", *_of_fresh(fresh)]
    if small != model:
        said.insert(1, "with its own widths, which are not those of the settings")
    return Start(weights, small, taken, tuple(said))


def _with_widths(model: Model, weights: Weights, problem: str) -> Model:
    """The network with the widths of the arrays."""
    if all(
        there == shape or _is_other_head(path, there, shape)
        for path, shape in _leaves(model).items()
        for there in [weights.shapes[path]]
    ):
        return model
    try:
        trace = trace_model(model)
        masks = _masks_by_kept(weights)
        if model.functions.is_uniform:
            masks = _masks_by_widths(weights, trace)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return model.after(make_cut(trace, masks, *shapes))
    except UserError as error:
        raise UserError(
            f"{problem}: it was shrunk, and that cannot be done again here ({error}); "
            "start from its full network"
        ) from error


def _masks_by_kept(weights: Weights) -> dict[str, np.ndarray]:
    """Channels that are left, by what was written with the arrays."""
    return {
        name: np.isin(np.arange(size), at)
        for name, (size, at) in weights.kept.items()
        if len(at) < size
    }


def _masks_by_widths(weights: Weights, trace: ChannelTrace) -> dict[str, np.ndarray]:
    """As many of the first channels of every group as the arrays have.

    What was shrunk more than once has no positions in the full network, and needs none
    where channels are computed alike.
    """
    masks = {}
    for path, axes in layouts_of(trace.groups, trace.shapes).items():
        sizes = weights.shapes[f"params/{path}"]
        for axis, size in enumerate(sizes):
            for name, positions in axes[axis].slices if axis in axes else ():
                count = (size - len(axes[axis].free)) // positions.shape[1]
                masks[name] = np.arange(len(positions)) < max(count, 1)
    return masks


def _leaves(model: Model) -> dict[str, Shape]:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return shapes_by_path(whole_tree(*shapes))


def _is_other_head(path: str, there: Shape, here: Shape) -> bool:
    """Whether a classifier differs in the number of its classes and no more."""
    is_head = any(part in _HEADS for part in path.split("/")[:-1])
    return is_head and len(there) == len(here) and there[:-1] == here[:-1]


def _of_fresh(fresh: Sequence[str]) -> list[str]:
    if not fresh:
        return []
    names = ", ".join(path.partition("/")[2] for path in fresh)
    return [f"{names} start fresh, for another number of classes"]
