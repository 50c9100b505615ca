"""What every room uses: errors, the console, the settings of a run, and the machine."""
