"""Tables, pages and pictures of what was measured, for studies and sweeps alike.

Owns: how numbers are written (`cells`), HTML (`pages`), and matplotlib with the look
that a row has in every picture (`pictures`). It knows nothing of what is reported.
Flow: `bench` and `sweep` describe tables and plots; this package writes them.
"""
