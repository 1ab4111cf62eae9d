"""Plots of the documentation show the figures of the tables beside them."""

import json
import re

import pytest

from prunex_jax.compare.report.plots import pareto_front
from prunex_jax.compare.sweep.sweep_report import COSTS
from tests.helpers.common import ROOT

RESULTS = ROOT / "docs" / "results"
FIGURES = sorted(RESULTS.glob("*.json"))
NOT_SHOWN = ("title", "method")


def numbers(text: str) -> set[float]:
    return {float(each) for each in re.findall(r"\d[\d.]*", text.replace(",", ""))}


def test_the_text_names_the_pareto_optimal_rows():
    found = json.loads((RESULTS / "cifar10_coarse.json").read_text())
    text = (RESULTS / found["page"]).read_text()
    (told,) = (part for part in text.split("\n\n") if "**Pareto-optimal" in part)
    for cost in COSTS:
        points = {
            number: (row[cost.name], row["accuracy"])
            for number, row in enumerate(found["rows"])
        }
        for number in pareto_front(points):
            row = found["rows"][number]
            around = f" ± {row['deviation']:.2f}" if row["deviation"] else ""
            assert f"{row['accuracy']}{around}, n={row['n']}" in told, row["title"]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_figures_are_those_of_the_table(path):
    found = json.loads(path.read_text())
    assert found["command"].startswith(("prunex-jax ", "python -m benchmarks "))
    assert "n=" in found["what"] or all("n" in row for row in found["rows"])
    lines = (RESULTS / found["page"]).read_text().splitlines()
    for row in found["rows"]:
        told = [line for line in lines if line.startswith(f"| {row['title']} |")]
        given = [value for key, value in row.items() if key not in NOT_SHOWN]
        flat = [
            v for each in given for v in (each if isinstance(each, list) else [each])
        ]
        asked = {float(value) for value in flat if value is not None} - {1.0}
        assert any(asked <= numbers(line) for line in told), row["title"]
