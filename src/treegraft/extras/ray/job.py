"""The learner's ranks as a job: placed together, started as torchrun would, watched, and started
again from the last checkpoint where one of them is lost.

Rank 0 is the process that owns engines and growers, which end with it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actors import Place, value_of
from treegraft.extras.ray.rank import RankActor
from treegraft.extras.ray.ray import ADDRESS, reachable
from treegraft.extras.ray.settings import cluster_settings
from treegraft.parts import errors, interrupt, plain

GRACE_S = 20.0
"""Time for the other ranks to say why they end, after one was lost."""
END_S = 60.0
"""Time for the other ranks to end after rank 0 has ended."""
KILL_S = 5.0
"""Longest wait for an actor that is told to kill its rank."""
SAVE_S = 600.0
"""Time for a job that was asked to stop to save."""
PLACE_S = 60.0
"""Longest wait for ranks to be started where there is room, and time between two lines that say
that there is none."""
ROOM_S = 1800.0
"""Longest wait for room."""


@dataclass(frozen=True, slots=True)
class Ends:
    """How an attempt has ended."""

    codes: Mapping[int, int]
    """Exit codes by rank; negative for a signal."""
    lost: str
    """Which rank was lost first, and how; empty where all have ended by themselves."""


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

    def carry_out(self) -> int:
        """Returns rank 0's exit code.

        Raises:
            RankError: ranks were lost more than cluster.max_restarts times, have no room, or did
                not save when they were asked to stop.
            Ended: after a signal, with everything saved.
        """
        return interrupt.run_to_end(self._carry_out(), on_interrupt=self._stop.ask)

    async def _carry_out(self) -> int:
        settings, num_restarts = cluster_settings(self._config), 0
        doing = "stopping; the ranks save"
        again = "Ctrl-C again to stop without saving"
        with self._stop.on_signals(self._say, doing, again):
            while True:
                num = await self._num_ranks(is_again=num_restarts > 0)
                if num:
                    ends = await self._attempt(num)
                if self._stop.is_asked:
                    return self._stopped(ends if num else None)
                if not ends.lost:
                    return ends.codes.get(0, 1)
                if num_restarts >= settings.max_restarts:
                    raise errors.RankError(
                        f"cluster: {ends.lost}, and the job was started again {num_restarts} times"
                        " already (cluster.max_restarts). Its last checkpoint is safe; once the"
                        " cause is removed, go on with: treegraft cluster --resume"
                        f" {self._run_dir}",
                        code="job-lost",
                    )
                num_restarts += 1
                self._say(
                    f"{ends.lost}; the job starts again from its last checkpoint (restart"
                    f" {num_restarts} of at most {settings.max_restarts})"
                )

    def _stopped(self, ends: Ends | None) -> int:
        """Ends a job that was asked to stop; `ends` is None where no rank had been started."""
        code = None if ends is None else ends.codes.get(0)
        if code == 0:
            return 0
        # It was sent SIGTERM, which ends it at once before there is anything to save.
        if ends is None or code in (128 + signal.SIGTERM, -signal.SIGTERM):
            raise interrupt.Ended(self._stop.number)
        how = ends.lost or ("no end" if code is None else f"rank 0 ended with code {code}")
        raise errors.RankError(
            f"cluster: the job was asked to stop, but its ranks did not save ({how}). Its last"
            f" checkpoint is safe; go on with: treegraft cluster --resume {self._run_dir}",
            code="ranks-not-saved",
        )

    # ------------------------------------------------------------------ room

    async def _num_ranks(self, *, is_again: bool) -> int:
        """The ranks that there is room for, waited for where there is none; 0 after a signal.

        Fewer than asked for only where some were there and learn.ranks leaves it open.
        """
        settings, learn = cluster_settings(self._config), self._config.learn
        wanted, unit = settings.num_ranks, learn.replicate
        name = "GPU" if settings.learner_gpus else "CPU"
        least = unit if is_again and learn.ranks == "auto" else wanted
        began, told = time.monotonic(), float("-inf")
        while not self._stop.is_asked:
            has = await asyncio.to_thread(reachable, name) - self._others.get(name, 0.0)
            fits = min(wanted, int(has) // unit * unit)
            if fits >= least:
                if fits < wanted:
                    self._say(f"there is room for {fits} of {wanted} ranks; they go on")
                return fits
            if time.monotonic() - began > ROOM_S:
                raise errors.RankError(
                    f"cluster: no room for {least} ranks within {ROOM_S:.0f} s; expected as many"
                    f" {name}s beside those of the other roles. Add machines, then go on with:"
                    f" treegraft cluster --resume {self._run_dir}",
                    code="no-room-for-ranks",
                )
            if time.monotonic() - told > PLACE_S:
                told = time.monotonic()
                self._say(f"waiting for room for {least} ranks ({name}s free: {max(0, int(has))})")
            await asyncio.sleep(1.0)
        return 0

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, num: int) -> Ends:
        """Runs so many ranks to their end."""
        from ray.exceptions import RayError

        try:
            async with self._placed(num) as ranks:
                return await _Watch(ranks, self._stop, self._say).to_the_end()
        except (RayError, TimeoutError) as error:
            # Before they were all started.
            said = plain(str(error), 300) or type(error).__name__
            return Ends({}, f"the ranks could not be started ({said})")

    @asynccontextmanager
    async def _placed(self, num: int) -> AsyncIterator[list[Any]]:
        """Holds so many ranks, started, in their order."""
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
            yield await self._begun(actors)
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    async def _begun(self, actors: Sequence[Any]) -> list[Any]:
        async with asyncio.timeout(PLACE_S):
            met = [
                value_of(one) for one in await asyncio.gather(*(a.meet.remote() for a in actors))
            ]
        # The ranks of a machine have successive numbers, as torchrun gives them.
        order = sorted(range(len(actors)), key=lambda one: (met[one]["address"], one))
        ranks, met = [actors[one] for one in order], [met[one] for one in order]
        is_there = (self._run_dir / "config.json").exists()
        arguments = ["-m", "treegraft", *(self._again if is_there else self._begin)]
        async with asyncio.timeout(PLACE_S):
            variables = environments(met, value_of(await ranks[0].open_store.remote()))
            for rank, own in zip(ranks, variables, strict=True):
                value_of(await rank.begin.remote(json.dumps([arguments, self._common() | own])))
        return ranks

    def _common(self) -> dict[str, str]:
        import ray

        return {
            ADDRESS: ray.get_runtime_context().gcs_address,
            "PYTHONPATH": os.pathsep.join(one for one in self._place.path if one),
        }


def environments(met: Sequence[Mapping[str, Any]], port: int) -> list[dict[str, str]]:
    """Returns what torchrun would set for each rank.

    Args:
        met: of `RankActor.meet`, in the order of ranks; those of a machine one after another.
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
            "TORCHELASTIC_RUN_ID": "treegraft",
            # The store is there already, and outlives rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        found.append(variables)
    return found


