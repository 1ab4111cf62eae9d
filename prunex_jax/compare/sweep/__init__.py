"""Sweeps: rows x seeds on simulated hosts, and what a metric costs in bytes.

`study` says what rows are, and reads the file of a sweep. `runs` starts what is
missing, each run as a process of its own, and reads their folders. `figure`
says what is compared with what, and `sweep_report` writes it down.
"""
