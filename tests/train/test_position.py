"""Where a run is: what checkpoints keep of it, with and without a version."""

import dataclasses
import json

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.train.steps.clock import ClockTotals
from prunex_jax.train.steps.compiled import Ledger
from prunex_jax.train.steps.position import Handover, RunPosition

POSITION = RunPosition(
    keep_counts={"stem": 8, "blocks/0": 4},
    counts_density=0.5,
    step=12,
    phase=1,
    prepared_phase=1,
    num_rounds=3,
    handover=Handover(8, {"stem": (0, 2), "blocks/0": ()}, 1e-6, 0.25),
    clock=ClockTotals(9.5, 3.0, 12, (0.25, 0.5)),
    ledger=Ledger({"host": 24.0, "device": 0.0}, {"local_step": 12}, 5),
)
# As written by versions that kept a dict, and named no version.
BEFORE_VERSIONS = """{
  "step": 12,
  "keep_counts": {"stem": 8, "blocks/0": 4},
  "counts_density": 0.5,
  "phase": 1,
  "prepared_phase": 1,
  "num_rounds": 3,
  "handover": {"step": 8, "kept": {"stem": [0, 2], "blocks/0": []},
    "max_abs_error": 1e-06, "seconds_per_step_median": 0.25},
  "clock": {"seconds_total": 9.5, "seconds_in_steps": 3.0, "num_steps": 12,
    "intervals": [0.25, 0.5]},
  "ledger": {"wire_bytes": {"host": 24.0, "device": 0.0},
    "num_calls": {"local_step": 12}, "num_compilations": 5}
}"""


def saved(**changes):
    """What a checkpoint holds, with some entries changed."""
    return {**json.loads(json.dumps(POSITION.to_dict())), **changes}


@pytest.mark.parametrize(
    "position",
    [
        POSITION,
        RunPosition({}),
        RunPosition({"a": 1}),
    ],
)
def test_what_is_written_is_read(position):
    through_json = json.loads(json.dumps(position.to_dict()))
    assert RunPosition.from_dict(through_json) == position
    assert RunPosition.from_dict(position.to_dict()) == position


def test_positions_before_versions_are_read():
    assert RunPosition.from_dict(json.loads(BEFORE_VERSIONS)) == POSITION
    without_cut = {**json.loads(BEFORE_VERSIONS), "handover": None}
    assert RunPosition.from_dict(without_cut).handover is None


def test_the_first_version_had_one_cut_and_did_not_count_work():
    first = {"version": 1, **json.loads(BEFORE_VERSIONS)}
    assert RunPosition.from_dict(first) == POSITION


def test_versions_of_several_cuts_are_read_where_there_was_one():
    cut = {**saved()["handover"], "is_last": True, "macs_before": 2**60}
    assert RunPosition.from_dict(saved(version=4, handover=cut)) == POSITION
    of_several = saved(version=4, handover={**cut, "is_last": False})
    with pytest.raises(UserError, match="still to go after its cut"):
        RunPosition.from_dict(of_several)


def test_earlier_versions_find_what_they_know():
    now = saved()
    assert now.pop("version") == 5
    assert (now.pop("mesh_since"), now.pop("dense_bytes_before")) == (0, 0.0)
    assert (now.pop("left_out"), now.pop("left_out_macs")) == (0, 0)
    assert now == json.loads(BEFORE_VERSIONS)


@pytest.mark.parametrize("version", [6, "1", None, -1])
def test_another_version_is_refused_in_one_line(version):
    with pytest.raises(UserError, match="use the one that wrote it") as refused:
        RunPosition.from_dict(saved(version=version))
    assert repr(version) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "12"}, r"position\.step is '12'"),
        ({"step": 1.5}, r"position\.step is 1\.5"),
        ({"step": True}, r"position\.step is True"),
        ({"phase": None}, r"position\.phase is None"),
        ({"keep_counts": [8, 4]}, r"position\.keep_counts is \[8, 4\]"),
        ({"keep_counts": {"stem": 0.5}}, r"position\.keep_counts\.stem is 0\.5"),
        ({"keep_counts": {3: 4}}, r"position\.keep_counts is \{3: 4\}"),
        ({"handover": {"step": 8}}, r"position\.handover lacks 'kept'"),
        ({"handover": 8}, r"position\.handover is 8"),
        ({"clock": {}}, r"position\.clock lacks 'intervals'"),
        ({"clock": {**saved()["clock"], "intervals": "12"}}, r"clock\.intervals is"),
        ({"ledger": {**saved()["ledger"], "__class__": 1}}, "unknown '__class__'"),
        ({"extra": 1}, "position has an unknown 'extra'"),
        ({"phase": -1}, "position.phase is -1"),
        ({"step": -3}, "position.step is -3"),
    ],
)
def test_wrong_types_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as refused:
        RunPosition.from_dict(saved(**changes))
    assert "--fresh" in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_missing_is_named():
    for key in set(saved()) - {"version"}:
        rest = {name: value for name, value in saved().items() if name != key}
        with pytest.raises(UserError, match=f"position lacks '{key}'"):
            RunPosition.from_dict(rest)


def test_whole_numbers_serve_as_floats():
    position = RunPosition.from_dict(saved(counts_density=1))
    assert position.counts_density == 1.0 and type(position.counts_density) is float


def test_a_position_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POSITION.step = 3


def test_a_run_takes_over_the_totals_of_its_ledger():
    ledger = Ledger()
    ledger.go_on_from(POSITION.ledger)
    ledger.record("local_step", {"host": 1.0})
    assert (ledger.wire_bytes["host"], ledger.num_calls["local_step"]) == (25.0, 13)
    assert POSITION.ledger.wire_bytes["host"] == 24.0, "a copy"
