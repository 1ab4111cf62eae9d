"""What differs between processes is named with both values, and what may is not."""

import threading

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import AgreedError
from prunex_jax.data import open_own
from prunex_jax.data.fingerprint import fingerprint_of
from prunex_jax.data.settings import DataConfig
from prunex_jax.mesh import agreement
from prunex_jax.train.build import joining
from prunex_jax.train.build.config import resolve_config
from tests.helpers.tiny_runs import merged

STEPS = {"run": {"steps": 4}}
VERSIONS = {"jax": "0.9.0", "prunex_jax": "0.2.0"}


class Two:
    """Two threads that are two processes to what compares them."""

    def __init__(self, monkeypatch):
        self._texts = ["", ""]
        self._barrier = threading.Barrier(2, timeout=60)
        self._own = threading.local()
        monkeypatch.setattr(agreement, "gather_texts", self._gather)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(joining, "versions", lambda: self._own.versions)

    def _gather(self, text):
        self._texts[self._own.number] = text
        self._barrier.wait()
        found = list(self._texts)
        self._barrier.wait()
        return found

    def said(self, check, values, versions=(VERSIONS, VERSIONS)):
        """What both say after a check, each of its own value; None if it is fine."""
        found = ["", ""]

        def run(number):
            self._own.number, self._own.versions = number, versions[number]
            try:
                found[number] = check(values[number])
            except AgreedError as error:
                found[number] = str(error)

        threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1]
        return found[0]


@pytest.fixture
def two(monkeypatch):
    return Two(monkeypatch)


def said_of_settings(two, *values):
    """What is said where processes have these settings."""
    configs = [resolve_config(merged(STEPS, value)) for value in values]
    return two.said(lambda config: joining.check_same_settings(config, {}), configs)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"model": {"width": 0.5}},
            "config.model.width is '1.0' on process 0 and '0.5' on process 1",
        ),
        (
            {"method": {"name": "topk"}},
            "config.method.name is \"'hsadmm'\" on process 0 and \"'topk'\" on",
        ),
        ({"run": {"steps": 9}}, "config.run.steps is"),
        # Every host may have its own.
        ({"data": {"dir": "/local"}, "run": {"compile_cache": "/local"}}, None),
    ],
)
def test_settings_that_differ(two, other, text):
    said = said_of_settings(two, {}, other)
    assert said == text if text is None else text in said


def test_sources_that_differ(two, monkeypatch):
    """Also where both have the same version, and no git."""
    digests = threading.local()
    monkeypatch.setattr(joining, "source_digest", lambda: digests.value)

    def check(value):
        digests.value = value
        joining.check_same_settings(resolve_config(STEPS), {})

    said = two.said(check, ["3fa9", "b7c1"])
    assert "the source of prunex_jax is '3fa9' on process 0 and 'b7c1' on" in said
    assert two.said(check, ["3fa9", "3fa9"]) is None


def test_versions_that_differ(two):
    other = {**VERSIONS, "jax": "0.9.1"}
    config = resolve_config(STEPS)
    check = lambda config: joining.check_same_settings(config, {})  # noqa: E731
    said = two.said(check, [config, config], (VERSIONS, other))
    assert "version of jax is '0.9.0' on process 0 and '0.9.1' on process 1" in said
    # One runs from its source.
    other = {**VERSIONS, "prunex_jax": None}
    said = two.said(check, [config, config], (VERSIONS, other))
    assert "version of prunex_jax is '0.2.0' on process 0 and None on process 1" in said
    assert two.said(check, [config, config]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_gpu_deterministic_ops=true"),
        ("JAX_ENABLE_X64", "1"),
        ("JAX_PLATFORMS", "cpu"),
    ],
)
def test_variables_that_differ(two, name, value):
    config = resolve_config(STEPS)
    check = lambda environ: joining.check_same_settings(config, environ)  # noqa: E731
    said = two.said(check, [{}, {name: value}])
    assert f"variable {name} is '' on process 0 and '{value}' on process 1" in said
    assert "start all processes with the same" in said
    assert two.said(check, [{name: value}, {name: value, "HOME": "/"}]) is None


def dataset_of(x):
    return open_own({"train": x, "validation": x[:3]}, DataConfig())


def test_data_that_differ(two):
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    other = x.copy()
    other[7] += 1

    def check(x):
        joining.check_same_fingerprints({"data": fingerprint_of(dataset_of(x))})

    said = two.said(check, [x, other])
    assert "the content of 20 examples in train is" in said
    assert "give all processes the same data" in said
    said = two.said(check, [x, np.delete(x, 5, 0)])
    assert "number of examples in train is 20 on process 0 and 19 on process 1" in said
    said = two.said(check, [x, x.astype(np.float16)])
    assert "the form of the examples in train is" in said
    assert two.said(check, [x, x]) is None
