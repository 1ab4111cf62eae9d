"""Study files of both kinds: how they are read, and which part of them is taken."""

import pytest

from benchmarks.study import LinkRow, LinkStudy
from prunex_jax.base.errors import UserError
from prunex_jax.compare.sweep.study import Sweep, load_study, narrow_study

ROWS = (LinkRow("a", "dense"), LinkRow("b"), LinkRow("c"))
SWEEP = Sweep(name="s", config="x.py", rows=ROWS, baselines=("a",), health_rows=("b",))
LINKS = LinkStudy(
    name="s", config="x.py", rows=ROWS, links=("r=1", "r=4"), held_out=("r=4",)
)


@pytest.mark.parametrize("study", [SWEEP, LINKS], ids=["sweep", "links"])
def test_rows_are_taken_by_name_in_the_order_asked_for(study):
    assert narrow_study(study, ["b", "a"]).rows == (ROWS[1], ROWS[0])
    assert narrow_study(study, []) == study
    with pytest.raises(UserError, match=r"'d', which is no row.*there are a, b, c"):
        narrow_study(study, ["d"])


def test_what_belongs_to_parts_left_out_goes_with_them():
    assert narrow_study(SWEEP, ["b"]).baselines == ()
    assert narrow_study(SWEEP, ["b"]).health_rows == ("b",)
    assert narrow_study(SWEEP, seeds=[7]).seeds == (7,)
    assert narrow_study(LINKS, links=["r=1"]).held_out == ()
    with pytest.raises(UserError, match="num_hosts=0 must be at least 1"):
        narrow_study(LINKS, num_hosts=[0])


def write_study(folder, kind):
    file = folder / "study.py"
    file.write_text(
        "from benchmarks.study import LinkRow, LinkStudy\n"
        "from prunex_jax.compare.sweep.study import Sweep\n\n\n"
        "def get_study():\n"
        "    rows = (LinkRow('a'), LinkRow('b', config='other.py:small'))\n"
        f"    return {kind}(name='s', config='../x.py', rows=rows)\n"
    )
    return file


def test_configs_are_found_from_the_file_of_the_study(tmp_path):
    folder = tmp_path / "studies"
    folder.mkdir()
    study = load_study(write_study(folder, "Sweep"), Sweep, ["--config.seed=3"])
    assert study.config == f"{tmp_path}/x.py"
    assert [row.config for row in study.rows] == [
        f"{tmp_path}/x.py",
        f"{folder}/other.py:small",
    ]
    assert study.overrides == ("--config.seed=3",)


@pytest.mark.parametrize(
    ("kind", "wanted", "command"),
    [("Sweep", LinkStudy, "sweep --sweep="), ("LinkStudy", Sweep, "links --study=")],
)
def test_the_other_kind_is_refused_with_the_command_that_runs_it(
    kind, wanted, command, tmp_path
):
    file = write_study(tmp_path, kind)
    with pytest.raises(UserError, match=f"no {wanted.__name__}; .*{command}{file}"):
        load_study(file, wanted)


def test_a_file_without_a_study_is_refused(tmp_path):
    file = tmp_path / "none.py"
    file.write_text("def get_study():\n    return 3\n")
    with pytest.raises(UserError, match="gave 3, which is no Sweep"):
        load_study(file, Sweep)
