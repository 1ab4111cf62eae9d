"""Studies over real links: hosts, what joins them, and what their processes measure.

A study goes in, `records.jsonl` comes out. In reading order: `hosts` (namespaces in a
`sandbox`, or plain processes), `gates` (where their processes wait), `tasks` (what is
run), `runner` (the order, and `records` of it), `host` (one process), `part` (what it
scores), `cluster` (the same on processes of a launcher). `probe` measures the links of
a mesh. `hosts` and `sandbox` need the standard library only.
"""
