"""Text is drawn token by token, from what the network has seen of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.models import generate, make_language_model
from prunex_jax.models.settings import GptConfig, ModelConfig

GPT = GptConfig(layers=1, width=16, heads=2, key_heads=1, head_width=8, hidden=24)
WINDOW = 6


@pytest.fixture(scope="module")
def logits():
    config = ModelConfig(name="gpt", gpt=GPT)
    model = make_language_model(config, 32, WINDOW)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    return jax.jit(lambda tokens: model.apply(params, {}, tokens))


@pytest.mark.slow
def test_greedy_text_is_what_whole_sequences_say(logits):
    """Whether it fits the window or not, as if nothing stood behind it."""
    text = [[3, 1, 4], [7, 7, 7]]
    found = generate(logits, text, 9, window=WINDOW, temperature=0.0)
    for _ in range(9):
        seen = jnp.asarray(text)[:, -WINDOW:]
        following = jnp.argmax(logits(seen)[:, -1], axis=-1)
        text = np.concatenate([text, following[:, None]], axis=1).tolist()
    np.testing.assert_array_equal(found, np.asarray(text)[:, 3:])


def test_tokens_are_drawn_as_often_as_is_probable():
    odds = jnp.log(jnp.array([0.1, 0.6, 0.3]))

    def same(tokens):
        return jnp.broadcast_to(odds, (*tokens.shape, 3))

    for temperature, wanted in ((1.0, [0.1, 0.6, 0.3]), (0.5, [1 / 46, 36 / 46])):
        found = generate(
            same, np.zeros((50, 1)), 200, window=4, temperature=temperature
        )
        shares = np.bincount(np.ravel(found), minlength=3) / found.size
        np.testing.assert_allclose(shares[: len(wanted)], wanted, atol=0.02)


def test_what_is_drawn_follows_the_seed(logits):
    texts = [
        generate(logits, [[1]], 20, window=WINDOW, seed=seed).tolist()
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[]], {}, "prompt has shape"),
        ([1, 2], {}, "prompt has shape"),
        ([[1]], {"count": 0}, "count=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0 not negative"),
    ],
)
def test_what_cannot_be_written_is_refused(logits, prompt, options, message):
    with pytest.raises(UserError, match=message):
        generate(logits, prompt, **{"count": 3, "window": WINDOW, **options})
