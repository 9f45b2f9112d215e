"""Replicas on their way between hosts: offered, fetched, paced, lent and handed over."""
