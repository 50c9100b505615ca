"""Many processes, one run: who is who, what they tell each other, and the program started several times."""
