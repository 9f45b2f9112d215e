"""The command `resilient-comm`, one module for each of its subcommands."""
