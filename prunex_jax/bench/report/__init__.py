"""What was measured, as tables, plots and one HTML page.

In: records of studies, run folders of sweeps. Out: `report.html`, `tables.md`, PNGs.

`tables` says how rows and numbers are written, `plots` how series are drawn, `page` how
both become files. `steps`, `targets`, `cost`, `frontier` and `sweep` say what is
compared with what; `study` puts a report of studies together, and `runs` one of run
folders, whose `curves` need no matplotlib. `__main__` is the command line of both.
"""
