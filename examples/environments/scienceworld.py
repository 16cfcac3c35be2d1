"""ScienceWorld: experiments of a primary school in a house of ten rooms, played in words.

    pip install 'treegraft[environments]'
    apt-get install default-jre-headless       (or any Java from version 8 on)
    treegraft train scienceworld --smoke

    question   ScienceWorld lifespan-longest-lived
               Your task is to find the animal with the longest life span. [...]
    act        teleport to outside     ->  You teleport to the outside.
    act        focus on giant tortoise ->  You focus on the giant tortoise. task completed

Worlds are those of the package `scienceworld` (Wang et al., arXiv 2203.07540), which live in a Java
process. The expert follows the package's gold paths. A world cannot be copied, so a branch repeats
its actions, and equal actions must have equal results: the random generator of the Java process,
which all worlds share, gets a seed before each action.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JJavaError
from scienceworld.constants import ID2TASK, JAR_PATH

from treegraft import SettingError, StepContent, Task, ToolError, ToolUnavailable
from treegraft.parts import OpenTasks, ToolCall, errors, keyed

COMPLETED = "task completed"
FAILED = "task failed"
NO_ACTIONS_LEFT = "no actions left"
DONE = "done"
"""The answer, which the reward takes no notice of."""
LOOK = "look around"
SIMPLIFICATIONS = "easy"
"""The package's name for all that it can make easier."""
MAX_ACTION_CHARS = 500
ANSWER_DEADLINE_S = 300.0
"""Longest wait for one answer of Java. A gold path needs up to 5 s of a core, and more beside
others."""
JAVA_OPTIONS = [
    # Other collectors and the second compiler would use the cores that the learner computes on.
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    # Worlds list objects of equal names by their identity hashes, which are drawn. With one hash
    # for all, the order is that in which they were made.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+IgnoreUnrecognizedVMOptions",
]
WORDS = Path(__file__).with_name("scienceworld_words.txt")
"""Words of rooms, objects, gold paths and actions, for the tiny model. Those of the lifespan games
are all there; of other games some are missing, such as temperatures."""


class Simulator:
    """The Java process in which the worlds of this process live. It ends with this process."""

    def __init__(self) -> None:
        folder = mkdtemp(prefix="treegraft-")  # Java writes a list of its objects where it runs
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        port, token, self.process = launch_gateway(
            classpath=JAR_PATH,
            javaopts=JAVA_OPTIONS,
            die_on_exit=True,
            java_path=None,  # that of $JAVA_HOME, else of the search path
            create_new_process_group=True,  # Ctrl-C is ours to handle
            enable_auth=True,
            cwd=folder,
            return_proc=True,
        )
        parameters = GatewayParameters(
            port=port, auth_token=token, auto_field=True, read_timeout=ANSWER_DEADLINE_S
        )
        jvm = JavaGateway(gateway_parameters=parameters).jvm
        self._random = getattr(getattr(jvm.scala.util, "Random$"), "MODULE$")
        self._lock = Lock()
        self.new_world = jvm.scienceworld.runtime.pythonapi.PythonInterface

    @contextmanager
    def drawing(self, *key: str | int) -> Iterator[None]:
        """Holds the process during the block, with random numbers that follow from the key."""
        with self._lock:
            try:
                self._random.setSeed(keyed.keyed_int("scienceworld", *key) >> 1)  # Java has a sign
                yield
            except Py4JJavaError as error:
                raise ToolError("the world cannot do that") from error
            except (Py4JError, OSError) as error:
                if not self.process.stdin.closed:  # the first of its worlds to notice
                    simulator_of.cache_clear()  # the next world starts another process
                    self.process.kill()
                    self.process.stdin.close()
                raise ToolUnavailable(f"ScienceWorld's Java does not answer: {error}") from error


@cache
def simulator_of(process: int) -> Simulator:
    """Returns the simulator of a process of ours: a forked child must not use its parent's."""
    return Simulator()


