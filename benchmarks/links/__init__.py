"""Studies over real links: hosts, what joins them, and what their processes measure.

A study goes in, `records.jsonl` comes out. In reading order: `links` (of namespaces,
plain processes or a cluster), `gates` (where processes wait), `tasks` (what is run),
`runner` (the order, and `records` of it), `host` (one process), `part` (what it
scores), `cluster` (the same on processes of a launcher).
"""
