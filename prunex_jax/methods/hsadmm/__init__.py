"""Hierarchical structured ADMM: its state, equations, presets and transform."""
