"""PyTorch's side of a study: the same network, data and order with its own exchange.

A `Spec` goes in, what happened between gates comes out. `models` and `training` need
torch, `host` and `tasks` do not.
"""
