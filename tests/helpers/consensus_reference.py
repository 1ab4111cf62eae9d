"""H-SADMM in plain numpy: written from the equations, float64, loops over copies.

It shares no code with the package; `tests/methods/test_hsadmm.py` compares the two.
"""

import functools

import jax
import numpy as np

from tests.helpers.consensus_cases import (
    LEARNING_RATE,
    MOMENTUM,
    ROUNDS,
    SIZES,
    START,
    SYNC_PERIOD,
)


def entry_masks(masks):
    """0/1 arrays in the shapes of the parameters."""
    a, b = (np.asarray(masks[name], np.float64) for name in ("a", "b"))
    return {
        "a": {"kernel": np.ones((3, 1)) * a},
        "b": {"kernel": np.outer(a, b)},
        "free": np.ones(2),
    }


def tree(fn, *trees):
    return jax.tree.map(fn, *trees)


def average(trees):
    return tree(lambda *xs: sum(xs) / len(xs), *trees)


def norm_of(x):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(x)))


def cosine_of(x, y):
    products = jax.tree.leaves(tree(lambda x, y: np.sum(x * y), x, y))
    return sum(products) / (norm_of(x) * norm_of(y))


def by_channel(t):
    """Sums over the entries of every channel."""
    a, b = t["a"]["kernel"], t["b"]["kernel"]
    return {"a": a.sum(0) + b.sum(1), "b": b.sum(0)}


def seen_in_gradients(theta, g):
    """|<theta, g>| of every channel."""
    return tree(np.abs, by_channel(tree(np.multiply, theta, g)))


def scores_of(criterion, thetas, seen):
    """Of every host's mean copy, ||channel||^2 or as the criterion says; added up."""
    if criterion == "taylor":
        return tree(lambda *xs: sum(xs), *seen)
    squares = [by_channel(tree(np.square, t)) for t in thetas]
    return tree(lambda *xs: sum(xs), *squares)


def host_average(rho1, rho2, with_dual, z, v):
    return (rho1 * with_dual + rho2 * (z - v)) / (rho1 + rho2)


def difference(delta, a, v, z, e, m):
    return a + v - z * m + delta * e * m


def best(scores, alive, counts):
    masks = {}
    for name, score in scores.items():
        ranked = np.argsort(np.where(alive[name], -score, np.inf), kind="stable")
        masks[name] = np.isin(np.arange(len(score)), ranked[: counts[name]])
    return masks


def largest(s, count):
    """The largest entries of all matrices together, and the rest whole."""
    a, b = s["a"]["kernel"], s["b"]["kernel"]
    bound = np.sort(np.abs(np.concatenate([a.ravel(), b.ravel()])))[-count]
    a, b = (np.where(np.abs(x) >= max(bound, 1e-30), x, 0) for x in (a, b))
    return {"a": {"kernel": a}, "b": {"kernel": b}, "free": s["free"]}


