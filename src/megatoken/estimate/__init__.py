"""Memory and communication of a run, estimated without its devices."""
