"""Whole runs in little time: networks that compile quickly, and their settings."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from prunex_jax.models import Model, make_resnet_spec

Settings = Mapping[str, Mapping[str, Any]]


def merged(settings: Settings, changes: Settings) -> dict[str, dict[str, Any]]:
    """Settings with some sections changed in part."""
    result = {section: dict(values) for section, values in settings.items()}
    for section, values in changes.items():
        result[section] = {**result.get(section, {}), **values}
    return result


@contextlib.contextmanager
def tiny_networks() -> Iterator[None]:
    """Makes every network a residual one of two blocks, which compiles quickly."""

    def make_tiny(config, image_shape, num_classes):
        spec = make_resnet_spec("cifar", stage_blocks=(1, 1), stage_widths=(8, 16))
        return Model(spec, image_shape, num_classes, config.compute_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prunex_jax.experiment.make_model", make_tiny)
        yield
