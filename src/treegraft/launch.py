"""How a run begins: its settings and objects, the processes that learn together, its folder and its
session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack, cast

from treegraft.core.errors import SettingError, first_cause
from treegraft.core.given import GIVEN, GivenObjects, giving
from treegraft.core.import_paths import pick
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import others_as_ctrl_c
from treegraft.core.registry import Entry, registered
from treegraft.core.team import Team
from treegraft.policy.learn.torchrun import is_started, joined
from treegraft.rollout.loop import Placement
from treegraft.runs.display import shown
from treegraft.runs.open import own_config
from treegraft.runs.run import Run
from treegraft.session import Session, Surroundings
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects, Source, with_objects


class Options(Objects, total=False):
    """What each command that begins a run takes beside the settings; see `treegraft.train`."""

    recipe: str | None
    resume: Path | str | None
    accepts_changes: bool
    display: Display | bool | None


@contextmanager
def opened(
    source: Source | None,
    command: str,
    *,
    recipe: str | None = None,
    resume: Path | str | None = None,
    accepts_changes: bool = False,
    display: Display | bool | None = None,
    placement: str | None = None,
    callbacks: Sequence[object] = (),
    **objects: Unpack[Objects],
) -> Iterator[tuple[Run, Session]]:
    """Holds a run and its session, ready for the first step; of a run that has nothing left to do,
    the session is closed.

    Args:
        source: settings; None for those of the run to resume.
        command: the command that goes on with the run, "train" or "sft".
        recipe, resume, accepts_changes, display, placement, callbacks, objects: as of
            `treegraft.train`.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
    """
    given_source = source
    if source is None:
        given_source = {} if resume is None else own_config(Path(resume))
    elif isinstance(source, str | Path):
        recipe = recipe or str(source)
    assert given_source is not None
    own, given = with_objects(given_source, objects)
    kind = _placement(placement, given)
    # Under torchrun each rank runs the script that has the objects.
    if own.learn.ranks not in ("auto", 1) and not is_started():
        # Ranks that we start read settings from standard input, which holds no objects.
        _refuse_local(given, f"learn.ranks = {own.learn.ranks}")
    is_empty = source is None and resume is None and not given.records
    with ExitStack() as ends:
        for one in (others_as_ctrl_c(), first_cause(), giving(given)):
            ends.enter_context(one)
        # Other ranks begin here: whatever follows is asked of rank 0 alone.
        team = ends.enter_context(joined(own, command))
        if team.rank:
            yield _followed(own, team, ends)
            return
        run = Run.open(
            None if is_empty else own,
            given,
            ends.enter_context(shown(display)),
            command=command if kind is None else kind.facts["command"],
            team=team,
            recipe=recipe,
            resume=resume,
            accepts_changes=accepts_changes,
            callbacks=callbacks,
        )
        # From here on its end releases the folder, and removes one just made.
        ends.enter_context(run)
        is_over = run.is_finished and command != "sft"
        # What `FollowedRun` reads first on each other rank.
        team.share(is_over)
        place = None
        if kind is not None and not is_over:
            place = ends.enter_context(kind.load()(run.config))
        session = _session_of(run, place, warms_up_only=command == "sft")
        if not is_over:
            ends.enter_context(session)
            ends.enter_context(run.recording(session, session.parts.source.report()))
            # After `recording`, which makes the folder: nothing is written for bad input.
            session.settle(run.path)
        yield run, session
        team.finish()


def _session_of(run: Run, placement: Placement | None, *, warms_up_only: bool) -> Session:
    """The session of a run, not open yet."""
    within = Surroundings(
        state=run.state,
        folder=run.path,
        display=run.display,
        stop=run.stop,
        team=run.team,
        placement=placement,
        warms_up_only=warms_up_only,
    )
    return Session(run.config, checkpoint=run.checkpoint, within=within)


def _followed(config: Config, team: Team, ends: ExitStack) -> tuple[Run, Session]:
    """The same on another rank than 0."""
    from treegraft.follower import FollowedRun, FollowedSession
    from treegraft.policy.learn.ranks import deaf_to_ends

    ranks: Any = team
    # Rank 0 gets these signals too, and saves with this rank's help.
    ends.enter_context(deaf_to_ends())
    session = FollowedSession(config, ranks)
    run = ends.enter_context(FollowedRun(ranks, session))
    if not run.is_finished:
        ends.enter_context(session)
    return cast(Run, run), cast(Session, session)


def _refuse_local(objects: GivenObjects, place: str) -> None:
    """Raises `SettingError` for objects that other processes cannot find."""
    if names := list(objects.by_name):
        listed = ", ".join(f"'{name.removeprefix(GIVEN)}'" for name in names)
        raise SettingError(
            f"{place} runs in other processes, which cannot find {listed}: got objects of this"
            " script or notebook alone; expected ones that can be imported. Put them into a module"
            " and import them from it.",
            code="objects-elsewhere",
        )


def _placement(name: str | None, given: GivenObjects) -> Entry | None:
    """The placement of this name; None for this process."""
    if name is None:
        return None
    _refuse_local(given, f"placement '{name}'")
    entry: Entry = pick(name, registered("placement"), "placement")
    return entry
