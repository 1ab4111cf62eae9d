"""Smaller networks: cut out what masks call dead, and prove that nothing changed."""

from prunex_jax.shrink.certificate import Certificate, certify
from prunex_jax.shrink.cut import Cut, make_cut
from prunex_jax.shrink.network import (
    Network,
    certify_networks,
    shrink_error,
)

__all__ = [
    "Certificate",
    "Cut",
    "Network",
    "certify",
    "certify_networks",
    "make_cut",
    "shrink_error",
]
