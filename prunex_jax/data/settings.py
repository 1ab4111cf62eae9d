"""Settings of data: which set, how it is read, and in which order."""

import dataclasses
from pathlib import Path
from typing import Literal

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.base.settings import setting


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes batches."""

    # digits | synthetic; stdlib (the source of Python's standard library, as text); in
    # `dir` folder (of images, one folder per class) | npz (arrays) | huggingface (what
    # `save_to_disk` wrote) | text (files of text) | tokens (files of tokens); or any
    # set that TFDS has prepared, of images with one class each or of text.
    name: str = "digits"
    # Where a folder, file or set lies; for TFDS its data directory, where empty means
    # TFDS's own default.
    dir: str = ""
    # What is done about image files that cannot be decoded: refuse (the first is named
    # before training starts) | skip (all are decoded to find them).
    broken_files: Literal["refuse", "skip"] = "refuse"
    # Examples per step over the whole mesh.
    batch_size: int = setting(64, at_least=1)
    # Share of the training split held out for validation.
    validation_share: float = setting(0.1, at_least=0, below=1)
    # none | shift (1 pixel) | crop_flip (pad 4, CIFAR) | random_resized_crop (ImageNet)
    augment: Literal["none", "shift", "crop_flip", "random_resized_crop"] = "none"
    # RandAugment after that: operations on every image, 0 for none, and how strong they
    # are, from 0 to 30.
    rand_augment_operations: int = setting(0, at_least=0)
    rand_augment_magnitude: float = setting(9.0, at_least=0, at_most=30)
    # Mixup and CutMix: every image with another of its batch, with shares drawn from
    # Beta(alpha, alpha); 0 for none; where both are positive, each has half of them.
    mixup: float = setting(0.0, at_least=0)
    cutmix: float = setting(0.0, at_least=0)
    # How pixels become inputs: auto (by the usual mean and deviation of a known set, or
    # those that are measured) | imagenet (by ImageNet's, as trained networks of
    # torchvision expect it) | half (by 0.5 and 0.5, as some ViTs of timm do).
    normalization: Literal["auto", "imagenet", "half"] = "auto"
    # Tokens of a sequence of text.
    sequence_length: int = setting(128, at_least=1)
    # A tokenizer.json of Hugging Face's tokenizers; empty reads text as bytes.
    tokenizer: str = ""
    # Token that it has behind every document; empty looks for the usual ones.
    end_token: str = ""
    # Where encoded text is kept; empty means the user's cache folder.
    cache_dir: str = ""
    # Which files below `dir` are text, as in '*.txt'; none that starts with a dot is.
    text_glob: str = "*"
    # What .bin files of tokens hold; .npy files say it themselves.
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    # Tokens that there are, in files of tokens; 0 reads all to find the largest.
    vocabulary: int = setting(0, at_least=0)
    # Side of the image after decoding and resizing; 0 keeps the size of the set.
    image_size: int = setting(0, at_least=0, at_most=16384)
    # auto | memory (whole set in memory) | grain (read and decoded while training).
    loader: Literal["auto", "memory", "grain"] = "auto"
    # Grain worker processes per jax process; 0 decodes in threads.
    num_workers: int = setting(0, at_least=0, at_most=1024)
    # Evaluation batch over the whole mesh; 0 means `batch_size`.
    eval_batch_size: int = setting(0, at_least=0)
    # Size and shape of the synthetic set.
    synthetic_examples: int = setting(1024, at_least=1, at_most=10**8)
    synthetic_classes: int = setting(10, at_least=1, at_most=10**6)
    # Decides which training examples are held out for validation and, where `shards` is
    # not iid, which host has which.
    shuffle_seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    # What a host trains on: iid (all examples) | label_sorted (classes of its own) |
    # dirichlet (class shares drawn at random); the last two need the set in memory.
    shards: Literal["iid", "label_sorted", "dirichlet"] = "iid"
    # Class shares of hosts are drawn from Dirichlet(alpha), scaled by those of the set
    # where classes differ in size: up to 0.1 few classes fill a shard; from 100 on,
    # shards are nearly alike.
    dirichlet_alpha: float = setting(0.3, above=0)


def named_path(config: DataConfig, wanted: str) -> Path:
    """Where the data lie, as `dir` says, which has to be what is `wanted`.

    That starts with FOLDER, FILE or PATH, for either.
    """
    path = expanded(config.dir)
    if wanted.startswith("FOLDER"):
        kind, is_there = "folder", path.is_dir()
    elif wanted.startswith("FILE"):
        kind, is_there = "file", path.is_file()
    else:
        kind, is_there = "folder or file", path.exists()
    if not config.dir or not is_there:
        raise UserError(
            f"config.data.dir={config.dir!r} is no {kind}; "
            f"config.data.name={config.name!r} needs --config.data.dir={wanted}"
        )
    return path
