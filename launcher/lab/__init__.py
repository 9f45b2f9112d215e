"""The parts of a laboratory network: one of its hosts, and what is remembered of all of them."""
