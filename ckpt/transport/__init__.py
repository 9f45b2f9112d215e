"""Replication by the trainers themselves, in the idle spans of the training network."""
