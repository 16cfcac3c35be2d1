#!/bin/sh
# Trees inside verl 0.9.1 on one machine with 8 GPUs of 80 GB:
#
#   TREEGRAFT_DATA=... sh examples/verl/train.sh examples/verl/arpo.toml model.path=runs/cold-start/checkpoints/latest
#   TREEGRAFT_DATA=... TREEGRAFT_CORPUS=... sh examples/verl/train.sh examples/verl/rapo.toml
#
# The arguments below are those that a recipe does not say, with the values of ARPO's released script for 7B beside them where
# they differ. It has never been run on a GPU: docs/verl.md lists what has.
set -eu
recipe=${1:-examples/verl/arpo.toml}
[ $# -eq 0 ] || shift
out=${OUT:-runs/verl-$(basename "$recipe" .toml)}

treegraft verl-data "$recipe" --out "$out/train.parquet" --held-out "$out/valid.parquet" "$@"

# shellcheck disable=SC2046  # one argument for each line
python -m verl.trainer.main_ppo \
  $(treegraft verl-args "$recipe" "$@") \
  data.train_files="$out/train.parquet" \
  data.val_files="$out/valid.parquet" \
  data.max_prompt_length=1536 \
  data.filter_overlong_prompts=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=11264 \
  actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_num_batched_tokens=8192 \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=22528 \
  actor_rollout_ref.rollout.agent.num_workers=8 \
  actor_rollout_ref.rollout.val_kwargs.n=1 \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=5 \
  trainer.test_freq=5 \
  trainer.val_before_train=False \
  trainer.total_epochs=1000 \
  trainer.project_name=treegraft \
  trainer.experiment_name="$(basename "$recipe" .toml)" \
  trainer.default_local_dir="$out" \
  trainer.logger='["console"]'
