"""Finds the layout of a file by its names, and makes our arrays of its tensors."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.models.weights.files import SETTING, Tensors
from prunex_jax.models.weights.llama import LLAMA
from prunex_jax.models.weights.resnets import RESNET
from prunex_jax.models.weights.table import Layout, Place, Shape

LAYOUTS: tuple[Layout, ...] = (RESNET, LLAMA)


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """What the tensors of a file are to a network of ours.

    Attributes:
      layout: What the layout is called.
      arrays: Path of a parameter or statistic -> float32 of its shape.
      fresh: Paths of what starts fresh, because only its number of classes differs.
      notes: What else is worth saying, one line each.
    """

    layout: str
    arrays: Mapping[str, np.ndarray]
    fresh: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def to_ours(
    tensors: Tensors, leaves: Mapping[str, Shape], source: str, model: str
) -> Converted:
    """Makes the arrays of a network of the tensors of a file.

    Args:
      tensors: What the file holds.
      leaves: Path -> shape of the parameters and statistics of the network.
      source: What the user called the file, for messages.
      model: What the user called the network.
    Returns:
      An array for every leaf, but for those that start fresh.
    Raises:
      UserError: No layout has such names; a tensor is missing, is one too many, or has
        another shape; or the network is of another family.
    Example:
      >>> tensors = Tensors({'fc.weight': np.ones(1)}, {}, {})
      >>> to_ours(tensors, {}, 'a', 'resnet20')  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: config.model.weights='a' has names of no ...
    """
    layout = _layout_of(tensors, source)
    by_name = layout.clean_names(tuple(tensors.arrays))
    found = {clean: tensors.arrays[name] for name, clean in by_name.items()}
    places = layout.places(leaves)
    problem = f"{SETTING}={source!r} is a {layout.name}"
    misfit = f"{problem} that does not fit config.model.name={model!r}"
    placed = {path for place in places for path in place.shapes}
    for path in leaves:
        if path not in placed:
            raise UserError(
                f"{problem}, which has nothing for {path} of config.model.name="
                f"{model!r}; name the model that these weights are of"
            )
    _check_names(found, places, misfit)
    _check_facts(layout, tensors.config, problem)
    arrays: dict[str, np.ndarray] = {}
    fresh: list[str] = []
    notes: list[str] = []
    for place in places:
        name = place.name if place.name in found else place.instead
        tensor = found[name]
        if tensor.shape != place.shape:
            resized = place.row.resize and place.row.resize(tensor, place.shape)
            if _is_other_head(place, tensor.shape):
                fresh += place.shapes
                continue
            if not isinstance(resized, np.ndarray):
                raise UserError(
                    f"{problem}: {name} is {list(tensor.shape)} there and would be "
                    f"{list(place.shape)} for config.model.name={model!r} with these "
                    "settings; change config.model or config.data to those of the file"
                )
            notes.append(
                f"{name} is interpolated from {list(tensor.shape)} to "
                f"{list(place.shape)}"
            )
            tensor = resized
        arrays |= place.read(tensor)
    return Converted(layout.name, arrays, tuple(fresh), tuple(notes))


def _layout_of(tensors: Tensors, source: str) -> Layout:
    names = tuple(tensors.arrays)
    for layout in LAYOUTS:
        if layout.is_of(names):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    such = f", such as {names[0]!r}" if names else ""
    raise UserError(
        f"{SETTING}={source!r} has names of no known layout{such}; known are {known}"
    )


def _check_names(
    found: Mapping[str, np.ndarray], places: list[Place], problem: str
) -> None:
    wanted = {name for place in places for name in (place.name, place.instead) if name}
    for place in places:
        if place.name not in found and place.instead not in found:
            extra = [name for name in found if name not in wanted]
            raise UserError(
                f"{problem}: tensor {place.name!r} is missing"
                f"{suggest(place.name, extra)}"
            )
    for name in found:
        if name not in wanted:
            raise UserError(f"{problem}: tensor {name!r} has no place in it")


def _check_facts(layout: Layout, config: Mapping[str, object], problem: str) -> None:
    """Refuses networks that compute something else with the same weights."""
    for name, known in layout.facts.items():
        if name in config and config[name] not in known:
            raise UserError(
                f"{problem} whose config.json has {name}={config[name]!r}, and models "
                f"of this package compute with {known[0]!r}"
            )


def _is_other_head(place: Place, shape: Shape) -> bool:
    """Whether a classifier differs in the number of its classes and no more."""
    wanted = place.shape
    return place.row.is_head and len(shape) == len(wanted) and shape[1:] == wanted[1:]
