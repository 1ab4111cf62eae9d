"""What a step is: its state, its programs, and the time that it takes.

state       what is trained and saved, and where it lives on the mesh
local_step  from the loss of a batch, perhaps in several parts, to the update
compiled    programs that know what they send and how often they ran
programs    those of a run: birth, local step, exchange, report, evaluation
in_flight   few steps at a time, and what they take without waiting
clock       times them
profiling   a window of them for jax's profiler
position    where a run is: what it resumes from beside its state
"""
