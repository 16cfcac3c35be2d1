#!/bin/sh
# Draws the figures of the studies here, from the lines in studies/. Nothing is trained.
#
#   sh docs/figures/studies.sh [COMMAND]     from the root of the repository; COMMAND is `treegraft` unless given
set -eu
treegraft=${1:-treegraft}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# draw NAME FIGURE [OPTION...]: one figure of the lines in NAME.jsonl
draw() {
    name=$1 figure=$2
    shift 2
    "$treegraft" report "$made/$name.jsonl" --out "$made/$name" "$@"
    cp "$made/$name/figures/$figure.svg" "docs/figures/studies/$name-$figure.svg"
}

alone="--only commit --only Tree-GRPO --only ARPO --only GRPO"
for study in "exploration.toml --only boundary" "arpo-fair.toml --only unsure" "decisive.toml --only short"; do
    # shellcheck disable=SC2086 # words of their own
    "$treegraft" study studies/$study $alone --lines
done >"$made/exploring.jsonl"
"$treegraft" study studies/decisive.toml --only imperfect --only commit --only "SFT, pruned, then GRPO" \
    --only "SFT, pruned, then commit" --only "SFT, raw, then GRPO" --only RAPO --only "whole trajectories, pruned" --only GRPO --lines \
    >"$made/imperfect.jsonl"
"$treegraft" study studies/rapo-ablations.toml --only imperfect --lines >"$made/ablations.jsonl"
"$treegraft" study studies/rapo-figure8.toml --lines >"$made/rapo-figure8.jsonl"
mkdir -p docs/figures/studies
draw exploring accuracy-against-cost
draw imperfect accuracy-against-cost
draw ablations final-accuracy --baseline RAPO
"$(dirname "$(command -v "$treegraft")")"/python studies/figures/papers.py rapo-8 "$made/rapo-figure8.jsonl" --out "$made"
cp "$made/rapo-8.svg" docs/figures/studies/rapo-figure8-sweep.svg
