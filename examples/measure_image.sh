#!/bin/sh
# Show how much of the answer an image contains: checks every git repository and file in it.
#
#   measure_image.sh IMAGE.tar|DIRECTORY OWNER__NAME BASE_COMMIT
#
# IMAGE.tar is the output of `docker save IMAGE`. Ends with status 8 if something newer than the base
# commit is found; `--json` of verify-seal lists it.
set -eu
exec mirrord verify-seal --root "$1" --mirror "$2" --base "$3"
