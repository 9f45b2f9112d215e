"""The command `resilientctl`, one module for each of its larger subcommands."""
