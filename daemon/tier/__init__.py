"""The persistent tier: committed pairs written to storage that outlives the hosts, and read back."""
