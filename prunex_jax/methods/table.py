"""The table of methods: the whole list, and the one way to add to it."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import read_settings
from prunex_jax.comm import Slicing
from prunex_jax.mesh.settings import Shard
from prunex_jax.methods.dense import ROW as DENSE
from prunex_jax.methods.dgc import ROW as DGC
from prunex_jax.methods.hsadmm.method import ROW as HSADMM
from prunex_jax.methods.importance import ROW as IMPORTANCE
from prunex_jax.methods.local_sgd import DILOCO, LOCAL_SGD
from prunex_jax.methods.method import Method, MethodConfig, MethodRow, Recipe, Variant
from prunex_jax.methods.none import ROW as NONE
from prunex_jax.methods.pactrain import ROW as PACTRAIN
from prunex_jax.methods.powersgd import ROW as POWERSGD
from prunex_jax.methods.sliced import (
    around_slices,
    recipe_in_slices,
    with_sliced_params,
)
from prunex_jax.methods.topk import ROW as TOPK

# Name -> row. Only `register_method` changes it.
METHODS: dict[str, MethodRow] = {
    row.name: row
    for row in (
        DENSE,
        HSADMM,
        LOCAL_SGD,
        DILOCO,
        NONE,
        TOPK,
        DGC,
        POWERSGD,
        IMPORTANCE,
        PACTRAIN,
    )
}


def register_method(row: MethodRow) -> MethodRow:
    """Adds a method: its name, settings and variants are known from then on.

    Import the module that calls it wherever the method is used; with `method.plugins`,
    the trainer does so itself, in every process and when a run goes on.

    Args:
      row: The method. A module that is imported anew may register its rows again.
    Returns:
      The row.
    Raises:
      UserError: Another method has the name, or other settings the key.
    Example:
      >>> import dataclasses
      >>> from prunex_jax.methods import METHODS, Variant
      >>> row = dataclasses.replace(METHODS['dense'], name='mine', key='dense')
      >>> register_method(row).name, METHODS.pop('mine').key
      ('mine', 'dense')
    """
    known = METHODS.get(row.name)
    if known is not None and _origin(known) != _origin(row):
        raise UserError(f"method {row.name!r} is registered already: choose a new name")
    taken = {field.name for field in dataclasses.fields(MethodConfig)}
    others = [r for r in METHODS.values() if r.key == row.key and r.name != row.name]
    if row.key in taken or any(r.settings is not row.settings for r in others):
        raise UserError(
            f"method {row.name!r} cannot have its settings under method.{row.key}: "
            "others have that key; choose a new one"
        )
    METHODS[row.name] = row
    return row


def check_method(name: str, setting: str = "config.method.name") -> None:
    """Raises UserError if there is no method of that name, which a setting gives."""
    if name not in METHODS:
        raise UserError(
            f"{setting}={name!r} is not a method{suggest(name, METHODS)} "
            f"(known: {', '.join(METHODS)})"
        )


def make_method(
    recipe: Recipe,
    slicing: Slicing | None = None,
    shard: Shard = "state",
) -> Method:
    """Builds the method that the settings name.

    Args:
      recipe: What it is made from.
      slicing: How what is trained lies in slices over the devices of a host; None
        keeps all of it on every device.
      shard: What lies in slices then: the state, or the parameters as well.
    Raises:
      UserError: No such method, or it needs whole parameters.
    """
    check_method(recipe.config.name)
    row = METHODS[recipe.config.name]
    if row.settings is not None:
        own = getattr(recipe.config, row.key)
        recipe = dataclasses.replace(recipe, settings=own)
    if slicing is None:
        return dataclasses.replace(row.make(recipe), name=row.name)
    if not row.takes_slices:
        known = ", ".join(name for name, each in METHODS.items() if each.takes_slices)
        raise UserError(
            f"method.name={row.name!r} needs whole parameters on every device; set "
            f"topology.shard=none, or take one of {known}"
        )
    method = row.make(recipe_in_slices(recipe, slicing))
    method = dataclasses.replace(method, name=row.name)
    if shard == "params":
        return with_sliced_params(method, slicing)
    return around_slices(method, slicing, recipe.axes)


def method_config(name: str = "hsadmm", **settings: Any) -> MethodConfig:
    """Makes the settings under `method`: the common ones, and those of every method.

    Args:
      name: The method.
      **settings: Common settings, and by its key the settings of a method.
    Returns:
      A dataclass with a field for every key of the table.
    Example:
      >>> from prunex_jax.methods.topk import TopkConfig
      >>> config = method_config('topk', topk=TopkConfig(density=0.1))
      >>> config.topk.density, config.powersgd.rank
      (0.1, 2)
    """
    keys = {row.key: row.settings for row in METHODS.values() if row.settings}
    return _config_class(tuple(keys.items()))(name, **settings)


@functools.cache
def _config_class(keys: tuple[tuple[str, type], ...]) -> type[MethodConfig]:
    fields = [(key, cls, dataclasses.field(default_factory=cls)) for key, cls in keys]
    said = {"__doc__": MethodConfig.__doc__, "__module__": __name__}
    return dataclasses.make_dataclass(
        "MethodConfig", fields, bases=(MethodConfig,), namespace=said, frozen=True
    )


def load_plugins(names: Iterable[str]) -> None:
    """Imports modules and .py files that register methods; each only once.

    Args:
      names: `method.plugins`. Paths are relative to the working directory.
    Raises:
      UserError: One cannot be imported.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                importlib.import_module(name)
        # Also SystemExit: a run must not end as if it were done.
        except (Exception, SystemExit) as error:
            raise UserError(
                f"config.method.plugins: {name!r} cannot be imported: {error!r}"
            ) from error


def all_variants() -> Iterator[Variant]:
    """Every variant of every registered method, in the order of the table."""
    for row in METHODS.values():
        yield from row.variants


def find_variants(*names: str) -> tuple[Variant, ...]:
    """Looks up variants by name, for the rows of a study or a sweep.

    Raises:
      UserError: No registered method has such a variant.
    Example:
      >>> find_variants('topk')[0].settings
      {'method.name': 'topk'}
    """
    known = {variant.name: variant for variant in all_variants()}
    for name in names:
        if name not in known:
            raise UserError(
                f"no method has a variant {name!r}{suggest(name, known)} "
                f"(known: {', '.join(known)})"
            )
    return tuple(known[name] for name in names)


def config_of(variant: Variant) -> MethodConfig:
    """Settings under `method` of a variant; those of other sections are left out.

    Example:
      >>> config_of(find_variants('importance')[0]).importance.refresh_period
      4
    """
    nested: dict[str, Any] = {}
    for key, value in variant.settings.items():
        section, *path, last = key.split(".")
        if section == "method":
            inner = nested.setdefault(path[0], {}) if path else nested
            inner[last] = value
    return read_settings(method_config(), nested, "method")


def _origin(row: MethodRow) -> tuple[Any, ...]:
    """Says whether two rows are of the same source, imported twice."""
    code = getattr(row.make, "__code__", None)
    return (code.co_filename, code.co_name) if code is not None else (row.make,)


def _import_file(path: Path) -> None:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"prunex_jax_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
