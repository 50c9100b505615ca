"""Train with several processes: the process group, and a model sharded over it."""
