"""What verl's trainer gives prompts to: workers that grow trees, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from omegaconf import open_dict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from treegraft.extras.verl.keeper import Keeper
from treegraft.extras.verl.worker import TreeWorker


class TreeManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Deals prompts out among workers; all retrieve from one actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TreeWorker)

    async def _init_agent_loop_workers(self) -> None:
        # The workers find it by its name: verl passes them fixed arguments.
        name = f"treegraft_keeper_{uuid4().hex[:8]}"
        folder = Path(self.config.trainer.default_local_dir, "treegraft")
        make: Any = ray.remote(Keeper).options(name=name, num_cpus=0)
        self.keeper = make.remote(self.config.treegraft.settings, str(folder))
        with open_dict(self.config):
            self.config.treegraft.keeper = name
        await super()._init_agent_loop_workers()

    def learned(self, number: int) -> dict[str, float]:
        """Returns the metrics of a step's trees, which are recorded; see `Keeper.learned`."""
        found: dict[str, float] = ray.get(self.keeper.learned.remote(number))
        return found
