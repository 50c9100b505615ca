"""The `megatoken` command."""
