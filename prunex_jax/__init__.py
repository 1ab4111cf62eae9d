"""Trains networks across slow links between hosts, sending only what matters."""

__version__ = "0.1.0"
