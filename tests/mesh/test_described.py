"""GPUs that are not here: what names them, and what is said without a compiler."""

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import described, described_topology


@pytest.mark.parametrize(
    "text", ["h100", "h100:", "h100:2", "h100:0x8", "h10:2x8", ":2x8", "h100:2x8x4"]
)
def test_what_names_no_gpus_is_refused(text):
    with pytest.raises(UserError, match="as in h100:2x8; known are h100"):
        described_topology(text)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(described.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no compiler for GPUs.*jax-cuda13-plugin"):
        described_topology("h100:2x8")
