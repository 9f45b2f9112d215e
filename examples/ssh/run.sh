#!/bin/sh
# Starts one command on several hosts, and stops it:
#
#   HOSTS="alpha beta gamma" KEY=run.key ./run.sh start resilient-run --nnodes 2 … --rr-key-file run.key train.py
#   HOSTS="alpha beta gamma" ./run.sh stop
#
# In the home directory of each host: run.key, run.pid, run.log. ssh has to let you in without a password.
set -eu
action=$1
shift

quoted=
for word in "$@"; do
    quoted="$quoted '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
done

for host in $HOSTS; do
    case $action in
    start)
        # Only you may read it, from its first byte on.
        ssh "$host" 'umask 077; cat >run.key' <"$KEY"
        # `setsid`: it outlives the login. Its own pid, and not that of a shell, is what `stop` ends.
        ssh "$host" "setsid sh -c 'echo \$\$ >run.pid; exec \"\$@\"' sh$quoted >>run.log 2>&1 </dev/null &"
        ;;
    stop) ssh "$host" 'kill -TERM "$(cat run.pid)" && rm run.pid' || echo "$host: nothing to stop" >&2 ;;
    *) echo "usage: HOSTS='a b' KEY=run.key $0 start COMMAND… | stop" >&2; exit 2 ;;
    esac
done
