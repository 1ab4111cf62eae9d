"""Tables and plots of sweeps: what they say of runs that are made up."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from prunex_jax.bench.report import plots
from prunex_jax.bench.report.sweep import accuracy_table, difference, make_sections
from prunex_jax.bench.study import Row, Sweep
from prunex_jax.bench.sweep.results import Findings, Point, Result


def findings_of(results: dict[str, list[Result]], **changes) -> Findings:
    """A sweep of the rows that have results, unless changed, and the results."""
    rows = tuple(found[0].row for found in results.values())
    sweep = Sweep(**{"name": "tiny", "config": "settings.py", "rows": rows, **changes})
    return Findings(sweep, results)


def made_up(
    name: str, accuracies: list[float], ratio: float, size: int = 1000, **row
) -> list[Result]:
    """Runs of a network of that size, as a long sweep would leave them."""
    results = []
    for seed, accuracy in enumerate(accuracies):
        summary = {
            "test_accuracy": accuracy,
            "host_wire_bytes": 1e6 * size * ratio,
            "host_wire_bytes_dense": 1e6 * size,
            "host_payload_bytes_steady": 1e3 * size * ratio,
            "host_payload_bytes_dense": 1e3 * size,
            "params_kept": size * ratio,
            "params_dense": size,
            "macs_kept": size * ratio,
            "macs_dense": size,
        }
        points = tuple(Point(s, accuracy * s / 3, s * ratio, s) for s in (1, 2, 3))
        results.append(Result(Row(name, **row), seed, summary, points))
    return results


def lines_of(findings: Findings) -> dict[str, list[str]]:
    """Texts of the accuracy table, by method."""
    table = accuracy_table(findings)
    return {row[0].text: [cell.text for cell in row] for row in table.rows}


def plots_of(findings: Findings) -> dict[str, plots.Plot]:
    """All plots of a report, by name."""
    sections = make_sections(findings)
    return {plot.name: plot for section in sections for plot in section.plots}


def test_the_table_says_what_is_beyond_spread():
    rows = {
        "dense": made_up("dense", [0.92, 0.921, 0.919], 1.0),
        "same": made_up("same", [0.919, 0.923, 0.917], 0.5),
        "worse": made_up("worse", [0.90, 0.901, 0.899], 0.1),
        "one": made_up("one", [0.95], 0.2),
    }
    lines = lines_of(findings_of(rows, baselines=("dense",)))
    assert lines["dense"][1:4] == ["92.00 ± 0.10 (n=3)", "-", "1.00"]
    assert lines["same"][2].endswith("within spread")
    assert lines["worse"][2].startswith("-2.00 ± 0.2")
    assert lines["worse"][3:] == ["0.100"] * 4
    # One run says nothing of spread.
    assert lines["one"][2] == "+3.00"


def test_shares_are_of_the_largest_network_until_the_first_baseline_has_ended():
    rows = {
        "small": made_up("small", [0.90], 1.0, size=250),
        "pruned": made_up("pruned", [0.91], 0.2),
    }
    every = ("dense", *rows)
    changes = {"rows": tuple(map(Row, every)), "baselines": ("dense", "small")}
    lines = lines_of(findings_of(rows, **changes))
    assert lines["small"][3:] == ["0.250"] * 4
    assert lines["pruned"][3:] == ["0.200"] * 4
    rows = {"dense": made_up("dense", [0.92], 1.0, size=2000), **rows}
    lines = lines_of(findings_of(rows, **changes))
    assert lines["dense"][4:] == ["1.00"] * 4
    assert lines["pruned"][4:] == ["0.100"] * 4


def test_marks_of_almost_equal_cost_stand_above_each_other():
    ratios = {"one": 0.00540, "other": 0.00541}
    rows = {name: made_up(name, [0.9], ratio) for name, ratio in ratios.items()}
    plot = plots_of(findings_of(rows))["bytes_tiny"]
    assert plot.title.endswith("n=1")
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plots.draw(plot, axes)
    low, high = axes.get_xlim()
    assert low < 0.0054 < high and high / low == pytest.approx(4)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(labels) == len(set(labels)) >= 2


def test_sizes_are_drawn_where_rows_form_a_curve():
    rows = {
        f"s{number}": made_up(f"s{number}", [0.9, 0.91], 1 / number, curve="line")
        for number in (1, 2, 4)
    }
    drawn = plots_of(findings_of(rows))
    assert set(drawn) == {
        f"{kind}_tiny" for kind in ("bytes", "curves-bytes", "curves-seconds", "sizes")
    }
    for plot in drawn.values():
        assert plot.title.endswith("n=2")
        assert plots.render(plot).startswith(b"\x89PNG")
    rows["s4"] = rows["s4"][:1]
    assert all(
        plot.title.endswith("n=1 to 2") for plot in plots_of(findings_of(rows)).values()
    )


def test_intervals_hold_the_true_difference_in_95_of_100_cases():
    rng, num_held = np.random.default_rng(0), 0
    for _ in range(2000):
        ones, others = rng.normal(1.0, 0.3, 3), rng.normal(0.0, 0.1, 4)
        mean, half_width = difference(ones, others)
        num_held += abs(mean - 1.0) <= half_width
    assert 0.93 < num_held / 2000 < 0.97
    assert math.isinf(difference([1.0], [2.0, 3.0])[1])
    with pytest.raises(statistics.StatisticsError):
        difference([], [1.0])


def test_curves_say_what_they_leave_out():
    runs = made_up("dense", [0.9], 1.0)
    silent = [dataclasses.replace(each, row=Row("none")) for each in runs]
    silent = [
        dataclasses.replace(
            each,
            points=tuple(dataclasses.replace(p, host_bytes=0.0) for p in each.points),
        )
        for each in silent
    ]
    lost = [Result(Row("lost"), 0, {}, reason="not finite")]
    drawn = plots_of(findings_of({"dense": runs, "none": silent, "lost": lost}))
    across = drawn["curves-bytes_tiny"].across
    assert across == "MB sent by a host (not shown: 1 that send nothing)"
    assert drawn["curves-seconds_tiny"].across == "seconds in steps"
    assert [s.row for s in drawn["curves-bytes_tiny"].series] == ["dense"]
