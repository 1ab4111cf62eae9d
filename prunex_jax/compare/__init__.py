"""What users run on their own machines to choose, to compare and to be sure.

Nothing imports this room. In reading order:

    doctor.py     `doctor`: what is wrong with machines before a long run
    probe.py      measures the links that a mesh is on
    step_time.py  what a step sends, and how long that takes on a link
    advise.py     `advise`: which method suits the links of a cluster
    subprocesses.py  processes that sweeps and drills start
    drill/        `drill`: faults done to a small run, and whether it comes back
    sweep/        `sweep`: rows x seeds on simulated hosts, a metric per byte
    report/       `report`: run folders on one page; tables and plots of sweeps
"""
