"""What a person sees: lines of progress, in files and on terminals."""

import io
import math
import random
import threading
import time

import pytest

from prunex_jax.tasks import Classification
from prunex_jax.train.console import (
    Console,
    explain_progress,
    format_progress,
    wrapped,
)

OBJECTIVE = Classification()
ROW = {
    "step": 1200,
    "seconds_per_step_median": 0.0521,
    "flops_per_second": 3.1e11,
    "flops_utilisation": None,
    "host_wire_bytes": 1200 * 12.3e6,
    "host_wire_ratio": 0.065,
    "sparsity": 0.5,
    "loss": 1.2341,
    "accuracy": 0.712,
    "primal_residual": 1.2e-3,
}


def test_progress_line_says_everything():
    assert format_progress(ROW, 20000, 64, OBJECTIVE) == (
        " 1200/20000   6% eta   16m   1228 img/s 52.1ms   310GF/s  host 12.3MB x0.065"
        "  sparsity 50%  res 1.2e-3  loss 1.234  acc 71.2%"
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("seconds_per_step_median", 0.001, "eta   18s"),
        ("seconds_per_step_median", 0.5, "eta 2h36m"),
        ("seconds_per_step_median", 2.0, "eta   10h"),
        ("seconds_per_step_median", 20.0, "eta 4d08h"),
        ("seconds_per_step_median", 60.0, "eta   13d"),
        ("seconds_per_step_median", 0.9996, " 1.0s "),
        ("seconds_per_step_median", 0.0999, "99.9ms"),
        ("seconds_per_step_median", 0.09996, " 100ms"),
        ("seconds_per_step_median", 5e-5, " 1.3M img/s"),
        ("seconds_per_step_median", math.nan, "eta     -      - img/s      -"),
        ("flops_per_second", 4.2e15, "52.1ms   4.2PF/s"),
        ("flops_per_second", math.nan, "52.1ms         -"),
        ("flops_utilisation", 0.413, " 310GF/s  41%  host"),
        ("host_wire_bytes", 0.0, "host     0B"),
        ("host_wire_bytes", 1200 * 999.6e6, "host  1.0GB"),
        ("host_wire_bytes", 1200 * 512.0, "host  0.5kB"),
        ("host_wire_ratio", 0.0, " x0.000"),
        ("host_wire_ratio", 0.00063, " x6.3e-4"),
        ("primal_residual", None, "res      -"),
        ("primal_residual", 123.0, "res  1.2e2"),
        ("loss", math.nan, "loss   nan"),
        ("loss", 1234.5, "loss 1e+03"),
        ("accuracy", 1.0, "acc  100%"),
        ("accuracy", 0.9996, "acc  100%"),
        ("accuracy", 0.9994, "acc 99.9%"),
    ],
)
def test_progress_line_fits_numbers_of_every_size(field, value, expected):
    line = format_progress({**ROW, field: value}, 20000, 64, OBJECTIVE)
    assert expected in line


def test_progress_lines_are_aligned_and_short():
    draw = random.Random(0)
    lengths = set()
    for _ in range(500):
        step = draw.randrange(1, 999_999)
        row = {
            "step": step,
            "seconds_per_step_median": 10 ** draw.uniform(-4, 2.9),
            "flops_per_second": 10 ** draw.uniform(3, 17),
            "flops_utilisation": draw.random(),
            "host_wire_bytes": step * 10 ** draw.uniform(2, 11),
            "host_wire_ratio": 10 ** draw.uniform(-2.9, 0),
            "sparsity": draw.uniform(0, 0.99),
            "loss": 10 ** draw.uniform(-4, 3),
            "accuracy": draw.random(),
            "primal_residual": 10 ** draw.uniform(-9, 9),
        }
        lengths.add(
            len(format_progress(row, 999_999, draw.randrange(1, 65536), OBJECTIVE))
        )
    assert len(lengths) == 1, f"lines differ in length: {lengths}"
    assert lengths.pop() <= 132


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def told(stream, is_primary=True):
    with Console(is_primary, stream, num_steps=20000) as console:
        console.line("run       4 steps\n          and [no] markup")
        console.progress(ROW, 20000, 64, OBJECTIVE)
    return stream.getvalue()


