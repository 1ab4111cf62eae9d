"""GPT-2 of Hugging Face, whose kernels lie as ours: inputs first.

Queries, keys and values of a block lie in one tensor, side by side.

References:
  transformers, modeling_gpt2.py (its layer Conv1D).
"""

from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.weights.table import DENSE, Axes, Fact, Layout, Row, norm_rows

# (width, heads, features) of kernels in front of heads, and (heads, features, width)
# behind them.
_TO_HEADS: Axes = ((0,), (1, 2))
_FROM_HEADS: Axes = ((0, 1), (2,))
_BLOCK, _OURS = "h.{b}", "blocks/{b}"
_PARTS = ("query", "key", "value")


def _facts(model: ModelConfig) -> tuple[Fact, ...]:
    gpt = model.gpt
    return (
        Fact("n_head", gpt.heads, "model.gpt.heads"),
        Fact("layer_norm_epsilon", gpt.norm_epsilon or 1e-5, "model.gpt.norm_epsilon"),
        Fact("activation_function", "gelu_new"),
        Fact("scale_attn_weights", True),
        Fact("scale_attn_by_inverse_layer_idx", False),
    )


GPT2 = Layout(
    name="Hugging Face GPT-2",
    marks=("wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"),
    prefixes=("transformer.",),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    rows=(
        Row("wte.weight", "embedding"),
        Row("wpe.weight", "positions"),
        *norm_rows(f"{_BLOCK}.ln_1", f"{_OURS}/attention_norm"),
        Row(
            f"{_BLOCK}.attn.c_attn.weight",
            tuple(f"{_OURS}/attention/{part}" for part in _PARTS),
            _TO_HEADS,
            along=1,
        ),
        Row(
            f"{_BLOCK}.attn.c_attn.bias",
            tuple(f"{_OURS}/attention/{part}_bias" for part in _PARTS),
            ((0, 1),),
        ),
        Row(f"{_BLOCK}.attn.c_proj.weight", f"{_OURS}/attention/out", _FROM_HEADS),
        Row(f"{_BLOCK}.attn.c_proj.bias", f"{_OURS}/attention/out_bias"),
        *norm_rows(f"{_BLOCK}.ln_2", f"{_OURS}/unit_norm"),
        Row(f"{_BLOCK}.mlp.c_fc.weight", f"{_OURS}/unit/up"),
        Row(f"{_BLOCK}.mlp.c_fc.bias", f"{_OURS}/unit/up_bias"),
        Row(f"{_BLOCK}.mlp.c_proj.weight", f"{_OURS}/unit/down"),
        Row(f"{_BLOCK}.mlp.c_proj.bias", f"{_OURS}/unit/down_bias"),
        *norm_rows("ln_f", "norm"),
        Row("lm_head.weight", "head", DENSE),
    ),
    copies=(("lm_head.weight", "wte.weight"),),
    facts=_facts,
    advice=((r"lm_head\.weight", "set config.model.gpt.head='own'"),),
)
