#!/bin/sh
set -ex
mkdir -p /repositories/"$1"
cd /repositories/"$1"
git init && git remote add origin "$2" && git fetch origin "$3" --depth=1 && git reset --hard "$3"
