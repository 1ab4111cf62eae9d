"""What a run leaves behind: the run folder.

folder        settings, metrics and summary on disk
checkpoint    state and position on disk
restoring     reads a run, or its network, back from a checkpoint, on any mesh
weights       reads trained weights, whatever wrote them
rows          what is logged
scores        of networks on held-out examples, and whether a run is lost
summary       the end: shrinks, proves equal, tests once, sums up
trackers      metrics in TensorBoard and W&B as well
"""
