"""Runs compared with each other: what accuracy costs in bytes, with spread over seeds.

Owns: sweeps as small declarative files (`sweeps`), running them one after the other
(`runs`), whether a difference is more than spread (`significance`), and tables and
plots of run folders (`tables`, `plots`, `report`).
Leaves to others: a run itself (`prunex_jax.train`), which it only starts, and
speed over real links (`bench`).
"""