class _Watch:
    """The ranks of one attempt, to their ends."""

    def __init__(
        self, ranks: Sequence[Any], stop: interrupt.Stop, say: Callable[[str], None]
    ) -> None:
        self._ranks, self._stop, self._say = list(ranks), stop, say
        self._codes: dict[int, int] = {}
        self._lost = ""

    async def to_the_end(self) -> Ends:
        """Returns how they have ended; what goes on after its time is ended with its actor."""
        following = {asyncio.create_task(self._follow(n)) for n in range(len(self._ranks))}
        told, deadline = False, float("inf")
        try:
            while pending := {task for task in following if not task.done()}:
                await asyncio.wait(pending, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if self._stop.is_asked and not told:
                    told, deadline = True, min(deadline, now + SAVE_S)
                    await self._tell_leader()
                if self._lost:
                    deadline = min(deadline, now + GRACE_S)
                elif self._codes:
                    deadline = min(deadline, now + END_S)
                if now > deadline:
                    break
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await asyncio.gather(*map(self._kill, range(len(self._ranks))))
        return Ends(dict(self._codes), self._lost)

    async def _kill(self, number: int) -> None:
        """Ends a rank that goes on; with its actor alone rank 0 would try to save, and hold the run
        folder against the ranks that start next."""
        from ray.exceptions import RayError

        if number not in self._codes:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(KILL_S):
                    value_of(await self._ranks[number].send.remote(signal.SIGKILL))

    async def _tell_leader(self) -> None:
        from ray.exceptions import RayError

        # The others end by its orders, and save with it first.
        with contextlib.suppress(RayError):
            value_of(await self._ranks[0].send.remote(signal.SIGTERM))

    async def _follow(self, number: int) -> None:
        """Shows a rank's output up to its end."""
        from ray.exceptions import RayError

        mark = "" if number == 0 else f"rank {number}: "
        code: int | None = None
        try:
            while code is None:
                seen = value_of(await self._ranks[number].look.remote())
                for line in seen["lines"]:
                    self._say(mark + line)
                code = seen["code"]
        except RayError as error:
            self._lost = self._lost or f"rank {number} was lost with its machine or its actor"
            self._say(f"{mark}{type(error).__name__}")
            return
        self._codes[number] = code
        if code < 0:
            name = signal.Signals(-code).name
            self._lost = self._lost or f"rank {number} was ended by {name}"
