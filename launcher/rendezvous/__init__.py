"""The `etcd-v3` rendezvous: how the launchers of a run form rounds, seat their ranks and hear of failures."""
