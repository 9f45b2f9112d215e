"""How well this host is: its memory, disks and GPUs, and whether its peers answer."""
