"""How gradients are sent: messages with every byte counted, and what all schemes have in common."""
