"""An agent whose loop is a framework's learns as the same agent in our own loop does.

    python -m benchmarks.own_agent            trains the missing runs, prints the table
    python -m benchmarks.own_agent --table    prints the table of the finished runs
    python -m benchmarks.own_agent --replays  counts how many branches by replay come true

The framework is pydantic-ai (`make agents-env`). It asks the endpoint of `[agent]` and runs the
search itself; our loop has the search in `tools.use`. Both arms of a seed start from one warm-up in
our loop and see the same prompts, tasks and number of rollouts. What a finished run found goes to
`benchmarks/own_agent.jsonl`, one line a run; delete a line to run it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treegraft import Task, Tree
from treegraft.core.errors import ToolError
from treegraft.core.interfaces import Signature
from treegraft.rollout.formats.shipped import shipped_template
from treegraft.rollout.formats.turns import tool_schema
from treegraft.runs.tree_files import parts_in
from treegraft.settings.policy import TinySettings
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld, WorldSearch

RECIPE = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).with_suffix(".jsonl")
REPLAYS = Path(__file__).with_name("own_agent_replays.jsonl")
NATIVE = "our loop, the search in `tools.use`"
FRAMEWORK = "pydantic-ai, through the endpoint"
ARMS: Mapping[str, Sequence[str]] = {
    NATIVE: (),
    FRAMEWORK: ("agent.run=benchmarks.own_agent:solve", "tools.use=[]"),
}
"""Arm -> overrides of the recipe."""
BRANCHING = {
    "that of the table": "benchmarks.own_agent:solve",
    "with a random number in its prompt": "benchmarks.own_agent:solve_with_a_number",
}
"""Agents of pydantic-ai whose rollouts branch, and their functions."""
NUM_SEEDS = 3
METRICS = {"sampled": "eval/accuracy_sampled", "greedy": "eval/accuracy"}
Line = dict[str, Any]

WORLD = SearchWorldSettings(hops=[2], num_entities=32, num_relations=6)
SHAPE = TinySettings(
    hidden_size=128, num_layers=2, num_heads=4, intermediate_size=512, max_context=256
)
SYSTEM = "Search, then answer."


# The task, the tool and the agent


class Questions(SearchWorld):
    """Questions of the demo's kind; the search comes from the agent or from `tools.use`."""

    def __init__(self, *, seed: int, num_train: int, num_eval: int) -> None:
        super().__init__(WORLD, seed=seed, num_train=num_train, num_eval=num_eval)

    def tools(self) -> Sequence[Any]:
        """Returns none."""
        return ()


class Search(WorldSearch):
    """The search of our loop, described as pydantic-ai describes that of `solve`."""

    signature = Signature(
        {
            "additionalProperties": False,
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "type": "object",
        },
        text_parameter="query",
    )

    def __init__(self) -> None:
        super().__init__(WORLD, default_world=0)
        self.description = 'Looks up one fact, such as "e9 r2".'


async def solve_with_a_number(task: Task, client: Any) -> str:
    """Answers a question, with another text before it each time."""
    return await solve(task, client, f"{secrets.randbelow(1000)}. {SYSTEM}")


async def solve(task: Task, client: Any, instructions: str = SYSTEM) -> str:
    """Answers a question with an agent of pydantic-ai."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def search(query: str) -> str:
        """Looks up one fact, such as "e9 r2"."""
        try:
            return await Search()(query, task)
        except ToolError as error:
            return str(error)

    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions=instructions, tools=[search])
    result = await agent.run(task.question)
    return str(result.output)


# The model


def write_model(folder: Path, seed: int) -> None:
    """Writes half a million random weights that read bytes, and the words of the task as tokens."""
    from treegraft.policy.tiny import build_byte_tokenizer, build_tiny_model

    tokenizer = build_byte_tokenizer(258)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = shipped_template("chatml")
    tokenizer.add_tokens(words(tokenizer))
    ids = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    build_tiny_model(SHAPE, len(tokenizer), *ids, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def words(tokenizer: Any) -> list[str]:
    """Returns the words of the questions, and those of a conversation around them."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {"query": "x"}}]},
        {"role": "tool", "content": "x"},
    ]
    schema = tool_schema(Search())
    text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    # Whole lines, as the demo's tags are one token each; the query stands where "x" is.
    around = set(re.split(r"(?<=\n)|<\|\w+\|>|\bx\b", text)) - {"", "\n"}
    symbols = [f"e{number}" for number in range(WORLD.num_entities)]
    symbols += [f"r{number}" for number in range(WORLD.num_relations)]
    return [*symbols, " of ", " is ", *sorted(around)]


