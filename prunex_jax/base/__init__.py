"""What every room uses and none owns: errors, trees, settings, files, signals."""
