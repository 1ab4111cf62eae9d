"""Tables and plots of sweeps: what they say of runs that are made up."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from matplotlib.figure import Figure

from prunex_jax.compare.report import plots
from prunex_jax.compare.sweep.figure import Point
from prunex_jax.compare.sweep.runs import Findings, Result
from prunex_jax.compare.sweep.study import Row, Sweep
from prunex_jax.compare.sweep.sweep_report import (
    difference,
    front_table,
    make_sections,
    price_table,
)


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
            "training_macs": 1e9 * size * ratio,
            "training_macs_dense": 1e9 * size,
        }
        points = tuple(Point(s, accuracy * s / 3, s * ratio, s) for s in (1, 2, 3))
        results.append(Result(Row(name, **row), seed, summary, points))
    return results


def lines_of(findings: Findings) -> dict[str, list[str]]:
    """Texts of the accuracy table, by method."""
    table = price_table(findings)
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
    assert lines["worse"][3:] == ["0.100"] * 5
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
    assert lines["small"][3:] == ["0.250"] * 5
    assert lines["pruned"][3:] == ["0.200"] * 5
    rows = {"dense": made_up("dense", [0.92], 1.0, size=2000), **rows}
    lines = lines_of(findings_of(rows, **changes))
    assert lines["dense"][4:] == ["1.00"] * 5
    assert lines["pruned"][4:] == ["0.100"] * 5


def test_marks_of_almost_equal_cost_stand_above_each_other():
    ratios = {"one": 0.00540, "other": 0.00541}
    rows = {name: made_up(name, [0.9], ratio) for name, ratio in ratios.items()}
    plot = plots_of(findings_of(rows))["bytes_tiny"]
    assert plot.title.endswith("n=1")
    axes = Figure().add_subplot()
    plots.draw(plot, axes)
    low, high = axes.get_xlim()
    assert low < 0.0054 < high and high / low == pytest.approx(5)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(labels) == len(set(labels)) >= 2


def test_rows_that_no_other_beats_are_drawn_and_named():
    rows = {
        "cheap": made_up("cheap", [0.80, 0.82], 0.1),
        "dominated": made_up(
            "dominated", [0.805], 0.2
        ),  # Dearer than cheap, and worse.
        "level": made_up("level", [0.85], 0.4),
        "low": made_up("low", [0.84], 0.4),  # As dear as level.
        "flat": made_up("flat", [0.85], 0.6),  # As accurate as level.
        "best": made_up("best", [0.90, 0.92, 0.94], 1.0),
        "dear": made_up("dear", [0.91], 2.0),
        "lost": [Result(Row("lost"), 0, {}, reason="not finite")],
        "silent": made_up("silent", [0.99], 0.0),
    }
    findings = findings_of(rows, baselines=("best",))
    drawn = plots_of(findings)
    for name in ("bytes", "macs", "work"):
        plot = drawn[f"{name}_tiny"]
        assert plot.front == ["cheap", "level", "best"]
        assert plot.emphasised[:3] == plot.front
        assert len(plot.emphasised) == plots.MOST_EMPHASISED
        assert plots.render(plot).startswith(b"\x89PNG")
    (table,) = front_table(findings, [drawn["bytes_tiny"]])
    ((_, named),) = table.rows
    assert named.text.splitlines() == [
        "cheap: 81.00 ± 1.41 (n=2)",
        "level: 85.00 (n=1)",
        "best: 92.00 ± 2.00 (n=3)",
    ]
    assert drawn["curves-bytes_tiny"].front == []


def test_another_metric_has_its_name_digits_and_direction():
    rows = {
        name: [
            dataclasses.replace(
                each, summary={**each.summary, "test_bits_per_byte": 2.0 + ratio}
            )
            for each in made_up(name, [0.5], ratio)
        ]
        for name, ratio in (("low", 0.125), ("dominated", 0.5))
    }
    rows["dominated"] += rows["dominated"]
    metric = {"metric": "bits_per_byte", "less_is_better": True}
    findings = findings_of(rows, baselines=("low",), **metric)
    sections = make_sections(findings)
    assert sections[0].title == "Bits per byte and its price"
    table = price_table(findings)
    assert (table.title, table.header[1]) == (
        "Bits per byte: tiny",
        "test bits per byte",
    )
    assert lines_of(findings)["low"][1] == "2.1250 (n=1)"
    told = " ".join(table.notes)
    assert "Differences are in bits per byte," in told and "ccuracy" not in told
    drawn = plots_of(findings)
    plot = drawn["bytes_tiny"]
    assert (plot.front, plot.up) == (["low"], "test bits per byte")
    assert plot.title.startswith("Bits per byte against bytes")
    (front,) = front_table(findings, [plot])
    assert front.title == "Pareto front: tiny"
    assert drawn["curves-bytes_tiny"].up == "validation bits per byte"


def test_a_hull_is_all_that_is_not_beaten():
    rng = np.random.default_rng(0)
    for _ in range(50):
        # Of few values, so that some are equal.
        points = {str(n): tuple(rng.integers(0, 6, 2).tolist()) for n in range(12)}
        front = plots.pareto_front(points)
        dominated = [
            name
            for name, (x, y) in points.items()
            if any((u < x and v >= y) or (u <= x and v > y) for u, v in points.values())
        ]
        assert sorted([*front, *dominated]) == sorted(points)
        costs, heights = zip(*(points[name] for name in front), strict=True)
        assert list(costs) == sorted(costs) and list(heights) == sorted(heights)


def test_work_that_is_not_known_is_left_out():
    """Of earlier versions' summaries, and of teachers that do not say theirs."""
    rows = {name: made_up(name, [0.9, 0.91], 1 / n) for n, name in enumerate("abcd", 1)}
    older, taught = rows["b"][1].summary, rows["c"][1].summary
    del older["training_macs"], older["training_macs_dense"]
    taught["training_macs"] = None
    findings = findings_of(rows, baselines=("a",))
    assert [line[-1] for line in lines_of(findings).values()] == [
        "1.00",
        "-",
        "-",
        "0.250",
    ]
    drawn = plots_of(findings)
    assert [each.row for each in drawn["work_tiny"].series] == ["a", "d"]
    assert len(drawn["macs_tiny"].series) == 4


