"""What trainers, launchers and daemons agree on: slots, manifests, messages, digests, placement; torch-free."""
