"""Tokens of text: decoded they are the text, with an end behind every document."""

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import tokenizer as module
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.tokenizer import open_tokenizer
from tests.helpers.texts import make_text, write_tokenizer


def opened(path, **changes):
    return open_tokenizer(DataConfig(tokenizer=str(path), **changes))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def documents_of(tokenizer, tokens):
    """What every document decodes to."""
    *ends, last = np.flatnonzero(tokens == tokenizer.end)
    parts = np.split(tokens, [end + 1 for end in ends])
    assert last == len(tokens) - 1
    return [tokenizer.encoder.decode(part[:-1].tolist()) for part in parts]


@pytest.mark.parametrize("piece", [2**20, 40])
def test_tokens_decode_to_the_documents(path, piece, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", piece)
    monkeypatch.setattr(module, "_AT_A_TIME", 3000)
    tokenizer = opened(path)
    texts = [make_text(size, size) for size in (1, 300, 40, 500, 0)] + ["\n" * 99]
    parts = list(tokenizer.encode(text.encode() for text in texts))
    assert len(parts) > 1, "all were in memory at once"
    tokens = np.concatenate(parts)
    assert documents_of(tokenizer, tokens) == texts
    assert tokens.max() < tokenizer.num_tokens == 300
    assert len(tokens) < sum(len(text.encode()) for text in texts)


def test_the_end_is_found_or_named(path, tmp_path):
    assert opened(path).end == opened(path, end_token="<|endoftext|>").end == 0
    assert opened(path, end_token="the").end != 0
    for special, name in ((("<pad>", "</s>"), "</s>"), (("[CLS]", "[SEP]"), "[SEP]")):
        other = write_tokenizer(tmp_path / "other.json", special)
        found = opened(other)
        assert found.encoder.id_to_token(found.end) == name
    assert opened(path).identity != opened(path, end_token="the").identity


def test_bytes_are_tokens():
    tokens = np.concatenate(list(open_tokenizer(DataConfig()).encode([b"a\0b", b""])))
    assert bytes(tokens) == b"ab\0\0"


def test_what_is_no_tokenizer_is_one_line(path, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text('{\n"model": {}}')
    plain = write_tokenizer(tmp_path / "plain.json", ("<pad>",))
    for given, changes, message in (
        (tmp_path / "none.json", {}, r"none.json' cannot be read \(No such file"),
        (tmp_path, {}, "cannot be read"),
        (tmp_path / "broken.json", {}, "is no tokenizer of Hugging Face"),
        (plain, {}, "has none of the usual tokens"),
        (path, {"end_token": "<|endoftxt|>"}, r"did you mean '<\|endoftext\|>'"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            opened(given, **changes)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'prunex-jax\[text\]'"):
        opened(path)