class ScienceWorld:
    """One game. Its public method `act` is the agent's tool."""

    capability = "replay"  # a branch repeats the calls in a fresh object

    def reset(self, game: str, variation: int, max_actions: int) -> str:
        """Begins a game and returns the task with what is seen first."""
        self._key = (game, variation, SIMPLIFICATIONS)
        self._max_actions = max_actions
        self._num_actions = 0
        self.done = False
        self._score = 0.0
        self._simulator = simulator_of(os.getpid())
        with self._simulator.drawing(*self._key, "world"):
            self._world = self._simulator.new_world()
            if refusal := self._world.load(*self._key, False):
                raise ToolUnavailable(f"ScienceWorld has no {game} {variation}: {refusal}")
        with self._simulator.drawing(*self._key, "look"):
            return f"{self._world.getTaskDescription()}\n{self._world.freeActionLook()}"

    def act(self, action: str) -> str:
        """Does one action in the world, such as: look around, look at OBJECT, look in OBJECT, focus
        on OBJECT, teleport to PLACE, go to PLACE, open OBJECT, pick up OBJECT, move OBJECT to
        OBJECT, pour OBJECT in OBJECT, activate OBJECT, use OBJECT on OBJECT, connect OBJECT to
        OBJECT, read OBJECT, inventory, wait."""
        self._num_actions += 1
        with self._simulator.drawing(*self._key, self._num_actions):
            words = " ".join(action.split())[:MAX_ACTION_CHARS]
            observation = str(self._world.step(words)).strip()
            self._score = round(100 * self._world.getScore()) / 100
            is_completed = bool(self._world.getCompleted())
        end = ""
        if self._score < 0:
            end = FAILED
        elif is_completed:
            end = COMPLETED
        elif self._num_actions >= self._max_actions:
            end = NO_ACTIONS_LEFT
        self.done = bool(end)
        return f"{observation}\n{end}" if end else observation

    def get_reward(self) -> float:
        """Returns the score: from 0 to 1 by the parts of the task that are done, -1 for a failed
        task."""
        return self._score


@cache
def splits(game: str) -> tuple[list[int], list[int]]:
    """Returns the package's train and dev variations of a game."""
    simulator = simulator_of(os.getpid())
    with simulator.drawing("splits"):
        world = simulator.new_world()
        world.load(game, 0, SIMPLIFICATIONS, False)
        return list(world.getVariationsTrain()), list(world.getVariationsDev())


@lru_cache(4096)
def gold_path(game: str, variation: int) -> tuple[str, ...] | None:
    """Returns the package's own solution up to the end of the task, with the looks around that an
    agent needs, unless these spoil it. None if the whole score is not reached."""
    simulator = simulator_of(os.getpid())
    with simulator.drawing(game, variation, SIMPLIFICATIONS, "gold"):
        world = simulator.new_world()
        world.load(game, variation, SIMPLIFICATIONS, True)
        written = [str(action) for action in world.getGoldActionSequence()]
    for actions in (with_looks(written), written):
        played = ScienceWorld()
        played.reset(game, variation, max_actions=len(actions) + 1)
        for number, action in enumerate(actions, start=1):
            played.act(action)
            if played.done and played.get_reward() == 1.0:
                return tuple(actions[:number])
            if played.done:
                break
    return None


def with_looks(actions: Sequence[str]) -> list[str]:
    """Returns actions with a look around before the first "focus on" in a room without one, since
    nobody could know what is there."""
    found = []
    has_looked = False
    for action in actions:
        if action.startswith("focus on ") and not has_looked:
            found.append(LOOK)
            has_looked = True
        if action == LOOK:
            has_looked = True
        elif action.startswith(("go ", "teleport ")):
            has_looked = False
        found.append(action)
    return found


