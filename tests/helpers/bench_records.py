"""Made-up records of studies for the tests of reports: their times follow formulas."""

import dataclasses
import math

from benchmarks.links.records import Curve, Measurement, Point, Setup

COMPUTE_SECONDS = 0.5
DENSE_BYTES = 10e6
TITLES = {
    "dense": "dense",
    "dense-int8": "dense, int8",
    "hsadmm": "H-SADMM, half of the channels",
    "hsadmm-8-int8": "H-SADMM, every 8 steps, int8",
    "pactrain": "PacTrain, half of the channels",
    "topk": "Top-K, 1 %",
    "importance": "importance, 1 %, one choice in 4 steps",
    "none": "no exchange",
    "torch": "PyTorch DDP",
    "torch-powersgd": "PyTorch DDP, PowerSGD hook, rank 2",
}
# Share of the dense bytes that a row sends.
SHARES = {
    "dense": 1.0,
    "dense-int8": 0.25,
    "hsadmm": 0.25,
    "hsadmm-8-int8": 0.008,
    "pactrain": 0.25,
    "topk": 0.02,
    "importance": 0.0133,
    "none": 0.0,
    "torch": 1.0,
    "torch-powersgd": 0.0074,
}
MEGABITS = {"r=20": 8.0, "r=4": 40.0, "100 Mbit/s": 100.0, "unlimited": None}


def make_setup(row="dense", link="r=4", **changes):
    values = {
        "study": "steps",
        "row": row,
        "title": TITLES.get(row, row),
        "runtime": "torch" if row.startswith("torch") else "jax",
        "num_hosts": 2,
        "devices_per_host": 2,
        "hosts_kind": "namespaces",
        "link": link,
        "megabits": MEGABITS[link],
        "compute_seconds": COMPUTE_SECONDS,
        "dense_bytes": DENSE_BYTES,
    }
    return Setup(**{**values, **changes})


def make_measurement(row="dense", link="r=4", **changes):
    """Steps that take as long as computing and sending do, one after the other."""
    fields = {field.name for field in dataclasses.fields(Measurement)}
    own = {key: changes.pop(key) for key in list(changes) if key in fields}
    setup = make_setup(row, link, **changes)
    sent = SHARES.get(row, 1.0) * DENSE_BYTES
    exchange = 8 * sent / 1e6 / setup.megabits if setup.megabits else 0.0
    compute = COMPUTE_SECONDS + 0.01 * len(row) / setup.num_hosts
    middle = compute + exchange * (setup.num_hosts > 1)
    hops = 4.0 if sent else 0.0
    is_peer = setup.runtime == "torch"
    values = {
        "seconds": tuple(middle * (1 + 0.02 * k) for k in (-2, -1, 0, 1, 2)),
        "interface_bytes": 1.01 * sent + 1_000 * hops,
        "traced_bytes": None if is_peer else sent,
        "formula_bytes": None if is_peer else sent,
        "hops": hops,
        "peak_memory": 500_000_000 + 1000 * len(row),
    }
    return Measurement(setup=setup, **{**values, **own})


def make_curve(row="dense", link="r=4", seed=0, rise=0.05, steps=400, **changes):
    """A run whose accuracy nears 0.7, on steps of `make_measurement`."""
    measurement = make_measurement(row, link, **changes)
    points = tuple(
        Point(
            step=step,
            seconds=step * measurement.median,
            host_bytes=step * (measurement.traced_bytes or 0.0),
            value=0.7 - 0.6 * math.exp(-rise * step / 4) - 0.01 * seed,
        )
        for step in range(0, steps + 1, 20)
    )
    summary = {"test_accuracy": 0.69, "params_dense": 1000, "params_kept": 250}
    if measurement.setup.runtime == "torch":
        summary = {}
    return Curve(setup=measurement.setup, points=points, seed=seed, summary=summary)


def every_record():
    """Two studies: all rows over all links on 2 and 4 hosts, and whole runs."""
    steps = [
        make_measurement(row, link, num_hosts=hosts)
        for hosts in (2, 4)
        for row in TITLES
        for link in MEGABITS
    ]
    runs = [
        make_curve(row, link, study="learn", rise=0.05 - 0.003 * number)
        for link in ("r=20", "r=4")
        for number, row in enumerate(TITLES)
    ]
    pauses = [
        make_measurement(
            row,
            study="scale",
            num_hosts=hosts,
            stand_in_seconds=4.0 / hosts,
            seconds=(4.0 / hosts + SHARES[row] * (hosts > 1),),
        )
        for hosts in (1, 2, 4, 8)
        for row in ("dense", "hsadmm", "topk")
    ]
    return [*steps, *runs, *pauses]
