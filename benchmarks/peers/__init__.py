"""One module for each way to keep training state, so that only the one in use is imported; see README.md here."""
