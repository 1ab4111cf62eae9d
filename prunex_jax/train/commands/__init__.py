"""What people give and see: command lines and the screen.

command       `train`
dry_run       `train --dry_run`: what a run will need, without running it
console       the start screen, lines of progress, the last screen
export        `export`
evaluate      `evaluate`
supervise     `supervise`: starts a lost command again
"""
