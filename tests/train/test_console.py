"""What a person sees: lines of progress, in files and on terminals."""

import io
import math
import random

import pytest

from prunex_jax.tasks import Classification
from prunex_jax.train.console import Console, format_progress

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
        format_progress(ROW, 20000, 64, OBJECTIVE),
    ]


def test_terminals_get_the_same_lines_and_a_bar():
    shown = told(Terminal())
    assert "4 steps" in shown and "and [no] markup" in shown
    assert format_progress(ROW, 20000, 64, OBJECTIVE) in shown
    assert "6%" in shown.rpartition("acc 71.2%")[2], "the bar follows"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_processes_write_nothing(stream):
    assert told(stream, is_primary=False) == ""
