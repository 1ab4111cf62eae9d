"""The report of studies over links.

Records go in; `report.html`, `tables.md` and PNG files come out. `places` says which
records may be compared; `steps`, `targets` and `cost` what is compared with what;
`cost_model` predicts steps; `study_report` puts a report together, and `__main__` is
its command line.
"""
