"""Reports of made-up studies: what tables compare, and that pages need nothing else."""

import dataclasses
import html.parser
import importlib.util
import io
import json
import re

import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from benchmarks.links.records import RECORDS_FILE, write_record
from benchmarks.report.__main__ import main
from benchmarks.report.cost import (
    Extrapolation,
    Modelled,
    Prediction,
    extrapolation_tables,
    predictions_table,
)
from benchmarks.report.steps import (
    byte_disagreements,
    bytes_per_step,
    peak_memory,
    scaling,
    step_times,
)
from benchmarks.report.study_report import (
    Findings,
    make_sections,
    read_findings,
    write_report,
)
from benchmarks.report.targets import time_to_targets
from prunex_jax.base.errors import UserError
from prunex_jax.compare.report import plots
from prunex_jax.compare.report.page import make_page
from prunex_jax.compare.sweep.figure import Figure as Metric
from prunex_jax.methods import METHODS
from tests.helpers.bench_records import (
    COMPUTE_SECONDS,
    DENSE_BYTES,
    TITLES,
    every_record,
    make_curve,
    make_measurement,
)

# Elements of HTML without an end.
VOID = {"meta", "br", "img", "source"}


def texts(table):
    """Row's title -> column -> text of the cell; titles of columns on one line."""
    columns = [head.replace("\n", " ") for head in table.header[1:]]
    return {
        name.text: dict(zip(columns, (cell.text for cell in cells), strict=True))
        for name, *cells in table.rows
    }


def seconds_modelled(**changes):
    values = {"record": make_measurement(seconds=(2.0,)), "seconds": 2.2}
    return Prediction(**{**values, "is_held_out": True, **changes})


