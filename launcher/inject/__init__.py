"""The command `resilient-inject`: faults on purpose, one by one or planned as a campaign."""
