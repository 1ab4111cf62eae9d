"""Closed formulas of what means and methods send, from sizes alone.

The package reads bytes from the traced program; these say the same independently, and
tests hold both against each other for every method on every mesh.
"""
