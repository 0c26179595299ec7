#!/bin/bash
# Trains on a TPU slice, from your own machine: asks for it, sets its hosts up, trains, and does so again when it was
# preempted or a process was lost.
#
#   ZONE=us-central2-b TYPE=v4-32 VERSION=tpu-ubuntu2204-base SETUP='git clone URL weft && pip install -e weft[tpu]' \
#     launch/tpu_vm.sh NAME --config=configs/quickstart.py --workdir=/shared/run1
#
# SETUP runs on each host of a new slice; it makes the folder weft, and mounts what the workdir is on. Spot machines:
# CREATE=--spot.
set -u
name=$1
shift
log=$(mktemp)

tpus() { gcloud compute tpus "$@" --zone="$ZONE"; }
on_all() { tpus tpu-vm ssh "$name" --worker=all --command="$1"; }

while true; do
  case $(tpus queued-resources describe "$name" --format='value(state.state)' 2> /dev/null) in
    ACTIVE) ;;
    '') tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$TYPE" --runtime-version="$VERSION" \
      ${CREATE:-} || exit ;;&
    SUSPENDED | FAILED) tpus queued-resources delete "$name" --force --quiet ;;&
    *) sleep 30 && continue ;;
  esac
  on_all "test -d weft || { ${SETUP:-true}; }" || { sleep 30 && continue; }
  # What a lost connection has left running would hold the chips.
  on_all "pkill -f '[p]ython -u -m trainer'; cd weft && python -u -m trainer ${*@Q}; echo \"exit code \$?\"" 2>&1 | tee "$log"
  if grep -q '^exit code 1$' "$log"; then exit 1; fi
  if grep -q '^exit code' "$log" && ! grep '^exit code' "$log" | grep -qv ' 0$'; then exit 0; fi
  sleep 30
done
