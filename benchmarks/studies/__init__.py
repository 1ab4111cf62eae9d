"""Studies over links: one file each, with `get_study()`."""
