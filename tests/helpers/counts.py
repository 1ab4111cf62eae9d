"""Counts and families as the package gives them, with limits as keyword arguments."""

from prunex_jax.sparsity import CountLimits, counts


def uniform_keep_counts(sizes, density, **limits):
    return counts.uniform_keep_counts(CountLimits(sizes, **limits), density)


def global_keep_counts(scores, density, previous=None, **limits):
    return counts.global_keep_counts(_of(scores, limits), density, scores, previous)


def uniform_family(sizes, **limits):
    return counts.uniform_family(CountLimits(sizes, **limits))


def ranked_family(scores, previous=None, **limits):
    return counts.ranked_family(_of(scores, limits), scores, previous)


def _of(scores, limits):
    return CountLimits({name: len(score) for name, score in scores.items()}, **limits)
