"""A child process: TRL's GRPOTrainer, one optimiser step for each "go". Run by the Python of an
environment with TRL.

It knows nothing of this package. Its argument is JSON: model, prompt, num_generations, num_tokens,
dtype, num_threads, lr, folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answers each line with {"seconds", "num_prompt_tokens", "num_completion_tokens"}."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    # Before Python 3.11 the files beside this one come first, and one is called as a module of the
    # standard library.
    sys.path[:] = [
        place
        for place in sys.path
        if os.path.realpath(place) != os.path.dirname(os.path.realpath(__file__))
    ]
    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["num_threads"])
    seen: dict[str, int] = {}

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """Some variance within the group; counts what was sampled."""
        seen["num_completion_tokens"] = sum(len(ids) for ids in completion_ids)
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Turns(TrainerCallback):
        """Waits for its turn before a step and says how long it took after it."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.began
            answers.write(
                json.dumps({"seconds": seconds, "num_prompt_tokens": num_prompt, **seen}) + "\n"
            )

    count = settings["num_generations"]
    tokens = settings["num_tokens"]
    arguments = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=count,
        num_generations=count,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens, "max_new_tokens": tokens},
        max_steps=100_000,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        model_init_kwargs={"dtype": settings["dtype"]},
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    rows = Dataset.from_list([{"prompt": settings["prompt"]}] * 64)
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=rows,
        callbacks=[Turns()],
    )
    num_prompt = len(
        trainer.processing_class(settings["prompt"], add_special_tokens=False)["input_ids"]
    )
    answers.write(
        json.dumps({"num_prompt_tokens": num_prompt, "num_threads": torch.get_num_threads()}) + "\n"
    )
    trainer.train()


if __name__ == "__main__":
    main()
