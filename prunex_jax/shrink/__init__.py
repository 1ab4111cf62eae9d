"""Smaller networks: cut out what masks call dead, and prove that nothing changed."""

from prunex_jax.shrink.network import Network, shrink_error, shrink_network

__all__ = ["Network", "shrink_error", "shrink_network"]
