"""What was measured, as tables, plots and one HTML page.

`tables` says how rows and numbers are written, `plots` how series are drawn, and `page`
how both become a file. `run_report` puts the page of run folders together: `report`.
"""
