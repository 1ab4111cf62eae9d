"""Programs for a thousand hosts, traced on a mesh of devices that exist nowhere."""

import dataclasses

import pytest

from benchmarks.compression import make_recipe
from benchmarks.traffic_table import HOSTS, ratio_of, rows
from prunex_jax.methods import make_method

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
    """The table itself compares both where it has the most hosts."""
    assert ratio_of(method_of(recipe, title), recipe, MOST) >= 0


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
