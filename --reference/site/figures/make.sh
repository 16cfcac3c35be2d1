#!/bin/sh
# Trains the demo's agent with three methods (one seed, some minutes each) and draws their figures here; then those of the
# studies, from their recorded lines. What is trained already is not trained again.
#
#   sh docs/figures/make.sh [COMMAND]     from the root of the repository; COMMAND is `treegraft` unless given
set -eu
treegraft=${1:-treegraft}
runs=${RUNS:-runs/figures}
for method in GRPO=independent RAPO=graft ARPO=entropy; do
    explorer=${method#*=}
    [ -d "$runs/demo-$explorer" ] ||
        "$treegraft" train recipes/demo.toml "explorers=[\"$explorer\"]" "run.name=demo-$explorer" "run.dir=$runs"
done
"$treegraft" report "GRPO=$runs/demo-independent" "RAPO=$runs/demo-graft" "ARPO=$runs/demo-entropy" --out "$runs/report"
mkdir -p docs/figures/demo
cp "$runs"/report/figures/training-dynamics.svg "$runs"/report/figures/accuracy-against-cost.svg docs/figures/demo/
sh docs/figures/studies.sh "$treegraft"
