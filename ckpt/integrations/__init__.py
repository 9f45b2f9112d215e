"""Training loops that a framework owns: what of them is state, and where in the data they go on."""
