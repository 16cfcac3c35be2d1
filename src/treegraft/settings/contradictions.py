"""Settings that do not fit each other, or the parts that were made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from treegraft.core.addresses import public
from treegraft.core.errors import SettingError
from treegraft.core.import_paths import unknown_name
from treegraft.core.interfaces import Capability, EnvironmentKind, Explorer, Restarting, Tool
from treegraft.core.registry import extensions
from treegraft.settings.config import Config, known_settings
from treegraft.settings.explore import chosen_kinds, retrieving, takes_warmup_of_buffer
from treegraft.settings.plain import shown
from treegraft.settings.recipe import flatten
from treegraft.settings.table import Contradiction, value_of

MAX_NAME_BYTES = 200
"""A file system allows 255, and endings are added."""


def _names_wrong(config: Config) -> Iterator[Contradiction]:
    for dotted, setting in known_settings().items():
        if known := setting.names:
            value = value_of(config, dotted)
            names = [value] if isinstance(value, str) else list(value)
            # A default such as "" or None is no name.
            for name in names:
                if name != setting.field.default and (text := unknown_name(name, known, dotted)):
                    yield Contradiction((dotted,), text)
            if len(set(names)) < len(names):
                text = f"{dotted}: got {names}, expected each name once."
                yield Contradiction((dotted,), text)


def _format_wrong(config: Config) -> Iterator[Contradiction]:
    form = config.format
    # Every answer would be empty, and every reward 0.
    if form.answer == "regex" and not form.answer_pattern:
        yield Contradiction(
            ("format.answer_pattern", "format.answer"),
            "format.answer_pattern: got none, which format.answer = 'regex' needs.",
        )
    # Now: it is used first when an answer comes, after the rollout.
    try:
        re.compile(form.answer_pattern or "")
    except re.error as error:
        yield Contradiction(
            ("format.answer_pattern",),
            f"format.answer_pattern: got {form.answer_pattern!r}, which is not a regular expression"
            f" ({error}).",
        )


def _model_wrong(config: Config) -> Iterator[Contradiction]:
    tiny = config.model.tiny
    if config.model.path != "tiny":
        return
    # Its vocabulary is the tasks' words and tags alone.
    if config.format.kind == "chat":
        yield Contradiction(
            ("format.kind", "model.path"),
            "format.kind: got 'chat', but the \"tiny\" model has no chat template; name a real"
            " model, or take 'tags'.",
        )
    is_pair = tiny.num_heads == 1 or tiny.num_heads % 2 == 0
    if not is_pair or tiny.hidden_size % (2 * tiny.num_heads):
        yield Contradiction(
            ("model.tiny.num_heads", "model.tiny.hidden_size"),
            f"model.tiny.num_heads: got {tiny.num_heads}, expected 1 or an even number, and twice"
            f" that a divisor of hidden_size = {tiny.hidden_size}: heads share the width, and"
            " rotary positions need an even width each.",
        )


def _tasks_wrong(config: Config) -> Iterator[Contradiction]:
    # Refused before any work; at the first scoring a tree would be lost.
    weights = config.reward.weights
    if weights is not None and len(weights) != len(config.reward.funcs):
        yield Contradiction(
            ("reward.weights", "reward.funcs"),
            f"reward.weights: got {len(weights)} ({weights}), expected one for each of"
            f" reward.funcs, which has {len(config.reward.funcs)} ({config.reward.funcs}).",
        )


def _run_wrong(config: Config) -> Iterator[Contradiction]:
    name = config.run.name
    is_folder = name is None or (
        name not in ("", ".", "..")
        and not set(name) & set("/\\")
        and name.isprintable()
        and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
    )
    if not is_folder:
        yield Contradiction(
            ("run.name",),
            f"run.name: got {shown(name)}, expected the name of one folder, at most"
            f" {MAX_NAME_BYTES} bytes of printable characters; run.dir says where it is made.",
        )
    yield from _explore_wrong(config)
    fit = ", so that the leaves of one tree fit in the engine together"
    yield from _above(config, "explore.num_leaves", "engine.max_rows", fit)
    whole = ": a mini-batch holds whole trees"
    yield from _above(config, "learn.num_minibatches", "run.tasks_per_update", whole)
    evaluates = config.eval.every or config.eval.at_start or config.eval.at_end
    if evaluates and not config.eval.greedy and not config.eval.num_samples:
        yield Contradiction(
            ("eval.greedy", "eval.num_samples"),
            "eval: neither greedy nor samples are measured; set eval.greedy = true or"
            " eval.num_samples to at least 1.",
        )


def _above(config: Config, name: str, other: str, why: str = "") -> Iterator[Contradiction]:
    # Settings of extensions are compared so too.
    value = value_of(config, name)
    limit = value_of(config, other)
    if value > limit:
        text = f"{name}: got {value}, expected at most {other}, which is {limit}{why}."
        yield Contradiction((name, other), text)


def _explore_wrong(config: Config) -> Iterator[Contradiction]:
    explore = config.explore
    rest = ": starts are leaves, and branches take the others"
    kinds = chosen_kinds(config)
    leading = [name for name, kind in kinds.items() if kind.leads]
    for kind in kinds.values():
        if kind.leaves:
            yield from _above(config, kind.leaves, "explore.num_leaves", rest)
    if len(leading) > 1 or (leading and explore.explorers[0] != leading[0]):
        named = " and ".join(f'"{name}"' for name in leading)
        yield Contradiction(
            ("explore.explorers",),
            f"explore.explorers: got {explore.explorers}, but the first one alone decides how many"
            f" rollouts start and what becomes of the leaves that are left; expected one of {named}"
            " alone, in the first place.",
        )
    if "graft" in explore.explorers:
        yield from _above(config, "explore.graft.num_hybrid", "explore.num_leaves")
    if retrieving(explore.explorers) or takes_warmup_of_buffer(config) or config.loss.lesson_coef:
        yield from _buffer_wrong(config)


def _buffer_wrong(config: Config) -> Iterator[Contradiction]:
    settings = config.buffer
    if not settings.path:
        named = next(iter(retrieving(config.explore.explorers)), None)
        other = "explore.explorers"
        use = f'has "{named}", which retrieves from a'
        if named is None:
            by_lessons = config.loss.lesson_coef > 0
            other = "loss.lesson_coef" if by_lessons else "warmup.traces"
            use = "takes lessons from a" if by_lessons else 'is "buffer", which means this'
        yield Contradiction(
            ("buffer.path", other),
            f"buffer.path: got none, but {other} {use} Step-Trace Buffer. Make one with"
            ' `treegraft buffer build RECIPE` and name its file, or take "expert" where the tasks'
            " have a scripted expert.",
        )


def _replay_wrong(config: Config) -> Iterator[Contradiction]:
    if config.replay.fresh_frac == 1:
        return
    # A resumed run has nothing but its folder.
    if not config.track.record_trees:
        yield Contradiction(
            ("replay.fresh_frac", "track.record_trees"),
            "replay.fresh_frac: groups are replayed from the run's trees, which are not written"
            " with track.record_trees = false; set that to true, or replay.fresh_frac to 1.",
        )
    if config.track.keep_trees is not None:
        yield Contradiction(
            ("track.keep_trees", "replay.fresh_frac"),
            f"track.keep_trees: got {config.track.keep_trees}, but groups of any earlier update may"
            " be replayed from the run's trees; leave it out, or set replay.fresh_frac to 1.",
        )
    if config.loss.old_logprobs == "learner" and config.loss.engine_ratio_cap is None:
        yield Contradiction(
            ("replay.fresh_frac", "loss.engine_ratio_cap"),
            "replay.fresh_frac: replayed groups were sampled by an older policy, which needs the"
            " ratio to it; set loss.engine_ratio_cap (1e9 for RolloutReplay's loss, which has no"
            ' cap), or loss.old_logprobs = "engine".',
        )


def _secrets_wrong(config: Config) -> Iterator[Contradiction]:
    # All of them: extensions have addresses that the core does not know.
    for name, value in flatten(config.model_dump(mode="json")).items():
        if public(value) != value:
            yield Contradiction(
                (name,),
                f"{name}: an address in it holds a password or a key, which would be written into"
                " the run folder, checkpoints and trackers. Put the secret into an environment"
                " variable and write its name, such as https://user:${PASSWORD}@host/ or"
                " https://host/?key=${KEY}.",
            )


def contradictions(config: Config) -> list[Contradiction]:
    """Returns the settings that do not fit each other, with a sentence for each case."""
    checks = (
        _format_wrong,
        _names_wrong,
        _model_wrong,
        _tasks_wrong,
        _run_wrong,
        _secrets_wrong,
        _replay_wrong,
    )
    found: list[Contradiction] = []
    for check in checks:
        found += check(config)
    for entry in extensions().entries:
        for other in entry.brings.get("checks", ()):
            found += other(config)
    return found


# --- what settings and the parts made from them contradict ----------------------------------------


def check(
    config: Config, explorer: Explorer, tools: Sequence[Tool], environment: EnvironmentKind | None
) -> list[Contradiction]:
    """Returns the settings that the parts of a run contradict, with a sentence for each case.

    Args:
        tools: all of the agent's, those of its environment among them.
        environment: None where the tasks have none.
    """
    return [
        *_rewards_contradicted(config, environment),
        *_branches_contradicted(config, explorer, tools, environment),
        *_grafts_contradicted(config, environment),
        *_agent_contradicted(config, explorer, tools),
    ]


def check_context(config: Config, limit: int) -> list[Contradiction]:
    """Returns a contradiction where no prompt fits in with a completion; `limit` is the most tokens
    that the model reads in all."""
    name, wanted = longest_completion(config)
    text = (
        f"{name} is {wanted}, but model '{config.model.path}' reads {limit} tokens in all; lower it"
        " so that prompts fit too."
    )
    # Equal is too much: a prompt has at least one token.
    return [Contradiction((name, "model.path"), text)] if wanted >= limit else []


def refuse(found: Sequence[Contradiction]) -> None:
    """Raises SettingError with all contradictions, where there is any."""
    names: list[str] = []
    for one in found:
        names += one.settings
    if found:
        raise SettingError(
            "\n".join(one.text for one in found), settings=names, code="settings-contradict"
        )


def longest_completion(config: Config) -> tuple[str, int]:
    """Returns the setting with the longest completion, in training or evaluation, and its length
    in tokens."""
    training = config.rollout.max_completion_tokens
    evaluation = config.eval.max_completion_tokens or 0
    if evaluation > training:
        return "eval.max_completion_tokens", evaluation
    return "rollout.max_completion_tokens", training


def branches(explorer: Explorer) -> bool:
    """Returns whether trees branch while they grow or after their leaves have ended."""
    return explorer.probe_tokens is not None or explorer.expands


def _rewards_contradicted(
    config: Config, environment: EnvironmentKind | None
) -> Iterator[Contradiction]:
    # An agent that owns its loop may end with a reward.
    if config.agent.run:
        return
    if "environment" in config.reward.funcs and (environment is None or not environment.has_reward):
        fault = "environment.kind is empty"
        if environment is not None:
            fault = f"'{environment.name}' has no method get_reward"
        yield Contradiction(
            ("reward.funcs", "environment.kind"),
            f"reward.funcs: got 'environment', but {fault}; expected an environment with a reward.",
        )


def _branches_contradicted(
    config: Config, explorer: Explorer, tools: Sequence[Tool], environment: EnvironmentKind | None
) -> Iterator[Contradiction]:
    """Branches over a state that cannot be had again."""
    # Separate rollouts share no state.
    if not branches(explorer):
        return
    actions = {tool.name for tool in environment.tools} if environment else ()
    own = [tool.name for tool in tools if tool.name in actions]
    if environment is not None and own and environment.capability is Capability.NONE:
        yield Contradiction(
            ("explore.explorers", "environment.capability"),
            f"explore.explorers: trees would branch over the environment of the tools {own}, whose"
            " capability is 'none'; expected 'fork' or 'replay'. Declare one of them in the class"
            " or as environment.capability, or use explorers that do not branch.",
        )
    # A tool has one state for all trajectories, so there is nothing that a branch could copy.
    stateful: list[str] = []
    for tool in tools:
        if tool.name not in own and tool.capability is not Capability.STATELESS:
            stateful.append(tool.name)
    if stateful:
        yield Contradiction(
            ("explore.explorers", "tools.use"),
            f"explore.explorers: trees would branch over the tools {stateful}, whose state two"
            " branches cannot share; expected stateless tools, or an environment that can fork or"
            " replay, which each trajectory has one of. Use explorers that do not branch, make the"
            " tool stateless, or make it a method of an [environment]."
            " Tools of an MCP server that keep nothing between calls are declared by"
            ' capability = "stateless" in its entry of tools.mcp.',
        )


def _grafts_contradicted(
    config: Config, environment: EnvironmentKind | None
) -> Iterator[Contradiction]:
    """Grafts over a state on which their calls cannot be tried."""
    # A grafted call may be true in the other agent's world alone.
    names = retrieving(config.explore.explorers)
    if names and environment is not None and environment.capability is Capability.NONE:
        name = names[0]
        yield Contradiction(
            ("explore.explorers", "environment.capability"),
            f"explore.explorers: got '{name}' with an environment whose capability is 'none';"
            " expected 'fork' or 'replay', since the calls of stored steps are made in it first."
            f" Declare one of them, or leave '{name}' out.",
        )


def _agent_contradicted(
    config: Config, explorer: Explorer, tools: Sequence[Tool]
) -> Iterator[Contradiction]:
    """Parts of our own loop with an agent that has a loop of its own."""
    if not config.agent.run:
        return
    if config.format.kind not in ("chat", "renderer"):
        yield Contradiction(
            ("agent.run", "format.kind"),
            f"format.kind: got '{config.format.kind}' with an [agent], expected 'chat' or"
            " 'renderer': its messages are written by the model's chat template.",
        )
    if tools:
        names = [tool.name for tool in tools]
        yield Contradiction(
            ("agent.run", "tools.use", "environment.kind", "tasks.kind"),
            f"agent.run: the agent brings and runs its own tools, but the recipe has {names} from"
            " tools.use, its environment or its tasks; expected none. Leave them out, or take"
            " tasks without tools.",
        )
    restarts = isinstance(explorer, Restarting)
    if explorer.retries or restarts or retrieving(config.explore.explorers):
        yield Contradiction(
            ("agent.run", "explore.explorers"),
            f"explore.explorers: got {config.explore.explorers}, but the history of an agent that"
            " owns its loop is its own: its rollouts branch, and cannot retry a step, restart or"
            ' be grafted; expected explorers that only branch, such as ["entropy"].',
        )
    if config.warmup.num_steps and config.warmup.traces == "expert":
        yield Contradiction(
            ("agent.run", "warmup.traces"),
            "warmup.traces: got 'expert', whose demonstrations are for Treegraft's own loop, not"
            " for the prompts of an [agent]; set warmup.num_steps = 0.",
        )
