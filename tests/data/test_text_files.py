"""Files of text: each byte is in one split, and no character is cut."""

from collections import Counter

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.text_files import MANY_FILES, SPLITS, text_parts
from tests.helpers.texts import make_text, write_files


def config_of(folder, **changes):
    return DataConfig(name="text", dir=str(folder), **changes)


def sizes_of(parts):
    """Split -> its share of all bytes."""
    sizes = Counter()
    for part in parts:
        sizes[part.split] += len(part.read())
    return {split: sizes[split] / sizes.total() for split in SPLITS}


@pytest.mark.parametrize("number", [1, 7, MANY_FILES + 20])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_every_byte_is_in_one_split(tmp_path, number, share):
    written = write_files(tmp_path, number)
    parts, left_out = text_parts(config_of(tmp_path, validation_share=share))
    joined = dict.fromkeys(written, b"")
    for part in parts:
        joined[part.name] += part.read()
    assert joined == written and not left_out
    sizes = sizes_of(parts)
    assert sizes["test"] == pytest.approx(0.03, abs=0.02)
    assert sizes["validation"] == pytest.approx(share * 0.97, abs=0.06)
    splits_of_files = {(part.name, part.split) for part in parts}
    if number < MANY_FILES:
        assert len(parts) == number * (3 if share else 2)
    else:
        assert len(splits_of_files) == number, "whole files"


def test_characters_stay_whole(tmp_path):
    """Each part is text by itself, wherever its shares would cut."""
    for size in range(40, 60):
        (tmp_path / "a.txt").write_text("é🙂λ" * size)
        parts, _ = text_parts(config_of(tmp_path / "a.txt", validation_share=0.2))
        assert "".join(part.read().decode() for part in parts) == "é🙂λ" * size
        assert [part.split for part in parts] == list(SPLITS)


def test_names_alone_decide_what_is_held_out(tmp_path):
    for folder, words in ((tmp_path / "a", 20), (tmp_path / "b", 30)):
        write_files(folder, MANY_FILES, words)
    one, other = (text_parts(config_of(tmp_path / x))[0] for x in "ab")
    assert [(x.name, x.split) for x in one] == [(x.name, x.split) for x in other]


def test_splits_of_the_user_are_kept(tmp_path):
    names = ("train/a.txt", "train/b/c.txt", "val.txt", "test/d.txt", "README.md")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    parts, left_out = text_parts(config_of(tmp_path))
    found = {part.name: (part.split, part.read().decode()) for part in parts}
    splits = ("train", "train", "validation", "test")
    wanted = {
        name: (split, name) for name, split in zip(names[:4], splits, strict=True)
    }
    assert found == wanted and left_out == 1
    (tmp_path / "val.txt").unlink()
    parts, _ = text_parts(config_of(tmp_path, validation_share=0.5))
    assert [x.name for x in parts if x.split == "validation"] == list(names[:2])
    (tmp_path / "test/d.txt").unlink()
    parts, left_out = text_parts(config_of(tmp_path))
    assert "README.md" in {part.name for part in parts} and not left_out


def test_patterns_choose_and_hidden_files_are_none(tmp_path):
    for name in ("a.txt", "b.md", ".c.txt", ".git/d.txt", "e/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(make_text(50))
    for glob, wanted in (
        ("*", {"a.txt", "b.md", "e/f.txt"}),
        ("*.txt", {"a.txt", "e/f.txt"}),
        ("e/*", {"e/f.txt"}),
    ):
        parts, _ = text_parts(config_of(tmp_path, text_glob=glob))
        assert {part.name for part in parts} == wanted


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("", {}, "config.data.dir='' is no folder or file"),
        ("{}/none", {}, "none' is no folder or file"),
        ("{}", {"text_glob": "*.rst"}, r"has no files of .*text_glob='\*.rst'"),
        ("{}", {"text_glob": ""}, "text_glob=''"),
        ("{}", {"text_glob": "/a"}, "text_glob='/a' is no pattern"),
        ("{}/a.txt", {"text_glob": "*.txt"}, "has no effect on a single file"),
    ],
)
def test_what_cannot_be_found_is_one_line(tmp_path, where, changes, message):
    (tmp_path / "a.txt").write_text("text")
    config = DataConfig(name="text", dir=where.format(tmp_path), **changes)
    with pytest.raises(UserError, match=message) as caught:
        text_parts(config)
    assert "\n" not in str(caught.value)
