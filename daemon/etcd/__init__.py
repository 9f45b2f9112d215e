"""The client of etcd that launchers and daemons share."""
