#!/bin/sh
# How much of the answer is in an image that you have: every git repository in it, every file.
#
#   measure_image.sh IMAGE.tar|DIRECTORY OWNER__NAME BASE_COMMIT
#
# IMAGE.tar is what `docker save IMAGE` writes. Ends with status 8 where something newer than the
# base commit is found; `--json` of verify-seal says what.
set -eu
exec mirrord verify-seal --root "$1" --mirror "$2" --base "$3"
