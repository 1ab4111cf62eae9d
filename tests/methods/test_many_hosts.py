"""Programs for a thousand hosts, traced on a mesh of devices that exist nowhere."""

import dataclasses
import time

import pytest

from benchmarks.compression import make_recipe
from benchmarks.traffic_table import HOSTS, keep_counts, ratio_of, rows
from prunex_jax.comm import wire_bytes
from prunex_jax.compare.step_time import late_options
from prunex_jax.methods import make_method
from prunex_jax.methods.traffic import exchange_collectives, step_collectives
from tests.helpers.formulas.methods import formulas_of

ROWS = rows()
MOST = HOSTS[-1]
# Methods whose entries are gathered from all hosts, and those of few hosts.
GATHERED = [title for title in ROWS if title.startswith(("Top-K", "DGC"))]
FEW_HOSTS = "PacTrain, 20 % of the weights, ternary"
# Sums of float32, whatever a method makes of its arrays before.
SUMMED = (
    "dense",
    "H-SADMM, half of the channels",
    "local SGD, every 8 steps",
    "DiLoCo, every 8 steps",
    "PowerSGD, rank 2",
    "PacTrain, half of the channels",
)


@pytest.fixture(scope="module")
def recipe():
    return make_recipe("resnet20", image_shape=(32, 32, 3), num_classes=10)


def method_of(recipe, title):
    return make_method(dataclasses.replace(recipe, config=ROWS[title]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("title", [title for title in ROWS if title != FEW_HOSTS])
def test_formula_bytes_are_traced_bytes(recipe, title):
    """On 1,024 x 8 devices, within seconds."""
    own = dataclasses.replace(recipe, config=ROWS[title])
    method, formulas = make_method(own), formulas_of(own)
    mesh_shape, counts = {"host": MOST, "device": 8}, keep_counts(method, own)
    began = time.perf_counter()
    if method.rounds is None:
        pairs = [
            (
                step_collectives(method, own.shapes, mesh_shape, **options),
                formulas.step(mesh_shape, **options),
            )
            for _, options in late_options(method)
        ]
    else:
        found = exchange_collectives(method, own.shapes, mesh_shape, counts)
        pairs = [(found, formulas.exchange(mesh_shape, counts, "frozen"))]
    for found, formula in pairs:
        assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize("title", SUMMED)
def test_sums_do_not_grow_with_the_number_of_hosts(recipe, title):
    method = method_of(recipe, title)
    few, many = (ratio_of(method, recipe, hosts) for hosts in (2, MOST))
    assert many == pytest.approx(few, rel=0.03)


@pytest.mark.parametrize("title", GATHERED)
def test_gathers_grow_with_the_number_of_hosts(recipe, title):
    """By the entries of the others, against a sum that sends 2 (M - 1) / M."""
    method = method_of(recipe, title)
    few, more = (ratio_of(method, recipe, hosts) for hosts in (2, 64))
    assert more == pytest.approx(32 * few, rel=0.01)
