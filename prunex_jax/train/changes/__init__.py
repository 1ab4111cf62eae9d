"""What changes in mid-run: the network, the method, the mesh, the programs.

transitions   the small network, the next method
regroup       a state on another number of hosts or devices
means         of networks: the teacher of a run that learns from itself
ahead         compiles, while steps run, what will be called later
"""
