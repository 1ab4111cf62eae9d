"""PyTorch's side of a study: the same network, data and order with its own exchange.

A `Spec` goes in, what happened between gates comes out. Its modules need torch;
`benchmarks.links.host` imports them where a row asks for it.
"""
