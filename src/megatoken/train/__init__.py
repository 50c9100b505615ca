"""Training: the state, one step, what it measures, the journal of a run and the guard that stops it in time."""
