"""Sweeps: rows x seeds on simulated hosts, and what a metric costs in bytes.

A `Sweep` goes in, run folders come out: `runs` starts what is missing, each run as a
process of its own, `results` reads the folders for `bench.report`.
"""
