"""What every room uses and none owns.

errors       what ends a run with one line: `UserError`, `TrainingDivergedError`
settings     dataclasses with ranges, read and checked in one place
command      command lines: flags, help, errors, exit codes
files        whole files and folders, digests, the lock of a run folder
signals      handlers, and the request to stop
trees        leaves of a tree by path
jaxprs       programs inside programs
sync         the steps after which hosts meet
timing       calls timed in turn
environment  versions, devices, source revision
"""
