"""Finds the layout of a file by its names, and makes our arrays of its tensors."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.weights.bert import BERT
from prunex_jax.models.weights.convnexts import TIMM_CONVNEXT, TORCHVISION_CONVNEXT
from prunex_jax.models.weights.files import SETTING, Tensors
from prunex_jax.models.weights.gpt2 import GPT2
from prunex_jax.models.weights.llama import LLAMA
from prunex_jax.models.weights.resnets import RESNET
from prunex_jax.models.weights.table import Layout, Place, Shape
from prunex_jax.models.weights.vits import TIMM_VIT, TORCHVISION_VIT

LAYOUTS: tuple[Layout, ...] = (
    RESNET,
    TIMM_VIT,
    TORCHVISION_VIT,
    TIMM_CONVNEXT,
    TORCHVISION_CONVNEXT,
    LLAMA,
    GPT2,
    BERT,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """What the tensors of a file are to a network of ours."""

    layout: str  # What the layout is called.
    # Path of a parameter or statistic -> float32 of its shape.
    arrays: Mapping[str, np.ndarray]
    # Paths of what starts fresh, because only its number of classes differs.
    fresh: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # What else is worth saying, one line each.


def to_ours(
    tensors: Tensors, leaves: Mapping[str, Shape], source: str, model: ModelConfig
) -> Converted:
    """Makes the arrays of a network of the tensors of a file.

    Args:
      tensors: What the file holds.
      leaves: Path -> shape of the parameters and statistics of the network.
      source: What the user called the file, for messages.
      model: The settings of the network.
    Returns:
      An array for every leaf, but for those that start fresh.
    Raises:
      UserError: No layout has such names; a tensor is missing, is one too many, or has
        another shape; or the network is of another family.
    Example:
      >>> tensors = Tensors({'fc.weight': np.ones(1)}, {}, {})
      >>> to_ours(tensors, {}, 'a', ModelConfig())  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: config.model.weights='a' has names of no ...
    """
    layout = _layout_of(tensors, source)
    by_name = layout.clean_names(tuple(tensors.arrays))
    found = {clean: tensors.arrays[name] for name, clean in by_name.items()}
    places = layout.places(leaves)
    problem = f"{SETTING}={source!r} is a {layout.name}"
    misfit = f"{problem} that does not fit config.model.name={model.name!r}"
    _check_leaves(leaves, places, f"{problem}, and config.model.name={model.name!r}")
    _check_names(layout, found, places, misfit)
    _check_facts(layout, tensors.config, model, problem)
    arrays: dict[str, np.ndarray] = {}
    fresh: list[str] = []
    notes: list[str] = []
    for place in places:
        names = (place.name, *layout.others_of(place.name))
        name = next(name for name in names if name in found)
        tensor = found[name]
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise UserError(
                f"{problem}: {name} is {tensor.dtype}, and weights that were quantised "
                "are not read; give them as floating-point numbers"
            )
        if _is_other_head(place, tensor.shape):
            fresh += place.shapes
            continue
        if tensor.shape != place.shape:
            notes.append(
                f"{name} interpolated from {list(tensor.shape)} to {list(place.shape)}"
            )
            tensor = _resized(place, tensor, name, misfit)
        arrays |= place.read(tensor)
    return Converted(layout.name, arrays, tuple(fresh), tuple(notes))


def _resized(place: Place, tensor: np.ndarray, name: str, problem: str) -> np.ndarray:
    """What becomes of a tensor of another shape, where something can."""
    resized = None
    if place.row.resize is not None:
        resized = place.row.resize(tensor, place.shape)
    if resized is None:
        raise UserError(
            f"{problem} with these settings: {name} is {list(tensor.shape)} in it and "
            f"would be {list(place.shape)}; change config.model or config.data"
        )
    return resized


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


def _check_leaves(
    leaves: Mapping[str, Shape], places: Sequence[Place], problem: str
) -> None:
    """Refuses networks of another family."""
    placed = {path for place in places for path in place.shapes}
    for path in leaves:
        if path not in placed:
            raise UserError(
                f"{problem} has {path}, which such weights have not; name the model "
                "that they are of"
            )


def _check_names(
    layout: Layout,
    found: Mapping[str, np.ndarray],
    places: Sequence[Place],
    problem: str,
) -> None:
    wanted = [place.name for place in places]
    for name in wanted:
        if not found.keys() & {name, *layout.others_of(name)}:
            near = suggest(name, found.keys() - set(wanted))
            raise UserError(f"{problem}: tensor {name!r} is missing{near}")
    for name in found:
        if name in wanted or _is_copy(layout, found, name):
            continue
        advice = [
            text for pattern, text in layout.advice if re.fullmatch(pattern, name)
        ]
        raise UserError(
            f"{problem}: tensor {name!r} has no place in it"
            + "".join(f"; {text}" for text in advice[:1])
        )


def _is_copy(layout: Layout, found: Mapping[str, np.ndarray], name: str) -> bool:
    """Whether a tensor says again what another one says, or says it in its place."""
    others = layout.others_of(name)
    there = [found[other] for other in others if other in found]
    if not there:
        return bool(others)
    return any(np.array_equal(found[name], other) for other in there)


def _check_facts(
    layout: Layout, config: Mapping[str, Any], model: ModelConfig, problem: str
) -> None:
    """Refuses networks that compute something else with the same weights."""
    for fact in layout.facts(model) if layout.facts else ():
        said = fact.of(config)
        if said == fact.value:
            continue
        remedy = "this package knows no such network"
        if fact.setting:
            remedy = f"set config.{fact.setting}={said!r}"
        raise UserError(
            f"{problem} whose config.json has {fact.entry}={said!r}, and this network "
            f"computes with {fact.value!r}; {remedy}"
        )


def _is_other_head(place: Place, shape: Shape) -> bool:
    """Whether a classifier differs in the number of its classes and no more."""
    wanted = place.shape
    is_like = len(shape) == len(wanted) and shape[1:] == wanted[1:]
    return place.row.is_head and is_like and shape != wanted
