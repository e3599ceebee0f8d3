#!/bin/sh
# Answer all prompts and train both heads, EAGLE-2 and EAGLE-3 style, on whatever there is: CPU, one GPU or several.
#
#   scripts/train_default_heads.sh PROMPTS.jsonl OUT
#
# OUT/store holds the answers, OUT/eagle/head and OUT/eagle3/head the heads. Given again, it goes on where it stopped.
# The EAGLE-3 head is scored by the target's own lm_head and trained with Muon, the defaults of its kind.
#
#   DEVICE     cpu or cuda              (default: cuda where torch finds a GPU)
#   PROCESSES  that share each batch    (default: 1; one per GPU)
#   TARGET     the model                (default: the default model)
#   STEPS      optimiser steps a head   (default: 3000)
#   LIMIT      prompts answered         (default: all)
#   ANSWER, TRAIN  further options of eyas data answer and eyas train
set -eu

if [ $# -ne 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
prompts=$1 out=$2
: "${DEVICE:=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}"
: "${PROCESSES:=1}" "${STEPS:=3000}"

engine=auto
[ "$DEVICE" = cpu ] || engine=transformers
eyas() { python -m eyas.cli "$@"; }
train() {
    if [ "$PROCESSES" -gt 1 ]; then
        accelerate launch --multi_gpu --num_processes "$PROCESSES" -m eyas.cli train "$@"
    else
        eyas train "$@"
    fi
}

# One store serves both kinds. ANSWER and TRAIN are lists of words.
eyas data answer "$prompts" --out "$out/store" --features eagle3 --engine "$engine" --device "$DEVICE" \
    ${TARGET:+--target "$TARGET"} ${LIMIT:+--limit "$LIMIT"} ${ANSWER:-}
for kind in eagle eagle3; do
    train "$out/store" --kind "$kind" --out "$out/$kind" --device "$DEVICE" ${TARGET:+--target "$TARGET"} \
        --steps "$STEPS" --warmup 100 --unroll 3 --unroll-after $((STEPS / 4)) --ema 0.995 ${TRAIN:-}
done