def reference(form, level, targets, rounds=ROUNDS):
    """The run of `run_rounds` by the book: dict of named values after every round."""
    choosing, sending, moving = form.choosing, form.sending, form.moving
    num_hosts, num_devices = jax.tree.leaves(targets)[0].shape[:2]
    devices = range(num_devices)
    wishes = [
        [tree(lambda t, ij=(i, j): t[ij].astype(float), targets) for j in devices]
        for i in range(num_hosts)
    ]
    if level == "gradient":  # one copy per host, which wants the mean
        wishes = [[average(row)] for row in wishes]
    num_copies = len(wishes[0])
    pairs = [(i, j) for i in range(num_hosts) for j in range(num_copies)]
    zero = tree(lambda x: np.zeros(x.shape), START)
    start = tree(lambda x: x.astype(float), START)
    theta, u, b = ({ij: x for ij in pairs} for x in (start, zero, zero))
    z, o, last = start, zero, None
    cosine, rho = 0.0, 0.5  # of the last two movements, and as a round believes
    zi, v, e = [start] * num_hosts, [zero] * num_hosts, [zero] * num_hosts
    masks = {name: np.ones(size, bool) for name, size in SIZES.items()}
    m = entry_masks(masks)
    rho1, rho2 = moving.rho_device, moving.rho_host
    kappa, gamma = moving.prox_strength, moving.dual_decay
    alpha, beta = moving.outer_step, moving.outer_momentum
    is_reset = kappa == 1 and gamma == 0
    is_frozen, history = False, []
    num_steps, seen = 0, None
    if choosing.criterion != "norm":
        seen = {ij: {n: np.zeros(size) for n, size in SIZES.items()} for ij in pairs}
    for kind, counts in rounds:
        for i, j in pairs:
            for step in range(SYNC_PERIOD):
                x = theta[i, j]
                g = tree(lambda x, c: x - c, x, wishes[i][j])
                if is_reset or is_frozen:
                    g = tree(np.multiply, g, m)
                if seen is not None:
                    now = seen_in_gradients(x, g)
                    share = 1 / (num_steps + step + 1)  # a plain mean at first
                    seen[i, j] = tree(
                        lambda old, new, share=share: old + share * (new - old),
                        seen[i, j], now,
                    )  # fmt: skip
                b[i, j] = tree(lambda g, t: g + MOMENTUM * t, g, b[i, j])
                c = min(LEARNING_RATE * rho1, 1)
                x = tree(
                    lambda x, t, z, u, c=c: x - LEARNING_RATE * t - c * (x - z + u),
                    x, b[i, j], zi[i], u[i, j],
                )  # fmt: skip
                if is_reset or is_frozen:
                    x = tree(np.multiply, x, m)
                theta[i, j] = x
        num_steps += SYNC_PERIOD
        means = [
            average([theta[i, j] for j in range(num_copies)]) for i in range(num_hosts)
        ]
        with_dual = [
            average([tree(np.add, theta[i, j], u[i, j]) for j in range(num_copies)])
            for i in range(num_hosts)
        ]
        if kind != "frozen":
            of_hosts = [None] * num_hosts
            if seen is not None:
                of_hosts = [
                    average([seen[i, j] for j in range(num_copies)])
                    for i in range(num_hosts)
                ]
            scores = scores_of(choosing.criterion, means, of_hosts)
            masks = best(scores, masks, counts)
            m = entry_masks(masks)
        a = with_dual
        if rho2:
            weigh = functools.partial(host_average, num_copies * rho1, rho2)
            a = [tree(weigh, with_dual[i], z, v[i]) for i in range(num_hosts)]
        a, v = ([tree(np.multiply, x, m) for x in xs] for xs in (a, v))
        to_send = functools.partial(difference, sending.error_decay)
        s = [tree(to_send, a[i], v[i], z, e[i], m) for i in range(num_hosts)]
        is_whole = sending.top is None or kind == "freeze"
        sent = s if is_whole else [largest(x, sending.top.per_chunk) for x in s]
        e = [tree(np.subtract, s[i], sent[i]) for i in range(num_hosts)]
        mean = average(sent)
        d = tree(np.negative, mean)
        if last is not None:
            cosine = cosine_of(d, tree(np.multiply, last, m))
            rho = 0.8 * rho + 0.2 * max(cosine, 0.0)
        last = d
        if moving.outer == "law":
            alpha = 1.5 / (1 + beta / (1 - beta * rho))
        o = tree(lambda o, m, d: beta * o * m + d, o, m, d)
        old_z, old_zi = z, zi
        ahead = tree(lambda d, o: d + beta * o, d, o)
        z = tree(lambda z, m, x, alpha=alpha: z * m - alpha * x, z, m, ahead)
        zi = a if rho2 else [z] * num_hosts
        if rho2:
            v = [
                tree(lambda v, x, z: v + x - z, v[i], zi[i], z)
                for i in range(num_hosts)
            ]
        minus = functools.partial(tree, np.subtract)
        residuals, health = {}, {}
        for i, j in pairs:
            gap = minus(theta[i, j], zi[i])
            residuals[i, j] = (
                norm_of(gap),
                (rho1 or 1.0) * norm_of(minus(zi[i], old_zi[i])),
                norm_of(minus(zi[i], z)),
                rho2 * norm_of(minus(z, old_z)),
            )
            moved = minus(zi[i], old_zi[i])
            health[i, j] = {
                "host_drift": norm_of(tree(np.multiply, minus(theta[i, j], z), m))
                / norm_of(z),
                "primal_by_group": {
                    "a": norm_of({"a": gap["a"], "b": gap["b"]}),
                    "b": norm_of({"b": gap["b"]}),
                },
                "dual_by_group": {
                    "a": (rho1 or 1.0) * norm_of({"a": moved["a"], "b": moved["b"]}),
                    "b": (rho1 or 1.0) * norm_of({"b": moved["b"]}),
                },
            }
            if gamma:
                u[i, j] = tree(lambda u, g: gamma * u + g, u[i, j], gap)
            theta[i, j] = tree(
                lambda x, z, u: x - kappa * (x - z + u), theta[i, j], zi[i], u[i, j]
            )
            if kind == "freeze":
                theta[i, j], u[i, j] = z, zero
            if kind == "freeze" or (kind == "moving" and is_reset):
                b[i, j] = tree(np.multiply, b[i, j], m)
        if kind == "freeze":
            zi, v, is_frozen = [z] * num_hosts, [zero] * num_hosts, True
        history.append(
            {
                "theta": dict(theta), "u": dict(u), "b": dict(b), "z": z, "o": o,
                "zi": zi, "v": v, "e": e, "masks": masks, "residuals": residuals,
                "health": health, "seen": None if seen is None else dict(seen),
                "rho": (rho1, rho2), "last": last, "cosines": (cosine, rho),
            }
        )  # fmt: skip
    return history
