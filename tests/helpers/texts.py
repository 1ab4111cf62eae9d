"""Small texts, tokenizers and sets of text, made by the tests themselves."""

import json
from pathlib import Path

import numpy as np
import pytest

WORDS = ("ein", "Wort", "λόγος", "naïve", "🙂", "parameter", "the", "of", "\n", "x1")


def make_text(num_words: int, seed: int = 0) -> str:
    """Words of one to four bytes a character, with spaces between them."""
    chosen = np.random.default_rng(seed).choice(len(WORDS), num_words)
    return " ".join(WORDS[k] for k in chosen)


def write_files(folder: Path, number: int, num_words: int = 200) -> dict[str, bytes]:
    """Writes that many texts in two folders; gives name -> content."""
    found = {}
    for k in range(number):
        name = f"part{k % 2}/{k:03}.txt"
        found[name] = make_text(num_words, k).encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(found[name])
    return found


def write_tokenizer(
    path: Path, special: tuple[str, ...] = ("<|endoftext|>",), vocabulary: int = 300
) -> Path:
    """Trains byte pairs on some words; what it decodes is what it has encoded."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([make_text(500)], trainer)
    # What files of others may ask for, and a stream of tokens must not have.
    made.enable_padding(length=16)
    made.enable_truncation(max_length=16)
    made.save(str(path))
    return path


def write_text_set(
    root: Path, documents: dict[str, list[str]], keys: tuple[str, ...] = ("text",)
) -> None:
    """Writes a set called tiny in TFDS's own layout: split -> texts."""
    import tensorflow_datasets as tfds
    from array_record.python import array_record_module
    from tensorflow_datasets.proto import tf_example_pb2

    folder = root / "tiny" / "1.0.0"
    folder.mkdir(parents=True)
    features = {key: tfds.features.Text() for key in keys}
    features["label"] = tfds.features.ClassLabel(num_classes=2)
    tfds.features.FeaturesDict(features).save_config(folder)
    infos = []
    for split, texts in documents.items():
        path = folder / f"tiny-{split}.array_record-00000-of-00001"
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for text in texts:
            example = tf_example_pb2.Example()
            for key in keys:
                value = example.features.feature[key].bytes_list.value
                value.append(text.encode())
            example.features.feature["label"].int64_list.value.append(0)
            writer.write(example.SerializeToString())
        writer.close()
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        counts = {"filepathTemplate": template, "shardLengths": [str(len(texts))]}
        infos.append({"name": split, **counts})
    info = {"name": "tiny", "version": "1.0.0", "fileFormat": "array_record"}
    (folder / "dataset_info.json").write_text(json.dumps({**info, "splits": infos}))
