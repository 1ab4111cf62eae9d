"""The model of cost: what a step sends, and how long it takes on a link.

Methods and measured steps go in, predictions come out: `step_time` fits, `scaling`
extrapolates to other clusters, `published` does so for the setting of a paper.
"""
