"""Data of the user's own: arrays, examples by number, or one after the other."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.trees import PyTree, flatten_by_path, map_with_path
from prunex_jax.data.npz import NPZ, npz_arrays, npz_has_images
from prunex_jax.data.order import Positions
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.sources import open_dataset, split_numbers
from prunex_jax.data.splits import SPLITS, ArraySource, Batch, Dataset, Labels, Source

# Entry of a batch: the examples as they were given, any tree.
EXAMPLE = "example"
# What settings call data that were given.
OWN = "own"
# Arrays that a message names.
_MOST_SAID = 5
# Types that arrays get, where jax would make them so anyway.
_NARROWED = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}


@dataclasses.dataclass(frozen=True, eq=False)
class _IndexedExamples:
    """Something that gives one example for a number, such as a Grain data source."""

    elements: Any

    def __len__(self) -> int:
        return len(self.elements)

    def read(self, numbers: Positions) -> PyTree:
        """Examples one by one, stacked."""
        asked = numbers.tolist() or [0]
        found = [self.elements[number] for number in asked]
        batch = jax.tree.map(lambda *rows: np.stack(rows), *map(_as_arrays, found))
        return batch if len(numbers) else jax.tree.map(lambda x: x[:0], batch)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnSplit:
    """Part of the examples that were given."""

    name: str  # train, validation or test.
    source: Source  # Where the examples are.
    numbers: Positions  # int64[size], sorted, those of `source` that belong here.

    @property
    def in_memory(self) -> bool:
        """Whether they are arrays."""
        return isinstance(self.source, ArraySource)

    @property
    def is_loaded(self) -> bool:
        """Whether they are arrays that lie in memory, and not in mapped files."""
        if not isinstance(self.source, ArraySource):
            return False
        return not any(map(is_mapped, jax.tree.leaves(self.source.arrays)))

    @property
    def may_vary(self) -> bool:
        """Whether code of the user's makes them, perhaps other ones at every look."""
        return isinstance(self.source, _IndexedExamples)

    def __len__(self) -> int:
        return len(self.numbers)

    def training_batch(
        self, examples: Positions, positions: Positions, seed: int
    ) -> Batch:
        """The examples as they are."""
        del positions, seed
        return self.evaluation_batch(examples)

    def evaluation_batch(self, examples: Positions) -> Batch:
        """The examples as they are, as entry `EXAMPLE`."""
        return {EXAMPLE: self.source.read(self.numbers[examples])}

    def finished(self, batch: Batch) -> Batch:
        """The batch."""
        return batch

    def why_no_labels(self) -> str:
        """That examples have no label, if so."""
        if self.in_memory and labels_of(self.source.read(self.numbers[:1])) is not None:
            return ""
        return (
            "and the data that were given have none: give arrays (x, labels), or a "
            "dict with an entry 'label'; labels are integers"
        )

    def labels(self) -> Labels:
        """All labels, int32[size]."""
        assert isinstance(self.source, ArraySource), self.why_no_labels()
        found = labels_of(self.source.arrays)
        assert found is not None, self.why_no_labels()
        return found[self.numbers]


def open_own(data: Any, config: DataConfig) -> Dataset:
    """Makes a data set of what the user has.

    Args:
      data: Arrays of examples: one, a pair (x, y), or any tuple or dict of arrays with
        the examples along their first axis; or something with a length that gives an
        example for a number (a Grain data source, a data set of Hugging Face), or
        examples one after the other, which are then kept in memory. An example is any
        tree of arrays. Or a dict of such data with `train` and perhaps `validation`
        and `test`.
      config: `validation_share` and `shuffle_seed`, where no `validation` is given.
    Returns:
      The data set; splits that are not there are empty.
    Raises:
      UserError: It is none of these, has no examples, or lengths differ.
    Example:
      >>> x, y = np.ones((20, 4)), np.arange(20) % 2
      >>> dataset = open_own((x, y), DataConfig(validation_share=0.25))
      >>> len(dataset.train), len(dataset.validation), len(dataset.test)
      (15, 5, 0)
    """
    has_splits = isinstance(data, Mapping) and "train" in data
    given = data if has_splits and set(data) <= set(SPLITS) else {"train": data}
    sources = {name: _examples_of(part, name) for name, part in given.items()}
    sizes = {"test": 0, **{name: len(source) for name, source in sources.items()}}
    numbers = split_numbers(config, "data that were given", sizes)
    _check_alike(sources)
    splits = {
        name: OwnSplit(name, sources.get(name, sources["train"]), own)
        for name, own in numbers.items()
    }
    return Dataset(name=OWN, **splits)


def is_mapped(array: np.ndarray) -> bool:
    """Whether an array lies in a file that is mapped, or is a part of one that does.

    Example:
      >>> is_mapped(np.ones(3)[1:])
      False
    """
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def names_arrays(config: DataConfig) -> bool:
    """Whether settings name a file of arrays that are not labelled images.

    Raises:
      UserError: There is no such file, or it has no arrays that are used.
    Example:
      >>> names_arrays(DataConfig(name="digits"))
      False
    """
    return config.name == NPZ and not npz_has_images(config)


