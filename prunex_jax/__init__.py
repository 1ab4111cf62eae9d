"""Trains networks across hosts joined by slow links, sending only channels that matter."""

__version__ = "0.1.0"
