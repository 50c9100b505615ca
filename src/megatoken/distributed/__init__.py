"""Train with several processes: process groups, sharding and gradient reduction."""
