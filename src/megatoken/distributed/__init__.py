"""Training by several processes: the process group, and a model split over it."""
