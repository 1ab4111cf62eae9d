"""Command lines.

command       `train`
dry_run       `train --dry_run`: what a run will need, without running it
export        `export`
evaluate      `evaluate`
supervise     `supervise`: starts a lost command again
"""