class ScienceWorldTasks(OpenTasks):
    """Worlds in equal shares by their game. Training and warm-up share the package's train
    variations without overlap; its dev variations are held out."""

    def __init__(
        self,
        *,
        seed: int,
        num_train: int,
        num_eval: int,
        games: Sequence[str] = ("lifespan-longest-lived", "lifespan-shortest-lived"),
        num_warmup: int = 16,
        max_actions: int = 30,
    ) -> None:
        """Args:
            games: names of the package's 30 tasks.
            num_warmup: train variations of each game that the warm-up gets, at most half of them.
                The gold path of each costs the package some 0.3 s.
            max_actions: actions after which a world is over.

        Raises:
            SettingError: Java is missing, or the package has no such game.
        """
        home = os.environ.get("JAVA_HOME")
        if shutil.which("java", path=home and f"{home}/bin") is None:
            raise SettingError(
                "tasks.kind: ScienceWorld needs Java, version 8 or newer; got no program 'java' in"
                " $JAVA_HOME or the search path. Run: apt-get install default-jre-headless"
            )
        for game in games:
            if game not in ID2TASK.values():
                raise SettingError(
                    f"tasks.options: games: got '{game}', expected names of"
                    f" {', '.join(ID2TASK.values())}.{errors.nearest(game, ID2TASK.values())}"
                )
        self._seed = seed
        self._num_train = num_train
        self._num_eval = num_eval
        self._games = games
        self._num_warmup = num_warmup
        self._max_actions = max_actions

    @cached_property
    def _variations(self) -> dict[tuple[str, str], list[int]]:
        """The numbers of variations by game and purpose."""
        found = {}
        for game in self._games:
            # Neighbours are alike, so that the first ones would be a poor choice.
            train, dev = (
                sorted(numbers, key=lambda number: keyed.keyed_int(self._seed, game, number))
                for numbers in splits(game)
            )
            num_warmup = min(self._num_warmup, len(train) // 2)
            found[game, "warmup"] = train[:num_warmup]
            found[game, "train"] = train[num_warmup:]
            found[game, "dev"] = dev
        return found

    def _task(self, purpose: str, game: str, variation: int) -> Task:
        return Task(
            id=f"scienceworld/{purpose}/{game}/{variation}",
            question=f"ScienceWorld {game}",  # what is to be done comes with the first observation
            reference=(),  # the environment gives the reward
            category=game,
            columns={"game": game, "variation": variation, "max_actions": self._max_actions},
        )

    def _in_turns(self, purpose: str, num: int) -> list[Task]:
        """The games taking turns, until one has no further variation."""
        rounds = zip(*(self._variations[game, purpose] for game in self._games), strict=False)
        tasks = []
        for variations in rounds:
            for game, variation in zip(self._games, variations, strict=True):
                tasks.append(self._task(purpose, game, variation))
        return tasks[:num]

    def train_tasks(self) -> Sequence[Task]:
        return self._in_turns("train", self._num_train)

    def eval_tasks(self) -> Sequence[Task]:
        return self._in_turns("dev", self._num_eval)

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        tasks = []
        for number in range(num):
            game = self._games[number % len(self._games)]
            variations = self._variations[game, "warmup"]
            variation = keyed.keyed_choice(variations, "warmup", seed, number)
            tasks.append(self._task("warmup", game, variation))
        return tasks

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        actions = gold_path(task.columns["game"], task.columns["variation"])
        if actions is None:
            return None
        steps = [StepContent(calls=(ToolCall("act", action),)) for action in actions]
        return (*steps, StepContent(answer=DONE))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str:
        """Returns that it is done, which it is not; a warm-up may teach this."""
        return DONE

    def vocabulary(self) -> Sequence[str]:
        """Returns the words that the tiny model can read and write."""
        words = WORDS.read_text(encoding="utf-8").split()
        objects = [word for word in words if word.isalpha() and word.islower()]
        # Any object may end a sentence or stand in a list.
        ends = [f"{word}{mark}" for word in objects for mark in (".", ",")]
        questions = " ".join(f"ScienceWorld {game}" for game in self._games)
        texts = f"{questions} {COMPLETED} {FAILED} {NO_ACTIONS_LEFT} {DONE}"
        return [*words, *ends, *texts.split()]
