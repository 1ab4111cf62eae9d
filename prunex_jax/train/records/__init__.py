"""What a run leaves behind: the run folder.

folder        settings, metrics and summary on disk
checkpoint    state and position on disk
position      what a run resumes from beside its state
rows          what is logged
scores        of networks on held-out examples, and whether a run is lost
summary       the end: shrinks, proves equal, tests once, sums up
trackers      metrics in TensorBoard and W&B as well
profiling     a window of steps for jax's profiler
"""
