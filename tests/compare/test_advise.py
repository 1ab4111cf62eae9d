"""Advice follows the links: compress over slow ones, and not over fast ones."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest

import tests.helpers.tiny_network  # noqa: F401
from prunex_jax.compare import advise as command
from prunex_jax.compare.advise import (
    Advice,
    Prediction,
    advise,
    candidates,
    main,
    recommend,
    report,
)
from prunex_jax.compare.probe import ProbedLink
from prunex_jax.compare.step_time import Link
from prunex_jax.mesh import make_topology
from prunex_jax.processes.launcher import Launch
from prunex_jax.train.build import joining
from prunex_jax.train.build.config import config_to_dict, dotted_keys, resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = [
    f"--config={CONFIGS / 'digits_resnet20_hsadmm.py'}",
    "--config.topology.layout=2",
    "--config.model.width=0.25",
]
SETTINGS = {
    "topology": {"layout": "2"},
    "model": {"width": 0.25},
    "data": {"batch_size": 32},
    "run": {"steps": 100},
}


def probed(megabits: float, hop_seconds: float = 0.0) -> ProbedLink:
    link = Link(megabits, hop_seconds)
    return ProbedLink("host", link, link, link, ())


def make(**changes) -> Experiment:
    return make_experiment(resolve_config({**SETTINGS, **changes}), make_topology("2"))


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return make()


def advice_for(monkeypatch, experiment: Experiment, link: ProbedLink) -> Advice:
    """Advice on made-up links, where a step computes for 0.1 s."""
    monkeypatch.setattr(command, "probe_links", lambda *_: {"host": link})
    monkeypatch.setattr(command, "_step_seconds", lambda *_: 0.1)
    return advise(experiment)


@pytest.mark.slow
def test_slow_links_call_for_compression(monkeypatch, experiment):
    advice = advice_for(monkeypatch, experiment, probed(megabits=0.1))
    assert advice.text.startswith("Use ")
    assert "dense (" not in advice.text
    by_label = {row.label: row for row in advice.predictions}
    dense = by_label["dense"]
    assert dense.exchange_seconds == pytest.approx(8e-5 * dense.host_bytes)
    assert by_label["hsadmm every 4"].seconds < dense.seconds / 3


@pytest.mark.slow
def test_fast_links_do_not(monkeypatch, experiment):
    advice = advice_for(monkeypatch, experiment, probed(megabits=1e5))
    assert advice.text.startswith("Do not compress")
    assert "Use dense." in advice.text


ELSEWHERE = ["--link=100Mbit/s", "--hosts=8", "--devices=4", "--step=100ms"]


@pytest.mark.slow
def test_links_that_are_not_here(capsys, tmp_path):
    """The same bytes as on a mesh of that size, at the speed that was given."""
    out = tmp_path / "advice.json"
    assert main([*DEMO[:1], *DEMO[2:], *ELSEWHERE, "--hop=1ms", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("8 hosts x 4 devices that are not here")
    assert "host axis: 100 Mbit/s, 1 ms per hop" in said and "not real" not in said
    found = json.loads(out.read_text())
    dense = found["predictions"][0]
    # Every host sends what its four devices have, twice 7/8 of it, over 14 hops.
    hops = dense["exchange_seconds"] - 8e-8 * dense["host_bytes"]
    assert hops == pytest.approx(14e-3)
    assert dense["seconds"] == pytest.approx(0.1 + dense["exchange_seconds"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--link=1Gbit/s"], "give --hosts, --devices of each and --step as well"),
        (["--hosts=8"], "--hosts=8 is of links that are not here; give --link"),
        (["--step=1s"], "--step=1s is of links that are not here"),
        (["--link=fast", "--hosts=2", "--step=1s"], "--link=fast cannot be read"),
        (["--link=1.2.3Gbit/s", "--hosts=2", "--step=1s"], "cannot be read; write it"),
        (["--link=1Gbit/s", "--hosts=2", "--step=1h"], "--step=1h cannot be read"),
        (["--link=0Gbit/s", "--hosts=2", "--step=1s"], "must be more than nothing"),
        ([*ELSEWHERE, "--measure"], "--link has none; leave one out"),
    ],
)
def test_parts_of_what_is_elsewhere_are_refused(flags, message, capsys):
    assert main([*DEMO, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_is_worth_a_change_is_asked_for():
    rows = [Prediction("dense", {}, 1e6, 0.025, 0.125), Prediction("a", {}, 1, 0, 0.1)]
    assert recommend(rows, 0.1, num_hosts=2).startswith("Use a")
    assert recommend(rows, 0.3, num_hosts=2).startswith("Do not compress")


@pytest.mark.slow
def test_hops_count_where_bytes_do_not(monkeypatch, experiment):
    advice = advice_for(monkeypatch, experiment, probed(math.inf, hop_seconds=0.5))
    by_label = {row.label: row for row in advice.predictions}
    # PowerSGD sends two messages of few bytes, dense averaging one.
    assert by_label["powersgd"].seconds > by_label["dense"].seconds
    assert "hsadmm every 16" in advice.text


@pytest.mark.slow
def test_methods_that_cannot_run_are_named_with_the_reason(monkeypatch):
    few = {name: {"method.name": name} for name in ("dense", "dgc", "importance")}
    monkeypatch.setattr(command, "candidates", lambda config: few)
    experiment = make(optimizer={"name": "adamw", "learning_rate": 1e-3})
    advice = advice_for(monkeypatch, experiment, probed(1.0))
    assert set(advice.refused) == {"dgc", "importance"}
    assert "dgc: not possible: method dgc has no form of" in report(advice, False)


def test_one_host_has_nothing_to_compress():
    row = Prediction("dense", {}, 0.0, 0.0, 0.1)
    assert "one host" in recommend([row], 0.1, num_hosts=1)


def test_the_mildest_of_nearly_equal_methods_is_advised():
    rows = [
        Prediction("dense", {}, 1e6, 1.0, 1.1),
        Prediction("half", {"method.wire_dtype": "bfloat16"}, 5e5, 0.05, 0.105),
        Prediction("tiny", {}, 1e3, 0.0, 0.1),
    ]
    text = recommend(rows, 0.1, num_hosts=2)
    assert text.startswith(
        "Use half (--config.method.wire_dtype=bfloat16): 10.48 times"
    )
    assert "The fastest, tiny, has 11.00 times that speed." in text


def test_measured_steps_outweigh_predicted_ones():
    rows = [
        Prediction("dense", {}, 1e6, 1.0, 1.1, measured_seconds=1.1),
        Prediction("topk", {}, 1e3, 0.0, 0.1, measured_seconds=1.5),
    ]
    assert recommend(rows, 0.1, num_hosts=2).startswith("Do not compress")


RUN = {"run": {"steps": 9}}


def test_every_candidate_is_a_config():
    config = resolve_config(RUN)
    rows = candidates(
        dataclasses.replace(
            config.method,
            hsadmm=dataclasses.replace(config.method.hsadmm, sync_period=6),
        )
    )
    assert rows["hsadmm every 6, int8"]["method.hsadmm.sync_period"] == 6
    assert next(iter(rows)) == "dense", "gains are over the first"
    assert "local_sgd every 16, int2, 64 of 4,096 numbers" in rows
    for settings in rows.values():
        method = {}
        for dotted, value in settings.items():
            *path, key = dotted.split(".")[1:]
            part = functools.reduce(lambda d, k: d.setdefault(k, {}), path, method)
            part[key] = value
        found = dotted_keys(config_to_dict(resolve_config({**RUN, "method": method})))
        assert settings.items() <= found.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("dense",), id="predicted"),
        pytest.param(("dense", "hsadmm", "pactrain"), marks=pytest.mark.slow),
    ],
)
def test_the_command_measures_and_advises(names, monkeypatch, tmp_path, capsys):
    few = {name: {"method.name": name} for name in names}
    monkeypatch.setattr(command, "candidates", lambda config: few)
    is_measured = len(names) > 1
    out = tmp_path / "advice.json"
    measure = ["--measure"] if is_measured else []
    network = ["--config.model.name=tiny", "--config.model.width=1.0"]
    code = main([*DEMO, *network, "--seconds=1", f"--out={out}", *measure])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "host axis: " in shown.out and "device axis: " in shown.out
    assert "links between them are not real" in shown.out
    found = json.loads(out.read_text())
    assert found["text"] in shown.out
    assert set(found["links"]) == {"host", "device"}
    assert [row["label"] for row in found["predictions"]] == list(few)
    for row in found["predictions"]:
        assert (row["measured_seconds"] is not None) == is_measured
        assert row["seconds"] >= found["compute_seconds"] > 0


@pytest.mark.slow
def test_a_language_model_is_advised_on(tmp_path, capsys):
    out = tmp_path / "advice.json"
    network = {"layers": 1, "width": 16, "heads": 2, "key_heads": 1, "head_width": 8}
    code = main(
        [
            f"--config={CONFIGS / 'stdlib_gpt_hsadmm.py'}",
            *("--config.topology.layout=2", "--config.data.sequence_length=16"),
            *(f"--config.model.gpt.{key}={value}" for key, value in network.items()),
            *("--seconds=1", f"--out={out}"),
        ]
    )
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found = json.loads(out.read_text())
    assert found["text"] in shown.out
    rows = {row["label"]: row for row in found["predictions"]}
    assert rows["dense"]["host_bytes"] > rows["hsadmm every 8, int8"]["host_bytes"] > 0
    # They apply momentum before they send, and the config has AdamW.
    assert {"dgc", "importance"} <= set(found["refused"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--config is required"),
        ((*DEMO, "--margin=0"), "--margin=0 must be at least 1"),
        ((*DEMO, "--seconds=0"), "--seconds=0 must be at least 1"),
        ((*DEMO, "--margin=much"), "--margin: invalid int value: 'much'"),
        ((*DEMO, "--out=nowhere/a.json"), "there is no folder nowhere"),
        ((*DEMO, "--workdir=x"), "workdir"),
        ((*DEMO, "stray"), "'stray' is not understood"),
        ((*DEMO, "--config.data.nam=x"), "did you mean 'data.name'"),
        ((*DEMO, "--num_processes=2"), "coordinator"),
        ((*DEMO, "--config.data.batch_size=63"), "63 does not divide evenly"),
        ((*DEMO, "--config.topology.simulated=2x2"), "'2x2' has no links to measure"),
    ],
)
def test_bad_flags(arguments, message, capsys):
    code = main([*arguments])
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("warning", ["", "2 of the 4 GPUs are left idle"])
def test_processes_are_joined_as_for_training(warning, monkeypatch, capsys):
    """They wait as long as the settings say, and say what is wrong with GPUs."""
    seconds = []

    def start(*args, join_seconds, **_):
        seconds.append(join_seconds)
        return Launch("slurm", "task 0 of 2", warning=warning)

    monkeypatch.setattr(joining, "start_processes", start)
    monkeypatch.setattr(command, "advise", lambda *args, **_: "no advice")
    monkeypatch.setattr(command, "report", lambda *args: "nothing to report")
    assert main([*DEMO, "--config.run.join_seconds=7"]) == 0
    shown = capsys.readouterr().out
    assert seconds == [7]
    assert shown.startswith("start     task 0 of 2\n")
    assert (f"warning   {warning}\n" in shown) == bool(warning)
