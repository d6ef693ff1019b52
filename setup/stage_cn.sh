#!/usr/bin/env bash
# Pack a folder of images into one file, shrunk once, and copy that to every
# host's own disk, for --dataset packed.
#
#   bash setup/stage_cn.sh --data-dir flowers
#   bash setup/stage_cn.sh --data-dir flowers --dry-run   # bytes, and free disk
#   bash setup/stage_cn.sh --data-dir flowers --longest 256 --budget 20G
#
# The folder has train/ and val/ with one folder a class in each, as for
# --dataset folder. The file has PIL's pixels: of images that are not shrunk
# training has the same numbers, without decoding JPEGs in each epoch. It is
# made on this machine and copied by ssh to the same path on all hosts at once,
# in blocks that are checked by hash: cut short, the same command sends what is
# missing, and where all is there it only checks. Images that have changed are
# packed again. A host without room is told before anything is packed or copied.
# Changed are the file and a hidden part of it beside it; a file there that is
# none of ours is left alone.
#
# Options:
#   --data-dir DIR    the folder of images
#   --to FOLDER       on each host; default: /var/tmp/motley-USER
#   --longest PIXELS  shrink what is larger to this longest side, by Lanczos
#   --keep KIND       pixels (the default), or jpeg: a third of the bytes, of
#                     quality 95 where it is shrunk, to be decoded in training
#   --budget SIZE     of disk on each host, as 20G; a larger file is refused
#   --needs RATE      images/s that a host's GPUs take; a host whose disk reads
#                     fewer is named
#   --jobs N          processes that pack; default: all cores
#   --hostfile FILE   default: hosts.txt in the repository
#   --dry-run         print every change, do none
#
# Exit status: 0 all hosts have the file, 1 some host has not, or a disk that is
# too slow, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
