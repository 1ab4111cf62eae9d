"""Fault drills: what a run of this cluster does when its processes are lost.

A run is disturbed by one fault after the other, started again after each with the same
command, and compared with a run that was left alone. In reading order:

    faults.py      the faults: how they are done, and how a run has to end after them
    plan.py        which fault comes at which step of which process, from a seed
    trainee.py     the training process that suffers them
    hosts.py       namespaces of this machine, in a `sandbox`, or plain processes
    crew.py        where processes run, and the files in which they meet
    supervisor.py  starts one such process, does faults to it, records how it ended
    machine.py     a drill of one machine: a supervisor per process, in threads
    cluster.py     a drill of a cluster: one supervisor for each process of a launcher
    verdicts.py    judges the records: exit codes, messages, steps lost, same numbers
    table.py       the table, for people and for programs
    __main__.py    `drill`
"""
