"""Encoded text is kept: made once, found whole, and made again when it is damaged."""

import contextlib
import threading
import time

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import encoded
from prunex_jax.data.encoded import encode_once
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.tokenizer import ByteTokenizer

DOCUMENTS = [b"some", b"", b"text"]
WANTED = b"some\0\0text\0"


class Counting(ByteTokenizer):
    """Counts how often it is asked, and takes its time."""

    def __init__(self, identity="bytes"):
        self.times, self.identity = [], identity

    def encode(self, documents):
        self.times.append(time.monotonic())
        time.sleep(0.05)
        yield from ByteTokenizer.encode(self, documents)


def encode(folder, tokenizer, digest="digest", documents=DOCUMENTS):
    config = DataConfig(cache_dir=str(folder))
    return encode_once(lambda: iter(documents), digest, tokenizer, config)


def test_it_is_made_once(tmp_path):
    tokenizer = Counting()
    for _ in range(3):
        found = encode(tmp_path / "new" / "folder", tokenizer)
        assert bytes(found.tokens[:]) == WANTED
        assert (found.num_bytes, found.num_documents) == (len(WANTED), 3)
        assert found.bytes_per_token == 1.0
    assert len(tokenizer.times) == 1


def test_other_text_and_other_tokenizers_are_others(tmp_path):
    encode(tmp_path, Counting())
    for changes in ({"digest": "other"}, {"tokenizer": Counting("other")}):
        tokenizer = changes.setdefault("tokenizer", Counting())
        encode(tmp_path, **changes)
        assert tokenizer.times


@pytest.mark.parametrize("suffix", ["bin", "json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"])
def test_what_is_damaged_is_made_again(tmp_path, suffix, content):
    tokenizer = Counting()
    encode(tmp_path, tokenizer)
    (path,) = tmp_path.glob(f"*.{suffix}")
    path.unlink() if content is None else path.write_bytes(content)
    assert bytes(encode(tmp_path, tokenizer).tokens[:]) == WANTED
    assert len(tokenizer.times) == 2


@pytest.mark.parametrize("locks", [True, False])
def test_those_that_ask_together_get_the_same(tmp_path, locks, monkeypatch):
    """One makes it and the others wait; where nothing locks, each makes it whole."""
    if not locks:
        monkeypatch.setattr(encoded, "one_at_a_time", contextlib.nullcontext)
    tokenizer, found = Counting(), []
    barrier = threading.Barrier(3)

    def ask():
        barrier.wait()
        found.append(bytes(encode(tmp_path, tokenizer).tokens[:]))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WANTED] * 3
    assert len(tokenizer.times) == (1 if locks else 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_is_left_of_what_failed(tmp_path):
    class Failing(Counting):
        def encode(self, documents):
            yield np.zeros(9, np.uint8)
            raise UserError("broken")

    with pytest.raises(UserError, match="broken"):
        encode(tmp_path, Failing())
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}
    assert bytes(encode(tmp_path, Counting()).tokens[:]) == WANTED


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file': encoded text cannot be kept"):
        encode(tmp_path / "file", Counting())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig()
    encode_once(lambda: iter(DOCUMENTS), "digest", Counting(), config)
    assert list((tmp_path / "prunex_jax" / "tokens").glob("*.bin"))
