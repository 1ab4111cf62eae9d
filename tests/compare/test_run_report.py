"""One page of run folders: what is on it, whatever the folders lack."""

import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from prunex_jax.compare.report import run_report as report
from prunex_jax.compare.report.plots import render
from prunex_jax.compare.report.run_report import (
    Run,
    make_sections,
    read_runs,
    write_runs,
)

SVG = "{http://www.w3.org/2000/svg}"


def row(step, **more):
    return {
        "step": step,
        "accuracy": step / 100,
        "loss": 1 / step,
        "learning_rate": 0.1,
        "sparsity": 0.5,
        "host_wire_bytes": 1e6 * step,
        "device_wire_bytes": 2e6 * step,
        "seconds_per_step_median": 0.1,
        "host_drift": step / 1000,
        "primal_by_group": {"stem/conv": step / 10},
        **more,
    }


CONFIG = {
    "seed": 0,
    "method": {"name": "dense", "schedule": ["dense", "hsadmm @ step 20"]},
}
ENVIRONMENT = {
    "command": "python -m prunex_jax.train --config=<b>&.py",
    "versions": {"jax": "0.10.2"},
    "topology": {"num_hosts": 2, "devices_per_host": 4},
}
ROWS = [
    row(10, phase=0),
    row(20, phase=0),
    {"step": 20, "phase": 0, "host_wire_bytes": 2e7, "validation_accuracy": 0.25},
    row(30, phase=1),
    row(40, phase=1, host_drift=None),
]
SUMMARY = {
    "method": "dense -> hsadmm",
    "test_accuracy": 0.875,
    "channels_kept": {"stem/conv": [6, 8]},
}


