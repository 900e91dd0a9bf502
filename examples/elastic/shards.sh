#!/bin/bash
#POLLUX --kind restartable --max-replicas 4
# Work that is cut into shards, done by as many replicas as Pollux gives. Each shard leaves a file, so a new start goes
# on with what is left. Usage: shards.sh NUM_SHARDS SECONDS_PER_SHARD OUTPUT_FOLDER
set -u
num_shards=$1 seconds=$2 output=$3
rank=${RANK:-0} size=${WORLD_SIZE:-1}
mkdir -p "$output"

asked=no
trap 'asked=yes' TERM # bash runs it when the shard in hand is done

for ((shard = rank; shard < num_shards; shard += size)); do
    [ -e "$output/$shard" ] && continue
    [ $asked = yes ] && exit 143 # what is done is saved: leave, to be started again with another size
    sleep "$seconds"
    echo $((shard * shard)) >"$output/$shard.new.$rank" && mv "$output/$shard.new.$rank" "$output/$shard"
    if [ "$rank" = 0 ]; then
        done=$(find "$output" -name '[0-9]*' -not -name '*.new.*' | wc -l)
        "${PYTHON:-python}" -m pollux.elastic report --done "$done" --total "$num_shards" --per-replica 1 --step-s "$seconds"
    fi
done