def open_named(config: DataConfig, seed: int) -> Dataset:
    """Opens what settings name: images, or arrays of a file.

    Args:
      config: As for `open_dataset`.
      seed: As for `open_dataset`.
    Raises:
      UserError: As `open_dataset` and `open_own` do.
    Example:
      >>> open_named(DataConfig(name="digits"), seed=0).described
      'images of 8x8x1, 10 classes'
    """
    if not names_arrays(config):
        return open_dataset(config, seed)
    dataset = open_own(npz_arrays(config), config)
    return dataclasses.replace(dataset, name=config.name)


def _examples_of(data: Any, split: str) -> Source:
    source = _source_of(data, split)
    if not len(source):
        raise UserError(f"data: split {split!r} has no examples")
    return source


def _source_of(data: Any, split: str) -> Source:
    if isinstance(data, Mapping | tuple) or hasattr(data, "__array__"):
        return ArraySource(_checked(data, split))
    if hasattr(data, "with_format"):  # A data set of Hugging Face.
        data = data.with_format("numpy")
    if not hasattr(data, "__len__"):
        raise UserError(
            f"data: split {split!r} is {type(data).__name__}, whose length is not "
            "known; give arrays, something with a length, or a list of examples"
        )
    if hasattr(data, "__getitem__") and not isinstance(data, list):
        return _IndexedExamples(data)
    if not isinstance(data, Iterable):
        raise UserError(
            f"data: split {split!r} is {type(data).__name__}, which gives no examples; "
            "give arrays, or something that can be indexed or gone through"
        )
    found = [_as_arrays(example) for example in data]
    if not found:
        raise UserError(f"data: split {split!r} has no examples")
    try:
        return ArraySource(jax.tree.map(lambda *rows: np.stack(rows), *found))
    except ValueError as error:
        raise UserError(
            f"data: examples of split {split!r} differ in shape: {one_line(error, 200)}"
        ) from error


def _checked(data: Any, split: str) -> PyTree:
    """A tree of arrays of one length."""
    arrays = _as_arrays(data)
    lengths = {path: np.shape(x)[:1] for path, x in flatten_by_path(arrays).items()}
    if not lengths or () in lengths.values() or len(set(lengths.values())) > 1:
        first = list(lengths.items())[:_MOST_SAID]
        said = ", ".join(f"{k or 'array'} {list(v)}" for k, v in first)
        said += ", ..." if len(lengths) > len(first) else ""
        raise UserError(
            f"data: arrays of split {split!r} must have the examples along their first "
            f"axis, as many in each; there are {said or 'none'}"
        )
    return arrays


def _of_numbers(leaf: Any) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    if not isinstance(leaf, list) or not leaf:
        return False
    first = leaf[0]
    return _of_numbers(first) or isinstance(first, int | float | np.number)


def _as_array(leaf: Any) -> Any:
    """Lists of numbers as arrays."""
    if not _of_numbers(leaf):
        return leaf
    try:
        return np.asarray(leaf)
    except ValueError as error:
        raise UserError(
            f"data: a list of {len(leaf)} has parts of different lengths; make them "
            "alike, or give a list of examples"
        ) from error


def _as_arrays(tree: Any) -> PyTree:
    def as_array(path: str, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"data: {path or 'an example'} is {array.dtype}, and networks read "
                "numbers; leave it out, or make it numbers"
            )
        return _narrowed(array, path)

    if isinstance(tree, Mapping):
        tree = dict(tree)
    tree = jax.tree.map(_as_array, tree, is_leaf=_of_numbers)
    return map_with_path(as_array, tree)


def _narrowed(array: np.ndarray, path: str) -> np.ndarray:
    """The array in the type that jax would give it; no integer changes."""
    wanted = np.dtype(_NARROWED.get(array.dtype.name, array.dtype))
    if wanted != array.dtype and wanted.kind == "i" and array.size:
        limits = np.iinfo(wanted)
        for extreme in (int(array.min()), int(array.max())):
            if not limits.min <= extreme <= limits.max:
                raise UserError(
                    f"data: {path or 'an example'} has the number {extreme}, which "
                    f"does not fit into {wanted}; number from 0"
                )
    return array.astype(wanted, copy=False)


def labels_of(examples: PyTree) -> Labels | None:
    """The labels of a batch: those of pairs, or entries of that name."""
    label: Any = None
    if isinstance(examples, tuple) and len(examples) == 2:
        label = examples[1]
    elif isinstance(examples, dict):
        label = examples.get("label")
    is_label = isinstance(label, np.ndarray) and label.ndim == 1
    return label.astype(np.int32) if is_label and label.dtype.kind in "iu" else None


def _check_alike(sources: Mapping[str, Source]) -> None:
    """Refuses splits whose examples differ in form."""

    def form(source: Source) -> dict[str, str]:
        first = flatten_by_path(source.read(np.arange(1)))
        return {path: f"{x.dtype}{list(x.shape[1:])}" for path, x in first.items()}

    wanted = form(sources["train"])
    for name, source in sources.items():
        found = form(source)
        differing = {
            path
            for path in wanted.keys() | found.keys()
            if wanted.get(path) != found.get(path)
        }
        if differing:
            path = min(differing)
            raise UserError(
                f"data: entry {path!r} of the examples in {name} is "
                f"{found.get(path, 'absent')}, and of those for training "
                f"{wanted.get(path, 'absent')}; make them alike"
            )
