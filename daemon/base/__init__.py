"""What every part of the daemon builds on: settings, policies, records, supervised tasks, guarded sockets."""