def make_run(path, config=CONFIG, rows=ROWS, summary=None, saved=None, end=""):
    """A run folder; what is None is not there."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    if rows is not None:
        lines = [json.dumps(each) + "\n" for each in rows]
        (path / "metrics.jsonl").write_text("".join(lines) + end)
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    for step, extra in (saved or {}).items():
        (path / "checkpoints" / step).mkdir(parents=True)
        manifest = path / "checkpoints" / step / "manifest.json"
        content = {"format": 1, "leaves": {}, "files": {}, "extra": extra}
        manifest.write_text(json.dumps(content))
    return path


def tables_of(*paths):
    """Title -> first cell of a row -> texts of the others."""
    return {
        table.title: {
            row[0].text: [cell.text for cell in row[1:]] for row in table.rows
        }
        for section in make_sections(read_runs(paths))
        for table in section.tables
    }


def plots_of(*paths):
    return {
        plot.title: plot
        for section in make_sections(read_runs(paths))
        for plot in section.plots
    }


def test_a_page_says_what_a_run_has_done(tmp_path, capsys):
    run = make_run(tmp_path / "a", summary=SUMMARY)
    assert report.main([str(run), f"--output={tmp_path / 'page.html'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = (tmp_path / "page.html").read_text()
    assert "a: dense, then hsadmm on 2 x 4 devices; ended, 40 steps done." in page
    for text in ("0.875", "method.schedule", "versions.jax", "host drift", "stem/conv"):
        assert text in page, text
    assert "--config=&lt;b&gt;&amp;.py" in page and "<b>" not in page
    assert page.count("data:image/svg+xml") == len(plots_of(run)) >= 6


def test_a_page_needs_nothing_else(tmp_path):
    page = write_runs([make_run(tmp_path / "a")]).read_text()
    assert not re.search(r"https?://|<(link|iframe|object|use)\b|@import|url\(", page)
    assert not re.search(r'\bsrc="(?!data:)', page)
    assert "default-src 'none'" in page


def test_bytes_are_told_by_phase_and_axis(tmp_path):
    found = tables_of(make_run(tmp_path / "a"))["bytes by axis and phase"]
    assert found == {
        "a: dense": ["0 to 20", "20.0 MB", "1.00 MB", "40.0 MB", "2.00 MB"],
        "a: hsadmm": ["20 to 40", "20.0 MB", "1.00 MB", "40.0 MB", "2.00 MB"],
    }


def test_bytes_of_logs_before_they_had_phases_and_devices(tmp_path):
    old = [{"step": 4, "learning_rate": 1.0, "loss": 1.0, "host_wire_bytes": 80.0}]
    found = tables_of(make_run(tmp_path / "a", rows=old))["bytes by axis and phase"]
    assert found == {"a: dense": ["0 to 4", "80.0 B", "20.0 B", "-", "-"]}


def test_channels_come_from_the_summary_or_the_newest_checkpoint(tmp_path):
    saved = {
        "9": {"step": 9, "keep_counts": {"stem/conv": 8}},
        "10": {"step": 10, "keep_counts": {"stem/conv": 7}},
    }
    going = make_run(tmp_path / "going", saved=saved)
    ended = make_run(tmp_path / "ended", saved=saved, summary=SUMMARY)
    tables = tables_of(going, ended)
    assert tables["channels of going"] == {"stem/conv": ["7", "4"]}
    assert tables["channels of ended"] == {"stem/conv": ["6", "8", "25.0%", "4"]}


def test_health_is_neither_metric_nor_cost(tmp_path):
    tables = tables_of(make_run(tmp_path / "a"))
    assert tables["health of a"] == {"host drift": ["0.03", "0.01", "0.03", "30"]}


def test_curves_follow_the_rows(tmp_path):
    plots = plots_of(make_run(tmp_path / "a"))
    plot = plots["accuracy (dashed: validation)"]
    assert (plot.across, plot.up) == ("step", "accuracy")
    solid, dashed = plot.series
    assert solid.points == [(10, 0.1), (20, 0.2), (30, 0.3), (40, 0.4)]
    assert dashed.points == [(20, 0.25)] and plot.looks[dashed.row].is_dashed
    (by_bytes,) = plots["validation_accuracy by bytes over hosts"].series
    assert by_bytes.points == [(2e7, 0.25)]


def test_runs_stand_side_by_side(tmp_path):
    other = {**CONFIG, "seed": 7}
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config=other)]
    plot = plots_of(*runs)["learning rate"]
    assert plot.emphasised == ["a", "b"]
    assert len({(look.colour, look.mark) for look in plot.looks.values()}) == 2
    settings = tables_of(*runs)["settings"]
    assert next(iter(settings.items())) == ("seed", ["0", "7"]), "what differs is first"
    assert "1 settings differ." in write_runs(runs).read_text()


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [make_run(tmp_path / name / "run") for name in "ab"]
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]


@pytest.mark.parametrize(
    "lacks", ["rows", "all rows", "a cut row", "environment", "an odd environment"]
)
def test_what_a_folder_lacks_is_left_out(tmp_path, lacks):
    rows = {"rows": None, "all rows": []}.get(lacks, ROWS)
    run = make_run(tmp_path / "a", rows=rows, end='{"step": 50, "lo')
    if "environment" in lacks:
        (run / "environment.json").unlink()
    if "odd" in lacks:
        (run / "environment.json").write_text("[1")
    page = write_runs([run]).read_text()
    assert ("has logged nothing yet" in page) == ("rows" in lacks)
    assert "has not ended" in page and "method.schedule" in page
    assert run / "report.html" in run.iterdir()


def test_a_run_of_another_task_has_its_own_metrics(tmp_path):
    rows = [
        {"step": 1, "loss": 2.0, "bits_per_byte": 3.0, "learning_rate": 0.1},
        {"step": 1, "validation_bits_per_byte": 2.5, "host_wire_bytes": 5.0},
    ]
    plots = plots_of(make_run(tmp_path / "a", config={"seed": 1}, rows=rows))
    assert "bits_per_byte (dashed: validation)" in plots
    assert "validation_bits_per_byte by bytes over hosts" in plots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none"], "/none holds no run: there is no config.json in it"),
        (["{}/a", "--output={}/no/where.html"], "where.html cannot be written"),
        ([], "give run folders, as in"),
        (["{}/a", "--outptu=x"], "argument '--outptu=x' is not understood"),
        (["{}/broken"], "metrics.jsonl, line 1: "),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, capsys, arguments, message):
    make_run(tmp_path / "a")
    make_run(tmp_path / "broken", rows=[{"no": "step"}, row(1)])
    assert report.main([text.format(tmp_path) for text in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "values",
    [
        [5.0],
        [0.0, 0.0],
        [-1e-9, 1e-9],
        [1e299, -1e299],
        [1.7e308, -1.7e308, 1.0],
        [0.0, 5e-324],
        [1.0, 1.0 + 2**-52],
        [math.nan, 3.0, math.inf],
        [1.0 + step for step in range(30_000)],
    ],
)
def test_curves_of_odd_numbers_are_drawn(values):
    rows = [row(step, loss=value) for step, value in enumerate(values, 1)]
    run = Run("_<run> $1^2$", CONFIG, {}, rows, {}, {})
    plots = [plot for section in make_sections([run]) for plot in section.plots]
    (plot,) = (plot for plot in plots if plot.title.startswith("loss"))
    svg = render(plot, "svg")
    assert svg == render(plot, "svg"), "the same each time"
    texts = {"".join(each.itertext()) for each in ET.fromstring(svg).iter(f"{SVG}text")}
    assert {plot.title, "step", "loss", "_<run> $1^2$"} <= texts
    assert len(svg) < 50_000


def test_a_run_without_rows_has_no_plots():
    run = Run("a", CONFIG, {}, [], {}, {})
    assert not [plot for each in make_sections([run]) for plot in each.plots]