# Runs


def run_seed(seed: int, arms: Sequence[str], out: Path, overrides: Sequence[str]) -> list[Line]:
    """Trains a seed's arms from one warm-up and returns what they found."""
    from treegraft.settings.load import load_config
    from treegraft.train import train

    begin = warmed_up(seed, out, overrides)
    found = []
    for arm in arms:
        run = run_of(arm, seed, out)
        if run.exists():
            train(None, resume=run)
        else:
            train(load_config(RECIPE, [*begin, *ARMS[arm], f"run.name={run.name}"]))
        found.append({"arm": arm, "seed": seed} | figures(run))
    return found


def warmed_up(seed: int, out: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of a run that begins with a seed's warm-up, which is made first."""
    from treegraft.runs.checkpoint import latest_checkpoint
    from treegraft.settings.load import load_config
    from treegraft.train import sft

    logging.disable(logging.WARNING)
    common = [f"run.dir={out}", f"run.seed={seed}", *overrides]
    warm = out / f"warmup-{seed}"
    if warm.exists():
        sft(None, resume=warm)
    else:
        model = out / f"model-{seed}"
        write_model(model, seed)
        sft(load_config(RECIPE, [*common, f"run.name={warm.name}", f"model.path={model}"]))
    # The warm-up is over: settings of it would be in the way.
    common = [one for one in common if not one.startswith("warmup.")]
    checkpoint = latest_checkpoint(warm / "checkpoints")
    return [*common, f"model.path={checkpoint}", "warmup.num_steps=0"]


def run_of(arm: str, seed: int, out: Path) -> Path:
    """Returns the folder of a run."""
    return out / f"{'framework' if arm == FRAMEWORK else 'native'}-{seed}"


def figures(run: Path) -> Line:
    """Returns what a finished run has measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "reward/mean" in line]
    found: Line = {"num_updates": len(updates)}
    for name, key in METRICS.items():
        evaluated = [line[key] for line in lines if key in line]
        found |= {f"{name}_at_start": evaluated[0], f"{name}_at_end": evaluated[-1]}
    found["rollouts"] = sum(int(line["rollout/num_trajectories"]) for line in updates)
    found["cpu_s_per_update"] = statistics.median(line["time/cpu_s"] for line in updates)
    return found


def greedy_at_start(run: Path) -> dict[str, Tree]:
    """Returns the trees of a run's first evaluation, with one greedy rollout each, by task."""
    parts = [one for one in parts_in(run / "trees") if one.name == "eval-000000-greedy"]
    return {tree.task.id: tree for part in parts for tree in part.trees()}


def compared(ours: Mapping[str, Tree], theirs: Mapping[str, Tree]) -> Line:
    """Returns how many prompts and how many whole rollouts have the same tokens in both loops."""
    pairs = [(ours[task], theirs[task]) for task in ours]
    prompts = [one.root.token_ids.tolist() == other.root.token_ids.tolist() for one, other in pairs]
    rollouts = [tokens_of(one) == tokens_of(other) for one, other in pairs]
    return {
        "evaluated": len(pairs),
        "same_prompts": sum(prompts),
        "same_greedy_rollouts": sum(rollouts),
    }


def tokens_of(tree: Tree) -> list[int]:
    """Returns all tokens of a tree with one rollout."""
    return [token for step in tree.steps for token in step.token_ids.tolist()]


def results(path: Path) -> dict[tuple[str, int], Line]:
    """Returns what is known so far, by arm and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(line["arm"], line["seed"]): line for line in map(json.loads, lines)}


def run_all(seeds: int, out: Path, path: Path, overrides: Sequence[str]) -> None:
    """Trains what is missing, one seed after the other."""
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        missing = [arm for arm in ARMS if (arm, seed) not in results(path)]
        if not missing:
            continue
        found = run_seed(seed, missing, out, overrides)
        ours = greedy_at_start(run_of(NATIVE, seed, out))
        theirs = greedy_at_start(run_of(FRAMEWORK, seed, out))
        with path.open("a", encoding="utf-8") as file:
            for line in found:
                file.write(json.dumps(line | compared(ours, theirs)) + "\n")


# Branches


def run_replays(out: Path, path: Path, overrides: Sequence[str]) -> None:
    """Trains five updates of each agent whose rollouts branch (ARPO), and writes what came of the
    replays."""
    from treegraft import train
    from treegraft.settings.load import load_config

    begin = warmed_up(0, out, overrides)
    with path.open("w", encoding="utf-8") as file:
        for name, function in BRANCHING.items():
            own = [f"agent.run={function}", "tools.use=[]", 'explore.explorers=["entropy"]']
            own += ["run.num_updates=5", "eval.at_start=false", "eval.at_end=false"]
            run = train(load_config(RECIPE, [*begin, *own]))
            counts = ("num_replays", "num_diverged", "num_replayed_calls")
            line: Line = {"agent": name}
            for count in counts:
                line[count] = sum(int(update[f"agent/{count}"]) for update in run.history[1:])
            trees = [tree for update in range(1, 6) for tree in run.trees(update)]
            sampled = [step for tree in trees for step in tree.steps if step.num_sampled]
            file.write(json.dumps(line | {"num_sampled_calls": len(sampled)}) + "\n")


def replay_table(path: Path = REPLAYS) -> Iterator[str]:
    """Yields the table of the replays in Markdown."""
    yield "| agent | branches by replay | true | completions sampled | saved |"
    yield "|---|---:|---:|---:|---:|"
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        num = line["num_replays"]
        true = 1 - line["num_diverged"] / num
        saved = line["num_replayed_calls"]
        of_all = saved / (saved + line["num_sampled_calls"])
        sampled = f"{line['num_sampled_calls']:,}"
        yield f"| {line['agent']} | {num} | {true:.0%} | {sampled} | {saved} ({of_all:.0%}) |"


def table(path: Path = RESULTS) -> Iterator[str]:
    """Yields the table in Markdown, over the finished runs."""
    known = results(path)
    yield "| loop | before, sampled | after, sampled | after, greedy | CPU s an update |"
    yield "|---|---|---|---|---|"
    for arm in ARMS:
        runs = [line for (name, _), line in sorted(known.items()) if name == arm]
        if runs:
            columns = ("sampled_at_start", "sampled_at_end", "greedy_at_end")
            shares = [_ranged([line[column] for line in runs], ".3f") for column in columns]
            seconds = _ranged([line["cpu_s_per_update"] for line in runs], ".1f")
            yield f"| {arm} | {' | '.join([*shares, seconds])} |"


def _ranged(values: Sequence[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return f"{mean} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as run.num_updates=1")
    parser.add_argument("--out", type=Path, default=Path("runs") / "own-agent")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--replays", action="store_true", help="branch, and count the replays")
    options = parser.parse_args()
    if options.replays:
        run_replays(options.out.resolve(), REPLAYS, options.overrides)
        print("\n".join(replay_table()))
        return
    if not options.table:
        run_all(options.seeds, options.out.resolve(), options.results, options.overrides)
    print("\n".join(table(options.results)))


if __name__ == "__main__":
    main()
