"""Fault drills: what a run of this cluster does when its processes are lost.

A run is disturbed by one fault after the other, started again after each with the same
command, and compared with a run that was left alone. In reading order:

    plan.py        the faults, and which comes at which step of which process
    trainee.py     the training process that suffers them
    hosts.py       namespaces of this machine, in a `sandbox`, or plain processes
    crew.py        where processes run, and the files in which they meet
    supervisor.py  starts one such process, does faults to it, records how it ended
    verdicts.py    judges the records: exit codes, messages, steps lost, same numbers
    run.py         a drill of one machine, or of a cluster
    __main__.py    `drill`
"""
