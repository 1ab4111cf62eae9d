"""Draws the plots of the documentation again from their figures.

    python -m benchmarks plots           writes them into docs/plots

docs/results/*.json holds the figures of the tables in docs/results, with the command
that measured them, n and spread. Reports draw the same plots from all that was
measured, with quartiles and every link.
"""

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.report.marks import draw_levels
from benchmarks.report.steps import speed_up_plot
from prunex_jax.compare.report.plots import Looks, Plot, Series, make_looks, render
from prunex_jax.compare.sweep.frontier import COSTS, Cost

DOCS = Path(__file__).parents[1] / "docs"


def read(name: str) -> tuple[dict[str, Any], Looks]:
    """The figures of a table, and how its rows are drawn."""
    table = json.loads((DOCS / "results" / f"{name}.json").read_text())
    rows = table["rows"]
    titles = {row["title"]: row["title"] for row in rows}
    methods = {row["title"]: row["method"] for row in rows}
    return table, make_looks(titles, methods, first=[rows[0]["title"]])


def accuracy_against(cost: Cost) -> Plot:
    """Final accuracy against what it costs, of dense."""
    table, looks = read("cifar10_coarse")
    series = []
    for row in table["rows"]:
        middle, spread = row["accuracy"], row["deviation"] or 0.0
        ends = (middle - spread, middle + spread)
        series.append(Series(row["title"], [(row[cost.name], middle)], [ends]))
    name = f"{cost.name}_cifar10-coarse"
    title = f"Accuracy {cost.title}: CIFAR-10, ResNet-20, 30 epochs, n=1 to 3"
    labels = name, title, cost.across, "test accuracy, %"
    return Plot(*labels, series, looks, log=cost.log, has_front=True)


def time_to_accuracy() -> Plot:
    """Seconds against bytes until an accuracy is reached."""
    table, looks = read("accuracy_r20")
    series = [
        Series(row["title"], [(row["megabytes"], row["seconds"])])
        for row in table["rows"]
    ]
    return Plot(
        "to-40-percent_accuracy_4x1_r-20",
        "Time and bytes to 40 % on CIFAR-10: 4 hosts, 14 Mbit/s, n=1",
        "MB sent by a host until then",
        "seconds in steps until then",
        series,
        looks,
        log="xy",
    )


def step_times() -> Plot:
    """Time of a step against the speed of links."""
    table, looks = read("steps")
    series = [
        Series(
            row["title"],
            [
                (speed, milliseconds / 1000)
                for speed, milliseconds in zip(
                    table["megabits"], row["milliseconds"], strict=True
                )
            ],
        )
        for row in table["rows"]
    ]
    return Plot(
        "step-time_steps_2x1",
        "Step time: 2 hosts x 1 device",
        "Mbit/s of every host's link, each way",
        "seconds per step",
        series,
        looks,
        log="xy",
        draw_more=functools.partial(
            draw_levels, {table["computation"] / 1000: "computation alone"}
        ),
    )


def scaling() -> Plot:
    """Speed-up over one host against hosts."""
    table, looks = read("scaling")
    times = {
        row["title"]: {
            number: milliseconds
            for number, milliseconds in zip(
                table["hosts"], row["milliseconds"], strict=True
            )
            if milliseconds
        }
        for row in table["rows"]
    }
    (plot,) = speed_up_plot(
        "scaling_scaling_8x1_50-Mbit-s",
        "Speed-up over one host: 50 Mbit/s, the same work for all hosts",
        times,
        looks,
    )
    return plot


def main() -> None:
    """Writes all plots."""
    priced = map(accuracy_against, COSTS)
    for plot in (*priced, time_to_accuracy(), step_times(), scaling()):
        (DOCS / "plots" / f"{plot.name}.png").write_bytes(render(plot))


if __name__ == "__main__":
    main()
