"""All that measures: studies over links, sweeps over seeds, the model of cost.

Studies (small Python files) and training configs go in; records, run folders, tables
and plots come out. Nothing imports this room. In reading order:

    figure.py     what rows are compared by: a metric, and how it is shown
    study.py      what a study is: rows of settings, seeds, hosts, links
    __main__.py   `bench`: rows x hosts x links, on real processes and links
    processes.py  starting processes, meeting them at gates, ending them
    links/        hosts, gates between phases, the runner, records of steps and bytes
    torch/        what PyTorch does on the same links
    sweep/        `sweep`: rows x seeds on simulated hosts, a metric per byte
    cost_model/   what a step costs on other links and clusters
    advise.py     `advise`: which method suits the links of a cluster
    doctor.py     `doctor`: what is wrong with machines before a long run
    drill/        `drill`: faults done to a small run, and whether it comes back
    report/       tables, plots and pages of all of them
"""
