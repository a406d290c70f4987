#!/bin/sh
# A rollout in containers: an agent works on an instance; its change is graded in a second container.
#
#   ENGINE=podman container_rollout.sh INSTANCE IMAGE 'COMMAND OF THE AGENT' 'COMMAND OF THE TESTS'
#
# Needs root, and a daemon with `[docker] volumes = true`. Prints the patch; ends with the status of
# the tests. The volumes and their checkouts are always removed.
set -eu
instance=$1 image=$2 agent=$3 tests=$4
engine=${ENGINE:-docker}
agent_uid=3000 tests_uid=3001        # the tests run as another user than the agent
work=$instance--work-$$ graded=$instance--graded-$$ grade=

clean_up() {
    "$engine" volume rm --force "$work" "$graded" >&2 || true
    [ -z "$grade" ] || mirrord release "$grade"
}
trap clean_up EXIT

in_container() {    # UID VOLUME COMMAND
    "$engine" run --rm --network none --user "$1" -v "$2:/testbed" -w /testbed "$image" sh -c "$3"
}

"$engine" volume create --driver mirrord --opt "instance=$instance" --opt owner=$agent_uid "$work" >&2
in_container $agent_uid "$work" "$agent" >&2
checkout=$("$engine" volume inspect --format '{{.Status.checkout}}' "$work")
mirrord diff "$checkout"

grade=$(mirrord grade "$checkout" --owner $tests_uid)
"$engine" volume create --driver mirrord --opt "checkout=$grade" "$graded" >&2
in_container $tests_uid "$graded" "$tests" >&2
