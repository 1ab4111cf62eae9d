"""PyTorch's side of a study: the same network, data and order with its own exchange.

A `Spec` goes in, what happened between gates comes out. Both modules need torch;
`bench.links.host` imports them where a row asks for it.
"""
