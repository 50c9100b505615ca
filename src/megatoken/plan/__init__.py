"""What a run will need, found out before it is started."""
