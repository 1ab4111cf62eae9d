"""Every method, and PyTorch beside them, over links of a chosen speed.

    study (a file) -> hosts (namespaces, loopback, a cluster) -> one process per host
           -> gates between phases (link speed, byte counters) -> records -> report

`python -m prunex_jax bench --study=configs/bench/steps.py --workdir=runs/steps` runs a
study. Times are those of real processes exchanging over real network interfaces, bytes
those that the interfaces counted.
"""
