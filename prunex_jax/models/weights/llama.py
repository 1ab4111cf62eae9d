"""Decoders of Hugging Face that are built as Llama, of which ours is one.

Query and key heads of both turn feature i together with feature i + features / 2, so
that kernels need no other order.

References:
  transformers, modeling_llama.py.
"""

from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.weights.table import (
    DENSE,
    FROM_HEADS,
    TO_HEADS,
    Fact,
    Layout,
    Row,
)

_BLOCK, _OURS = "layers.{b}", "blocks/{b}"


def _facts(model: ModelConfig) -> tuple[Fact, ...]:
    gpt = model.gpt
    base = gpt.rotary_base, "model.gpt.rotary_base"
    return (
        Fact("num_attention_heads", gpt.heads, "model.gpt.heads"),
        Fact("num_key_value_heads", gpt.key_heads, "model.gpt.key_heads"),
        Fact("rope_theta", *base),
        Fact("rope_parameters.rope_theta", *base),
        Fact("rope_parameters.rope_type", "default"),
        Fact("rope_scaling", None),
        Fact("rms_norm_eps", gpt.norm_epsilon or 1e-6, "model.gpt.norm_epsilon"),
        Fact("hidden_act", "silu"),
    )


LLAMA = Layout(
    name="Hugging Face Llama",
    marks=(
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.gate_proj.weight",
    ),
    prefixes=("model.",),
    ignored=(r".*\.rotary_emb\.inv_freq",),
    rows=(
        Row("embed_tokens.weight", "embedding"),
        Row(f"{_BLOCK}.input_layernorm.weight", f"{_OURS}/attention_norm/scale"),
        *(
            Row(f"{_BLOCK}.self_attn.{there}_proj.weight", f"{_OURS}/{here}", TO_HEADS)
            for there, here in (
                ("q", "attention/query"),
                ("k", "attention/key"),
                ("v", "attention/value"),
            )
        ),
        Row(f"{_BLOCK}.self_attn.o_proj.weight", f"{_OURS}/attention/out", FROM_HEADS),
        Row(f"{_BLOCK}.post_attention_layernorm.weight", f"{_OURS}/unit_norm/scale"),
        Row(f"{_BLOCK}.mlp.gate_proj.weight", f"{_OURS}/unit/gate", DENSE),
        Row(f"{_BLOCK}.mlp.up_proj.weight", f"{_OURS}/unit/up", DENSE),
        Row(f"{_BLOCK}.mlp.down_proj.weight", f"{_OURS}/unit/down", DENSE),
        Row("norm.weight", "norm/scale"),
        Row("lm_head.weight", "head", DENSE),
    ),
    copies=(("lm_head.weight", "embed_tokens.weight"),),
    facts=_facts,
    advice=(
        (r"lm_head\.weight", "set config.model.gpt.head='own'"),
        (r".*\.bias", "biases are those of another network"),
    ),
)
