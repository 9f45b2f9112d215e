"""A trial of methods to sum gradients in a user's own job, and the advice that follows."""