class Page(html.parser.HTMLParser):
    """What a page is made of: open elements, what it loads, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loaded, self.text, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        places = ("src", "srcset", "href", "action", "data", "poster")
        self.loaded += [value for name, value in attributes if name in places]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> ends nothing"

    def handle_data(self, data):
        self.text.append(data)


def test_step_times_are_shares_of_dense_on_the_same_link_and_hosts():
    tables = step_times([r for r in every_record() if r.setup.study == "steps"])
    assert [table.title for table in tables] == [
        "Step time: steps, 2 hosts x 2 devices",
        "Step time: steps, 4 hosts x 2 devices",
    ]
    for hosts, table in zip((2, 4), tables, strict=True):
        found = texts(table)
        links = ["r=20 8 Mbit/s", "r=4 40 Mbit/s", "100 Mbit/s r=1.6", "unlimited"]
        assert list(found["dense"]) == links
        for link, name in zip(links, ("r=20", "r=4", "100 Mbit/s"), strict=False):
            dense = make_measurement("dense", name, num_hosts=hosts).median
            for row, title in TITLES.items():
                median = make_measurement(row, name, num_hosts=hosts).median
                share = float(found[title][link].split("\n")[-1].split()[0])
                assert share == pytest.approx(median / dense, rel=0.006)
            assert found["dense"][link].endswith("\n1.00 of dense")
        assert "n = 5 measured rounds" in table.notes[0]


def test_rows_come_with_dense_first_and_peers_last():
    records = [make_measurement(row) for row in ("torch", "topk", "dense", "hsadmm")]
    (table,) = step_times(records)
    assert list(texts(table)) == [
        *("dense", "Top-K, 1 %", "H-SADMM, half of the channels", "PyTorch DDP")
    ]


def test_what_was_not_measured_is_left_blank():
    records = [
        make_measurement("dense", "r=4"),
        make_measurement("topk", "r=20"),
        make_measurement("topk", "r=4"),
    ]
    found = texts(step_times(records)[0])
    assert found["dense"]["r=20 8 Mbit/s"] == "-"
    # Nothing to compare with.
    assert "of dense" not in found["Top-K, 1 %"]["r=20 8 Mbit/s"]
    assert "of dense" in found["Top-K, 1 %"]["r=4 40 Mbit/s"]


def test_quartiles_are_shown_where_there_are_several_rounds():
    one = make_measurement(seconds=(2.0,))
    five = make_measurement(seconds=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert step_times([one])[0].rows[0][1].text == "2.00 s\n1.00 of dense"
    text = step_times([five])[0].rows[0][1].text
    assert text == "3.00 s\n2.00 to 4.00 s\n1.00 of dense"


def test_the_last_measurement_counts():
    records = [make_measurement(seconds=(seconds,)) for seconds in (9.0, 2.0)]
    assert step_times(records)[0].rows[0][1].value == 2.0


def test_the_row_that_r_is_counted_in_is_no_method():
    records = [make_measurement("computation", "unlimited"), make_measurement()]
    (table,) = step_times(records)
    assert list(texts(table)) == ["dense"]
    assert table.header == ("method", "r=4\n40 Mbit/s")


def test_bytes_that_agree():
    assert byte_disagreements(every_record()) == []


@pytest.mark.parametrize(
    ("row", "counted", "is_wrong"),
    [
        ("dense", 1.03 * DENSE_BYTES + 8_000, False),
        ("dense", 1.03 * DENSE_BYTES + 8_001, True),
        ("dense", 0.97 * DENSE_BYTES - 8_000, False),
        ("dense", 0.97 * DENSE_BYTES - 8_001, True),
        # No messages at all: two devices are allowed one message each.
        ("none", 2_000, False),
        ("none", 2_001, True),
        ("dense", None, False),
        ("torch", 9e9, False),
    ],
)
def test_bytes_may_differ_by_a_share_and_a_constant_per_message(row, counted, is_wrong):
    # 2 sums of 2 hops, of 2 devices.
    record = make_measurement(row, interface_bytes=counted)
    gaps = byte_disagreements([record])
    assert len(gaps) == (2 if is_wrong else 0)
    assert all(" by trace, " in gap or " by model, " in gap for gap in gaps)
    (table,) = bytes_per_step([record])
    assert any(cell.is_flagged for cell in table.rows[0]) == is_wrong
    assert ("(!)" in table.markdown().split("\n")[2]) == is_wrong


def test_a_model_that_is_not_the_trace_is_found():
    record = make_measurement(formula_bytes=2 * DENSE_BYTES)
    (gap,) = byte_disagreements([record])
    assert "20,000,000 by model" in gap
    assert "steps, 2 hosts x 2 devices, r=4, dense" in gap


@pytest.mark.parametrize(("best", "worst"), [("r=4", "r=20"), ("r=20", "r=4")])
def test_bytes_are_shown_for_the_link_that_agrees_least(best, worst):
    good = make_measurement(link=best, interface_bytes=DENSE_BYTES)
    bad = make_measurement(link=worst, interface_bytes=1.5 * DENSE_BYTES)
    for records in ([good, bad], [bad, good]):
        found = texts(bytes_per_step(records)[0])["dense"]
        assert found["link"] == f"{worst}\nof 2 links"
        assert found["difference"] == "+50.00 %"
        assert found["interface"] == "15.0 MB"
        # 5 MB more, in 2 sums of 2 hops, of 2 devices.
        assert found["difference per message"] == "+625,000 B"


def test_loopback_counts_nothing_and_is_called_so():
    record = make_measurement(
        "hsadmm", "unlimited", hosts_kind="loopback", interface_bytes=None
    )
    (table,) = bytes_per_step([record])
    assert table.title.endswith("(loopback)")
    found = texts(table)[TITLES["hsadmm"]]
    assert (found["interface"], found["difference"]) == ("-", "-")
    assert found["trace"] == "2.50 MB"
    assert not any(cell.is_flagged for cell in table.rows[0])


def test_loopback_and_namespaces_are_not_compared():
    records = [
        make_measurement("dense", hosts_kind="namespaces"),
        make_measurement("topk", hosts_kind="loopback"),
    ]
    assert [list(texts(table)) for table in step_times(records)] == [
        ["Top-K, 1 %"],
        ["dense"],
    ]


def test_speed_ups_are_times_of_dense_over_those_of_the_row():
    records = every_record()
    targets = {"learn": (0.6,)}
    tables = {table.title: table for table in time_to_targets(records, targets)}
    for link, title in (("r=20", "r=20, 8 Mbit/s"), ("r=4", "r=4, 40 Mbit/s")):
        table = tables[f"Time to accuracy: learn, 2 hosts x 2 devices, {title}"]
        columns = [head.replace("\n", " ") for head in table.header]
        at = columns.index("to 0.6: seconds"), columns.index("to 0.6: speed-up")
        seconds = {row[0].text: row[at[0]].value for row in table.rows}
        speed_ups = {row[0].text: row[at[1]].value for row in table.rows}
        assert speed_ups["dense"] == 1.0
        assert set(seconds) == set(TITLES.values())
        for title in seconds:
            product = seconds[title] * speed_ups[title]
            assert product == pytest.approx(seconds["dense"])
        run = next(
            r for r in records if (r.setup.study, r.setup.link) == ("learn", link)
        )
        assert seconds["dense"] == run.reached(0.6).seconds
        assert speed_ups["H-SADMM, every 8 steps, int8"] > 3


def test_accuracies_that_are_not_reached_are_called_so():
    records = [make_curve("dense"), make_curve("topk", rise=0.001)]
    (table,) = time_to_targets(records, {"steps": (0.6, 0.9)})
    found = texts(table)
    assert found["dense"]["to 0.9: seconds"] == "not reached"
    assert found["dense"]["to 0.9: speed-up"] == "-"
    assert found["Top-K, 1 %"]["to 0.6: seconds"] == "not reached"
    assert found["dense"]["to 0.6: speed-up"] == "1.00x"


def test_a_row_that_gets_where_dense_does_not_has_no_speed_up():
    records = [make_curve("dense", rise=0.001), make_curve("topk")]
    found = texts(time_to_targets(records, {"steps": (0.6,)})[0])["Top-K, 1 %"]
    assert found["to 0.6: seconds"] != "not reached"
    assert found["to 0.6: speed-up"] == "-"


BITS = Metric("bits_per_byte", less_is_better=True)


def bits_curve(row, rise=0.05):
    """A run whose bits per byte fall from 8 to 1, as its accuracy rises."""
    curve = make_curve(row, rise=rise)
    points = tuple(
        dataclasses.replace(point, value=8 - 10 * (point.value - 0.1) * 7 / 6)
        for point in curve.points
    )
    summary = {**curve.summary, "test_bits_per_byte": 1.25}
    return dataclasses.replace(curve, points=points, figure=BITS, summary=summary)


def test_metrics_of_which_less_is_better_are_reached_from_above():
    records = [bits_curve("dense"), bits_curve("topk", rise=0.02)]
    (table,) = time_to_targets(records, {"steps": (4.0, 0.5)})
    assert table.title.startswith("Time to bits per byte: steps")
    found = texts(table)
    for record in records:
        reached = next(p for p in record.points if p.value <= 4.0)
        assert 0 < reached.step < record.points[-1].step
        told = found[record.setup.title]
        assert told["to 4: steps"] == f"{reached.step}"
        assert told["to 0.5: seconds"] == "not reached"
        assert told["test"] == "1.2500"
    assert "until validation bits per byte is first seen" in table.notes[0]
    assert "at the target or below" in table.notes[0]
    # A network that knows nothing is far above the target, and has not reached it.
    assert records[0].points[0].value == pytest.approx(8.0)


def test_plots_and_sections_have_the_name_of_the_metric():
    records = [bits_curve("dense"), bits_curve("topk", rise=0.02)]
    findings = Findings(records, targets={"steps": (4.0,)})
    section = make_sections(findings)[0]
    assert section.title == "Time to bits per byte"
    by_name = {plot.name: plot for plot in section.plots}
    assert set(by_name) == {
        f"bits-per-byte-{key}_steps_2x2_r-4" for key in ("bytes", "seconds")
    }
    for plot in by_name.values():
        assert plot.up == "validation bits per byte"
        axes = Figure().add_subplot()
        plots.draw(plot, axes)
        dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert [line.get_ydata()[0] for line in dotted] == [4.0]
        assert max(y for _, y in plot.series[0].points) <= 8


def test_metrics_are_not_mixed():
    records = [make_curve("dense"), bits_curve("dense")]
    titles = [table.title for table in time_to_targets(records, {})]
    assert [title.split(":")[0] for title in titles] == [
        "Time to accuracy",
        "Time to bits per byte",
    ]


def test_seeds_are_put_together():
    records = [make_curve(seed=seed) for seed in range(3)]
    (table,) = time_to_targets(records, {"steps": (0.6, 0.685)})
    found = texts(table)["dense"]
    assert "n = 3 seeds" in table.notes[0]
    assert found["final validation"] == "0.6860\n0.6760 to 0.6960"
    # Only the first seeds come so far.
    reached = [run.reached(0.685) is not None for run in records]
    assert reached == [True, True, False]
    assert found["to 0.685: seconds"] == "not reached\nby 1 of 3 seeds"


def test_what_peers_do_not_say_is_left_blank():
    found = texts(time_to_targets([make_curve("torch")], {})[0])["PyTorch DDP"]
    assert (found["test"], found["parameters kept"]) == ("-", "-")
    found = texts(time_to_targets([make_curve("dense")], {})[0])["dense"]
    assert (found["test"], found["parameters kept"]) == ("0.6900", "0.25")


def test_scaling_is_against_one_host_and_says_what_stood_in():
    (table,) = scaling(every_record())
    assert table.title == "Scaling: scale, 2 devices per host, r=4"
    pauses = [note for note in table.notes if note.startswith("Stand-in")]
    assert [note.split(" in ")[0] for note in pauses] == [
        "Stand-in: computation is a pause of 4 s / hosts"
    ]
    found = texts(table)
    assert found["dense"] == {
        "1 host": "4.00 s\n1.00x, 100 %",
        "2 hosts": "3.00 s\n1.33x, 67 %",
        "4 hosts": "2.00 s\n2.00x, 50 %",
        "8 hosts": "1.50 s\n2.67x, 33 %",
    }


def test_one_host_needs_no_link():
    records = [
        make_measurement(link="unlimited", num_hosts=1, seconds=(4.0,)),
        make_measurement(link="r=4", num_hosts=2, seconds=(2.5,)),
    ]
    (table,) = scaling(records)
    assert texts(table)["dense"]["2 hosts"] == "2.50 s\n1.60x, 80 %"
    assert table.title.endswith("r=4")


def test_hosts_without_one_alone_are_no_scaling():
    assert scaling([make_measurement(num_hosts=n) for n in (2, 4)]) == []


def test_memory_is_the_largest_over_links():
    records = [
        make_measurement(link="r=4", peak_memory=3_000_000),
        make_measurement(link="r=20", peak_memory=5_000_000),
    ]
    assert texts(peak_memory(records)[0]) == {"dense": {"2 hosts": "5.00 MB"}}


def test_the_model_is_judged_by_points_it_has_not_seen():
    modelled = Modelled(
        predictions=(
            seconds_modelled(seconds=20.0, is_held_out=False),
            seconds_modelled(seconds=2.2),
            seconds_modelled(seconds=1.6),
            seconds_modelled(seconds=2.0),
        ),
        notes=("Latency, bandwidth, computation.",),
    )
    (table,) = predictions_table(modelled)
    assert "3 of 4 points held out" in table.notes[0]
    assert "error 10.0 % in the median, 20.0 % at worst" in table.notes[0]
    assert [row[-1].text for row in table.rows] == [*["held out"] * 3, "fitted"]
    assert predictions_table(Modelled()) == []


def test_extrapolations_are_a_table_for_each_setting():
    titles = {"dense": "dense", "topk": "topk"}
    times = {"dense": {1: 8.0, 16: 2.0}, "topk": {16: 1.0}}
    first, second = extrapolation_tables(
        [
            Extrapolation("a", titles, times),
            Extrapolation("b", titles, {"topk": {4: 1.0}}),
        ]
    )
    assert texts(first)["dense"]["16 hosts"] == "2.00 s\n1.00 of dense\n4.00x"
    assert texts(first)["topk"] == {"1 host": "-", "16 hosts": "1.00 s\n0.500 of dense"}
    assert (second.title, second.header) == ("Extrapolated: b", ("method", "4 hosts"))


def test_titles_are_text_and_not_html():
    title = "<script>alert('a|b')</script> & \"more\""
    records = [make_measurement("evil", title=title, study="a<b>")]
    page = Page(make_page("t", ["<i>"], make_sections(Findings(records))))
    assert page.tags.count("script") == 1
    assert "i" not in page.tags
    assert "b" not in page.tags
    assert title in page.text
    (table,) = step_times(records)
    line = table.markdown().split("\n")[2]
    assert line.startswith("| &lt;script&gt;alert('a\\|b')&lt;/script&gt; &amp; ")
    assert len(re.findall(r"(?<!\\)\|", line)) == 3


@pytest.fixture
def folder(tmp_path):
    for record in every_record():
        write_record(tmp_path, record)
    facts = {
        "versions": {"jax": "0.10.2"},
        "commands": ["python -m benchmarks links --study=a", "b"],
        "target_accuracies": {"learn": [0.6]},
    }
    (tmp_path / "environment.json").write_text(json.dumps(facts))
    return tmp_path


def check_page(path):
    """Checks that a page is balanced and loads nothing; returns it."""
    page = Page(path.read_text())
    assert page.open == []
    assert all(value.startswith("data:") for value in page.loaded), page.loaded
    assert not re.search(r"url\(|@import|https?://", path.read_text())
    return page


@pytest.mark.slow
def test_a_report_needs_nothing_else(folder):
    modelled = Modelled(
        predictions=(seconds_modelled(), seconds_modelled(is_held_out=False)),
        extrapolations=(
            Extrapolation(
                "s",
                {"dense": "dense", "new": "new"},
                {row: {1: 9.0, 4096: 9 / 4096} for row in ("dense", "new")},
            ),
        ),
        lines={("steps", "dense", 2): [(8.0, 9.0), (100.0, 1.0)]},
    )
    findings = dataclasses.replace(read_findings([folder]), modelled=modelled)
    png = folder / "png"
    page = check_page(write_report(folder, findings, png))
    names = {path.stem for path in png.iterdir()}
    assert names == {
        "accuracy-seconds_learn_2x2_r-20",
        "accuracy-seconds_learn_2x2_r-4",
        "accuracy-bytes_learn_2x2_r-20",
        "accuracy-bytes_learn_2x2_r-4",
        "step-time_steps_2x2",
        "step-time_steps_4x2",
        "scaling_scale_8x2_r-4",
        "model",
        "extrapolated-1",
    }
    for path in png.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(page.loaded) == len(names)
    text = " ".join(page.text)
    for part in ("All hosts share the cores", "versions.jax", "--study=a", "to 0.6:"):
        assert part in text
    assert "| dense | " in (folder / "tables.md").read_text()


def plots_of(records):
    sections = make_sections(Findings(records))
    return [plot for section in sections for plot in section.plots]


def test_a_method_looks_the_same_in_all_plots():
    seen, drawn = {}, plots_of(every_record())
    for plot in drawn:
        axes = Figure().add_subplot()
        rows = {TITLES[row]: row for row in plot.emphasised}
        for title, (line, *_) in plots.draw(plot, axes):
            if line.get_linestyle() != "None":
                look = line.get_color(), line.is_dashed()
                seen.setdefault(rows[title], set()).add(look)
    assert len(drawn) == 7 and len(seen) > 4
    assert all(len(looks) == 1 for looks in seen.values()), seen
    assert len(set.union(*seen.values())) == len(seen)
    # Beyond one report: methods have colours of their own, whatever else is drawn.
    alone = plots.make_looks({"topk": "Top-K, 1 %"})["topk"]
    assert alone.colour.upper() == plots.STYLES["topk"][0]


def test_every_method_has_a_colour_and_a_mark():
    for method in METHODS:
        assert method in plots.STYLES
    colours = [colour for colour, _ in plots.STYLES.values()]
    marks = [mark for _, mark in plots.STYLES.values()]
    assert len(set(colours)) == len(colours) and len(set(marks)) == len(marks)
    assert plots.make_looks({"mine": "mine"})["mine"].colour


def test_six_series_are_named_and_the_others_are_grey():
    plot = next(p for p in plots_of(every_record()) if p.name == "step-time_steps_2x2")
    assert plot.emphasised[:3] == ["dense", "hsadmm", "hsadmm-8-int8"]
    assert len(plot.emphasised) == plots.MOST_EMPHASISED < len(plot.series)
    axes = Figure().add_subplot()
    named = [title for title, _ in plots.draw(plot, axes)]
    assert sorted(named) == sorted(TITLES[row] for row in plot.emphasised)
    styles = {each.get_label(): each[0] for each in axes.containers}
    others = set(TITLES) - set(plot.emphasised)
    assert len({styles[TITLES[row]].get_color() for row in others}) == 1
    assert all(styles[TITLES[row]].get_linewidth() < 1 for row in others)


@pytest.mark.parametrize("width", [8, 20, 26, 45])
def test_names_fit(width):
    records = [
        make_measurement(row, link, title="w" * width)
        for row in TITLES
        for link in ("r=4", "r=20")
    ]
    (plot,) = plots_of(records)
    with PIL.Image.open(io.BytesIO(plots.render(plot))) as picture:
        pixels = np.asarray(picture.convert("L"))
    for edge in (pixels[:, -2:], pixels[:, :2], pixels[:2], pixels[-2:]):
        assert edge.min() == 255, "something is cut off"


def test_a_report_asks_for_matplotlib_before_anything(folder, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else found(n)
    )
    assert main([f"--workdir={folder}"]) == 2
    assert "pip install 'prunex-jax[report]'" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


@pytest.mark.slow
def test_disagreements_are_said_first(folder):
    bad = make_measurement("topk", study="wrong", interface_bytes=1e9)
    write_record(folder, bad)
    sections = make_sections(read_findings([folder]))
    warned = [section for section in sections if section.warnings]
    assert [section.title for section in warned] == ["Bytes of a step"]
    assert (
        warned[0].warnings[0].startswith("wrong, 2 hosts x 2 devices, r=4, Top-K, 1 %")
    )
    assert 'class="flag"' in make_page("t", [], sections)


def test_folders_are_read_together(tmp_path):
    for name, study in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name, make_curve(study=study))
    found = read_findings([tmp_path / name for name in "abc"], targets=(0.5,))
    assert [record.setup.study for record in found.records] == [
        *("one", "one (b)", "two")
    ]
    assert found.targets == dict.fromkeys(("one", "one (b)", "two"), (0.5,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir={folder}"], f"has no {RECORDS_FILE}"),
        (["--workdir={folder}", "--targets=0.6,high"], "--targets=0.6,high"),
        ([], "--workdir is required"),
        (["--workdir=,"], "names no folder"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    assert main([text.format(folder=tmp_path) for text in arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_environment_that_is_broken(tmp_path):
    write_record(tmp_path, make_measurement())
    (tmp_path / "environment.json").write_text("[]")
    with pytest.raises(UserError, match="is no JSON object"):
        read_findings([tmp_path])


@pytest.mark.parametrize("kind", ["namespaces", "loopback", "cluster"])
def test_the_page_says_what_hosts_were(kind, tmp_path):
    record = make_measurement(hosts_kind=kind)
    text = write_report(tmp_path, Findings([record])).read_text()
    assert ("share the cores of one machine" in text) == (kind != "cluster")
    assert ("Where it says loopback" in text) == (kind == "loopback")
    assert ("what else the machines send" in text) == (kind == "cluster")


def test_r_is_that_of_the_setup():
    setup = make_measurement(link="100 Mbit/s").setup
    assert setup.r == pytest.approx(8 * DENSE_BYTES / 1e6 / 100 / COMPUTE_SECONDS)
    assert "r=1.6" in step_times([make_measurement(link="100 Mbit/s")])[0].header[1]
