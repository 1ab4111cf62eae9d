"""Data of a user's own, from the command line to an exported network."""

import json
from pathlib import Path

import numpy as np
import pytest

from prunex_jax.train.commands import evaluate as evaluation
from prunex_jax.train.commands.command import main
from prunex_jax.train.commands.export import main as export_main
from tests.helpers.image_folders import CLASSES, break_file, write_images
from tests.helpers.own_networks import problem
from tests.helpers.tiny_runs import settings, write_config

# Few programs.
VALUES = settings(
    data={"augment": "none"},
    method={"name": "dense"},
    run={"steps": 12, "log_every_steps": 4, "checkpoint_every_steps": 6},
)


def trained(tmp_path: Path, name: str, place: Path, *flags: str) -> int:
    return main(
        [
            f"--config={write_config(tmp_path, VALUES)}",
            f"--workdir={tmp_path / 'run'}",
            f"--config.data.name={name}",
            f"--config.data.dir={place}",
            *flags,
        ]
    )


def summary_of(tmp_path: Path) -> dict[str, float]:
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.slow
def test_a_folder_of_images_trains(tmp_path, capsys):
    folder = write_images(tmp_path / "photos", 30)
    break_file(folder / "bee" / "0.png")
    flag = "--config.data.broken_files=skip"
    assert trained(tmp_path, "folder", folder, flag) == 0
    out = capsys.readouterr().out
    assert "classes ant, bee, cat" in out
    assert f"1 broken files skipped, first {folder / 'bee' / '0.png'}" in out
    summary = summary_of(tmp_path)
    assert summary["validation_accuracy"] > 0.6, "no better than chance"
    assert summary["test_accuracy"] is None, "a folder without splits has no test split"


@pytest.mark.rotates
def test_the_export_of_a_pruned_run_is_scored_on_its_folder(tmp_path, capsys):
    for split, count in (("train", 30), ("val", 5), ("test", 6)):
        write_images(tmp_path / "photos" / split, count)
    flag = "--config.method.name=hsadmm"
    assert trained(tmp_path, "folder", tmp_path / "photos", flag) == 0
    summary = summary_of(tmp_path)
    assert summary["test_accuracy"] > 0.6, "no better than chance"
    model = tmp_path / "model"
    flags = [f"--workdir={tmp_path / 'run'}", f"--out={model}", "--quiet"]
    assert export_main(flags) == 0
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest["dataset"]["classes"]["names"] == ["ant", "bee", "cat"]
    capsys.readouterr()
    for split, examples in (("test", 18), ("validation", 15)):
        assert evaluation.main([f"--model={model}", f"--split={split}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["examples"] == examples
        accuracy = summary[f"{split}_accuracy"]
        assert found["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    write_images(tmp_path / "other", 5, ("ant", "bee", "cow"))
    flags = [f"--model={model}", "--split=validation"]
    assert evaluation.main([*flags, f"--data_dir={tmp_path / 'other'}"]) == 2
    assert "has class 'cow' here where it had 'cat'" in refused(capsys)
    write_images(tmp_path / "more", 10)
    assert evaluation.main([flags[0], f"--data_dir={tmp_path / 'more'}"]) == 2
    assert "--split=test of folder is empty" in refused(capsys)


def test_one_line_for_unusable_folders(tmp_path, capsys):
    folder = write_images(tmp_path / "photos")
    file = break_file(folder / "bee" / "0.png")
    assert trained(tmp_path, "folder", folder) == 2
    error = refused(capsys)
    assert f"{file} is broken" in error and "data.broken_files=skip" in error
    file.unlink()
    (folder / "dog").mkdir()
    assert trained(tmp_path, "folder", folder) == 2
    assert "class 'dog' is empty" in refused(capsys)
    assert trained(tmp_path, "folder", folder / "dog") == 2
    assert "has no folders" in refused(capsys)
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.mark.slow
def test_a_file_that_breaks_while_training_is_one_line(tmp_path, capsys, monkeypatch):
    folder = write_images(tmp_path / "photos", 20)
    monkeypatch.setattr("prunex_jax.data.image_files.DECODED_BYTES", 0)
    file = folder / "bee" / "15.png"
    file.write_bytes(file.read_bytes()[:-40])
    assert trained(tmp_path, "folder", folder, "--config.data.loader=grain") == 2
    assert f"{file} is broken" in refused(capsys)


@pytest.mark.slow
def test_float_arrays_of_a_file_train_a_network_of_ones_own(tmp_path, capsys):
    x, labels = problem(200)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=labels)
    flag = "--config.model.name=tests.helpers.own_networks:NnxNet"
    place = tmp_path / "x.npz"
    assert trained(tmp_path, "npz", place, "--config.data.augment=shift", flag) == 2
    assert "config.data.augment='shift' has no effect on arrays" in refused(capsys)
    assert trained(tmp_path, "npz", place) == 2
    assert "classifies images" in refused(capsys)
    assert trained(tmp_path, "npz", place, flag) == 0
    assert summary_of(tmp_path)["validation_accuracy"] > 0.6, "no better than chance"


@pytest.mark.slow
def test_a_set_of_hugging_face_trains(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    folder = write_images(tmp_path / "photos", 20)
    files = [str(file) for file in sorted(folder.glob("*/*"))]
    labels = [CLASSES.index(Path(file).parent.name) for file in files]
    kinds = {
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=list(CLASSES)),
    }
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(
        {"img": files, "label": labels}, features=datasets.Features(kinds)
    )
    table.save_to_disk(tmp_path / "set")
    assert trained(tmp_path, "huggingface", tmp_path / "set") == 0
    assert "columns img and label" in capsys.readouterr().out
    assert summary_of(tmp_path)["validation_accuracy"] > 0.6, "no better than chance"
