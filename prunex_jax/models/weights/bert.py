"""BERT of Hugging Face, with its head for masked tokens.

References:
  transformers, modeling_bert.py (BertForMaskedLM).
"""

from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.weights.table import (
    DENSE,
    FROM_HEADS,
    TO_HEADS,
    Axes,
    Fact,
    Layout,
    Row,
    norm_rows,
)

_BLOCK, _OURS = "encoder.layer.{b}", "blocks/{b}"
_HEAD = "cls.predictions"


def _norm(there: str, here: str) -> tuple[Row, ...]:
    return norm_rows(f"{there}.LayerNorm", here)


def _dense(
    there: str, here: str, axes: Axes = DENSE, of_bias: Axes | None = None
) -> tuple[Row, ...]:
    return (
        Row(f"{there}.weight", here, axes),
        Row(f"{there}.bias", f"{here}_bias", of_bias),
    )


def _heads(part: str) -> tuple[Row, ...]:
    here = f"{_OURS}/attention/{part}"
    return _dense(f"{_BLOCK}.attention.self.{part}", here, TO_HEADS, ((0, 1),))


def _facts(model: ModelConfig) -> tuple[Fact, ...]:
    bert = model.bert
    return (
        Fact("num_attention_heads", bert.heads, "model.bert.heads"),
        Fact("layer_norm_eps", bert.norm_epsilon, "model.bert.norm_epsilon"),
        Fact("hidden_act", "gelu"),
        Fact("position_embedding_type", "absolute"),
    )


BERT = Layout(
    name="Hugging Face BERT",
    marks=("embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight"),
    prefixes=("bert.",),
    ignored=(
        r"embeddings\.position_ids",
        # Behind the first token, for pairs of sentences.
        r"pooler\..*",
        r"cls\.seq_relationship\..*",
    ),
    # As the first checkpoints, made with TensorFlow, call them.
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"\.beta$", ".bias")),
    rows=(
        Row("embeddings.word_embeddings.weight", "embedding"),
        Row("embeddings.position_embeddings.weight", "positions"),
        Row("embeddings.token_type_embeddings.weight", "kinds"),
        *_norm("embeddings", "embedding_norm"),
        *_heads("query"),
        *_heads("key"),
        *_heads("value"),
        *_dense(
            f"{_BLOCK}.attention.output.dense", f"{_OURS}/attention/out", FROM_HEADS
        ),
        *_norm(f"{_BLOCK}.attention.output", f"{_OURS}/attention_norm"),
        *_dense(f"{_BLOCK}.intermediate.dense", f"{_OURS}/unit/up"),
        *_dense(f"{_BLOCK}.output.dense", f"{_OURS}/unit/down"),
        *_norm(f"{_BLOCK}.output", f"{_OURS}/unit_norm"),
        *_dense(f"{_HEAD}.transform.dense", "transform"),
        *_norm(f"{_HEAD}.transform", "transform_norm"),
        Row(f"{_HEAD}.bias", "head_bias"),
    ),
    copies=(
        (f"{_HEAD}.decoder.weight", "embeddings.word_embeddings.weight"),
        (f"{_HEAD}.decoder.bias", f"{_HEAD}.bias"),
    ),
    facts=_facts,
    advice=((r"embeddings\.token_type_embeddings.*", "set config.model.bert.kinds=2"),),
)
