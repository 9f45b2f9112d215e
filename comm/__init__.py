"""Gradient communication: sparse and compressed collectives, and planners that say when they pay."""