def test_what_costs_all_rows_the_same_is_not_drawn():
    rows = {name: made_up(name, [0.9], 1.0) for name in ("one", "other")}
    assert not {"bytes_tiny", "macs_tiny", "work_tiny"} & set(
        plots_of(findings_of(rows))
    )


def test_every_plot_can_be_drawn_and_says_how_many_runs_it_shows():
    rows = {
        f"s{number}": made_up(f"s{number}", [0.9, 0.91], 1 / number)
        for number in (1, 2, 4)
    }
    drawn = plots_of(findings_of(rows))
    assert set(drawn) == {
        f"{kind}_tiny"
        for kind in ("bytes", "macs", "work", "curves-bytes", "curves-seconds")
    }
    for plot in drawn.values():
        assert plot.title.endswith("n=2")
        assert plots.render(plot).startswith(b"\x89PNG")
    rows["s4"] = rows["s4"][:1]
    assert all(
        plot.title.endswith("n=1 to 2") for plot in plots_of(findings_of(rows)).values()
    )


@pytest.mark.slow
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


def test_the_page_says_what_made_it():
    """The command, and settings that it gave to all rows."""
    found = findings_of({"dense": made_up("dense", [0.9], 1.0)})
    sweep = dataclasses.replace(found.sweep, overrides=("--config.run.steps=7",))
    found = dataclasses.replace(found, sweep=sweep, command="prunex-jax sweep --x=1")
    tables = [table for section in make_sections(found) for table in section.tables]
    texts = {(row[0].text, row[1].text) for table in tables for row in table.rows}
    assert ("command", "prunex-jax sweep --x=1") in texts
    assert ("command line", "run.steps=7") in texts
