"""Builds a run from its settings, before anything is compiled.

config        settings, in any form -> ExperimentConfig
joining       the processes of a run: joined, compared, and watched over
rounds        which method at which step, and which exchange after which
teaching      networks whose answers a run learns beside the labels
start         what a run starts from instead of a network drawn at random
experiment    settings and mesh -> task, channels, method, rounds and programs
work          multiply-accumulates of training, over all cuts
"""
