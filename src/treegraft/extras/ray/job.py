"""The learner's ranks as a job: placed together, started as torchrun would, watched, and started
again from the last checkpoint where one of them is lost.

Rank 0 is the process that owns the engines, which end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treegraft import Config, TreegraftError
from treegraft.extras.ray.actors import Place, value_of
from treegraft.extras.ray.rank import RankActor
from treegraft.extras.ray.ray import ADDRESS, reachable
from treegraft.extras.ray.settings import cluster_settings
from treegraft.parts import errors, interrupt, plain

GRACE_S = 20.0
"""Time for the other ranks to say why they end, after one was lost."""
END_S = 60.0
"""Time for the other ranks to end after one has ended by itself, and for all that are killed."""
SAVE_S = 600.0
"""Time for a job that was asked to stop to save."""
PLACE_S = 60.0
"""Longest wait for ranks to be placed where there is room, and time between two lines that say that
there is none."""
ROOM_S = 1800.0
"""Longest wait for room."""


class Job:
    """The ranks of one run."""

    def __init__(
        self,
        config: Config,
        place: Place,
        run_dir: Path,
        begin: Sequence[str],
        again: Sequence[str],
        others: Mapping[str, float],
        say: Callable[[str], None],
    ) -> None:
        """Args:
        run_dir: where the run is, or will be.
        begin: arguments of `treegraft` that begin the run.
        again: those that go on with it, once it has its folder.
        others: what the other actors of the run take up together, by Ray's names.
        say: shows a line of the ranks' output, or of our own.
        """
        self._config, self._place, self._run_dir = config, place, run_dir
        self._begin, self._again, self._others, self._say = begin, again, others, say
        self._stop = interrupt.Stop()
        self._go_on = f"go on with: treegraft cluster --resume {run_dir}"

    def carry_out(self) -> int:
        """Returns rank 0's exit code.

        Raises:
            RankError: ranks were lost more than cluster.max_restarts times, have no room, or did
                not save when they were asked to stop.
            SettingError: a machine is not like this one.
            Ended: after a signal, with everything saved.
        """
        return interrupt.run_to_end(self._carry_out(), on_interrupt=self._stop.ask)

    async def _carry_out(self) -> int:
        most, num_restarts = cluster_settings(self._config).max_restarts, 0
        doing = "stopping; the ranks save"
        again = "Ctrl-C again to stop without saving"
        with self._stop.on_signals(self._say, doing, again):
            while True:
                code, lost = await self._attempt(is_again=num_restarts > 0)
                if self._stop.is_asked:
                    return self._stopped(code, lost)
                if not lost:
                    return 1 if code is None else code
                if num_restarts >= most:
                    raise errors.RankError(
                        f"cluster: {lost}, and the job was started again {num_restarts} times"
                        " already (cluster.max_restarts). Its last checkpoint is safe; once the"
                        f" cause is removed, {self._go_on}",
                        code="job-lost",
                    )
                num_restarts += 1
                self._say(
                    f"{lost}; the job starts again from its last checkpoint (restart"
                    f" {num_restarts} of at most {most})"
                )

    def _stopped(self, code: int | None, lost: str) -> int:
        """Ends a job that was asked to stop."""
        if code == 0:
            return 0
        # It was sent SIGTERM, which ends it at once before there is anything to save.
        if code in (128 + signal.SIGTERM, -signal.SIGTERM):
            raise interrupt.Ended(self._stop.number)
        how = lost or ("no end" if code is None else f"rank 0 ended with code {code}")
        raise errors.RankError(
            f"cluster: the job was asked to stop, but its ranks did not save ({how}). Its last"
            f" checkpoint is safe; {self._go_on}",
            code="ranks-not-saved",
        )

    async def _room(self, *, is_again: bool) -> int:
        """The ranks that there is room for, waited for where there is none; 0 after a signal.

        Fewer than asked for only where some were there and learn.ranks leaves it open.
        """
        settings, learn = cluster_settings(self._config), self._config.learn
        wanted = settings.num_ranks
        name = "GPU" if settings.learner_gpus else "CPU"
        least = 1 if is_again and learn.ranks == "auto" else wanted
        began, told = time.monotonic(), float("-inf")
        while not self._stop.is_asked:
            has = await asyncio.to_thread(reachable, name) - self._others.get(name, 0.0)
            fits = min(wanted, int(has))
            if fits >= least:
                if fits < wanted:
                    self._say(f"there is room for {fits} of {wanted} ranks; they go on")
                return fits
            if time.monotonic() - began > ROOM_S:
                raise errors.RankError(
                    f"cluster: no room for {least} ranks within {ROOM_S:.0f} s; expected as many"
                    f" {name}s beside those of the other roles. Add machines, then {self._go_on}",
                    code="no-room-for-ranks",
                )
            if time.monotonic() - told > PLACE_S:
                told = time.monotonic()
                self._say(f"waiting for room for {least} ranks ({name}s free: {max(0, int(has))})")
            await asyncio.sleep(1.0)
        return 0

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, *, is_again: bool) -> tuple[int | None, str]:
        """Runs the ranks to their end. Returns rank 0's exit code, None without one, and which rank
        was lost first, and how; "" where all have ended by themselves."""
        from ray.exceptions import RayError

        num = await self._room(is_again=is_again)
        if not num:
            raise interrupt.Ended(self._stop.number)
        try:
            async with self._placed(num) as (ranks, words):
                return await self._watched(ranks, words)
        except (RayError, TimeoutError, TreegraftError) as error:
            # Before they were all started.
            if isinstance(error, TreegraftError) and not is_again:
                raise
            said = plain(str(error), 300) or type(error).__name__
            return None, f"the ranks could not be started ({said})"

    @asynccontextmanager
    async def _placed(self, num: int) -> AsyncIterator[tuple[list[Any], list[Any]]]:
        """Holds so many ranks in their order, with what each is to begin with."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_gpus = 1 if cluster_settings(self._config).learner_gpus else 0
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if num_gpus else {})
        group = placement_group([bundle] * num, strategy="PACK")
        actors: list[Any] = []
        try:
            async with asyncio.timeout(PLACE_S):
                await group.ready()
            for number in range(num):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
                options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": where}
                kind = ray.remote(RankActor).options(max_concurrency=100, **options)
                actors.append(kind.remote("rank", number, json.dumps(asdict(self._place))))
            async with asyncio.timeout(PLACE_S):
                met = list(map(value_of, await asyncio.gather(*(a.open.remote() for a in actors))))
                # The ranks of a machine have successive numbers, as torchrun gives them.
                order = sorted(range(num), key=lambda one: (met[one]["address"], one))
                ranks, met = [actors[one] for one in order], [met[one] for one in order]
                variables = environments(met, await ranks[0].open_store.remote())
            is_there = (self._run_dir / "config.json").exists()
            arguments = ["-m", "treegraft", *(self._again if is_there else self._begin)]
            path = os.pathsep.join(one for one in self._place.path if one)
            common = {ADDRESS: ray.get_runtime_context().gcs_address, "PYTHONPATH": path}
            yield ranks, [(arguments, common | own) for own in variables]
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    async def _watched(self, ranks: Sequence[Any], words: Sequence[Any]) -> tuple[int | None, str]:
        """Shows the ranks' output up to their ends; kills those that go on after their time."""
        import ray

        codes, lost = dict[int, int](), list[str]()

        async def follow(number: int) -> None:
            mark = "" if number == 0 else f"rank {number}: "
            run = ranks[number].run.options(num_returns="streaming")
            try:
                async for answer in run.remote(*words[number]):
                    found = json.loads(await answer)
                    if isinstance(found, int):
                        codes[number] = found
                        if found < 0:
                            name = signal.Signals(-found).name
                            lost.append(f"rank {number} was ended by {name}")
                    else:
                        for line in found.splitlines():
                            self._say(mark + line)
            except ray.exceptions.RayError as error:
                kind = type(error).__name__
                lost.append(f"rank {number} was lost with its machine or its actor ({kind})")

        following = {asyncio.create_task(follow(number)) for number in range(len(ranks))}
        is_told, deadline = False, float("inf")
        try:
            while (await asyncio.wait(following, timeout=0.2))[1] and time.monotonic() < deadline:
                if self._stop.is_asked and not is_told:
                    is_told, deadline = True, time.monotonic() + SAVE_S
                    # The others end by its orders, and save with it first.
                    with contextlib.suppress(ray.exceptions.RayError):
                        await ranks[0].send.remote(signal.SIGTERM)
                if lost or codes:
                    limit_s = GRACE_S if lost else END_S
                    deadline = min(deadline, time.monotonic() + limit_s)
            return codes.get(0), "".join(lost[:1])
        finally:
            # Their processes end with them, and with those what holds the run folder.
            for rank in ranks:
                ray.kill(rank)
            await asyncio.wait(following, timeout=END_S)
            for task in following:
                task.cancel()


def environments(met: Sequence[Mapping[str, Any]], port: int) -> list[dict[str, str]]:
    """Returns what torchrun would set for each rank.

    Args:
        met: what each rank's actor said when it was opened, in the order of ranks; those of a
            machine one after another.
    """
    found = []
    for rank, own in enumerate(met):
        local = [one for one in met if one["address"] == own["address"]]
        gpus = [gpu for one in local for gpu in one["gpus"]]
        first = next(n for n, one in enumerate(met) if one["address"] == own["address"])
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(met)),
            "LOCAL_RANK": str(rank - first),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "MASTER_ADDR": str(met[0]["address"]),
            "MASTER_PORT": str(port),
            # The store is there already, and outlives rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        found.append(variables)
    return found
