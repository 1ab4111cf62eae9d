"""The model of cost: what a step sends, and how long it takes on a link.

Methods and measured steps go in, predictions come out: `step_time` fits the model, and
`published` extrapolates it to the cluster of a paper, of any size.
"""
