"""Keeps pytest from importing networks whose packages are not installed."""

collect_ignore_glob = ["*.py"]
