#!/bin/bash
set -e
mist_run_all --data /data/dataset.json --results /results