def test_files_get_plain_lines():
    lines = ["run       4 steps", "          and [no] markup"]
    assert told(io.StringIO()).splitlines() == [
        *lines,
        *explain_progress(OBJECTIVE, has_peak=False).splitlines(),
        format_progress(ROW, 20000, 64, OBJECTIVE),
    ]


def test_columns_are_explained_once_and_in_their_order():
    stream = io.StringIO()
    with Console(True, stream) as console:
        for _ in range(3):
            row = {**ROW, "flops_utilisation": 0.4}
            console.progress(row, 20000, 64, OBJECTIVE)
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith("columns   step, ") and first.endswith("share of the peak")
    assert len(rest) == 3 + 3 and "columns" not in " ".join(rest)
    words = ["host:", "sparsity:", "res:", "loss", "acc"]
    positions = [" ".join(rest[:3]).index(word) for word in words]
    assert positions == sorted(positions)


def test_what_takes_long_says_so_until_it_ends():
    stream = io.StringIO()
    with Console(True, stream, patience=0.01) as console:
        with pytest.raises(KeyError), console.busy("compiling the local step"):
            deadline = time.monotonic() + 20
            while stream.getvalue().count("\n") < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            raise KeyError
        shown = stream.getvalue()
        assert not [t for t in threading.enumerate() if t.name == "busy"]
        time.sleep(0.05)
    assert stream.getvalue() == shown, "nothing after its end"
    assert shown.count("compiling the local step (0 s so far)\n") >= 2


@pytest.mark.parametrize(("is_primary", "patience"), [(True, 60.0), (False, 0.001)])
def test_what_is_quick_or_elsewhere_says_nothing(is_primary, patience):
    stream = io.StringIO()
    with Console(is_primary, stream, patience=patience) as console:
        with console.busy("evaluating"):
            time.sleep(0.02)
    assert stream.getvalue() == ""


def test_terminals_get_the_same_lines_and_a_bar():
    shown = told(Terminal())
    assert "4 steps" in shown and "and [no] markup" in shown
    line = format_progress(ROW, 20000, 64, OBJECTIVE, 80)
    assert f"{line}\n" in shown
    bar = shown.rpartition("acc 71.2%")[2]
    assert "6%" in bar and "eta 16m" in bar, "the bar follows, with the same estimate"


def test_the_bar_comes_with_the_first_steps():
    stream = Terminal()
    with Console(True, stream, num_steps=20000) as console:
        console.line("compiling the first step")
        assert "%" not in stream.getvalue()
        console.progress(ROW, 20000, 64, OBJECTIVE)
        assert "6%" in stream.getvalue()


def test_time_is_not_foreseen_before_ten_steps():
    early, first, last = (
        format_progress({**ROW, "step": step}, total, 64, OBJECTIVE)
        for step, total in ((9, 20000), (10, 20000), (4, 4))
    )
    assert "eta     -" in early and "eta   17m" in first and "eta    0s" in last


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 132])
def test_lines_fit_the_terminal(width):
    whole = format_progress(ROW, 20000, 64, OBJECTIVE)
    line = format_progress(ROW, 20000, 64, OBJECTIVE, width)
    assert len(line) <= max(width, 40)
    assert "loss 1.234  acc 71.2%" in line and "1200/20000" in line
    parts = line.split("  ")
    assert all(part in whole for part in parts), "columns stay as they are"
    if width >= 80:
        assert "host 12.3MB x0.065" in line
    if width >= len(whole):
        assert line == whole


@pytest.mark.parametrize("width", [15, 30, 80])
def test_words_are_wrapped_below_their_text(width):
    text = "model     resnet20: 272,474 parameters\n          and 12 channel groups"
    lines = wrapped(text, width).split("\n")
    if width == 15:
        assert lines == text.split("\n"), "too narrow to wrap"
    else:
        assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def test_silence_is_counted_over_short_works():
    """Ten seconds without a word end, however many things were done meanwhile."""
    stream = io.StringIO()
    with Console(True, stream, patience=0.3) as console:
        deadline = time.monotonic() + 20
        while not stream.getvalue() and time.monotonic() < deadline:
            with console.busy("compiling"):
                time.sleep(0.1)
    assert stream.getvalue() == "compiling (0 s so far)\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_processes_write_nothing(stream):
    assert told(stream, is_primary=False) == ""
