"""What measures this project; no part of the package. README.md says how to run it."""
