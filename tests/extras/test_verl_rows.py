"""Arguments, rows, the engine over a token server, and data of trees inside verl, without verl."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.tiny import tiny
from typer.testing import CliRunner

from treegraft import SettingError, load_config
from treegraft import train as train_run
from treegraft.cli.main import app
from treegraft.extras.verl import SUPPORTED, check_version
from treegraft.extras.verl.arguments import arguments, check_recipe, derived
from treegraft.extras.verl.engine import SUMMED, ServerEngine
from treegraft.extras.verl.rows import Facts, factors, minibatches
from treegraft.parts import Sampling, errors, interfaces, served, setting_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verl.md"
OWN: dict[str, Any] = {
    "warmup": {"num_steps": 0},
    "loss": {"graft_coef": 0.0},
    "explore": {"explorers": ["graft"]},
    "buffer": {"path": "expert", "encoder": "hashing"},
    "run": {"num_updates": 2, "tasks_per_update": 4},
}


def recipe(*overrides: str) -> Any:
    return load_config(tiny(**OWN | {"model": {"path": "some/model"}}), overrides)


# ---------------------------------------------------------------------- arguments

REFUSED = {
    "loss.objective=gspo": "loss.objective",
    "loss.graft_coef=1.0": "loss.graft_coef",
    "loss.lesson_coef=0.5": "loss.lesson_coef",
    "loss.engine_ratio_cap=2.0": "loss.engine_ratio_cap",
    "loss.future_weight=0.5": "loss.future_weight",
    "rollout.max_rounds=2": "rollout.max_rounds",
    "sampler.kind=difficulty": "sampler.kind",
    "warmup.num_steps=5": "warmup.num_steps",
    "engine.kind=vllm": "engine.kind",
    "model.path=tiny": "model.path",
    "model.lora.rank=4": "model.lora.rank",
    "learn.num_minibatches=3": "learn.num_minibatches",
    "learn.schedule=linear": "learn.schedule",
    "credit.advantage=reinforce++": "credit.advantage",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused_in_a_recipe(override: str) -> None:
    name = re.escape(REFUSED[override])
    with pytest.raises(SettingError, match=rf"^{name}: got .* expected .*inside verl"):
        check_recipe(recipe(override))


def test_kl_beside_unequal_weights_is_refused() -> None:
    with pytest.raises(SettingError, match=r"loss\.kl_coef: got 0\.1, expected 0 inside verl"):
        check_recipe(recipe("loss.kl_coef=0.1", "loss.learn_from_truncated=false"))


def test_derived_arguments() -> None:
    found = derived(recipe("loss.aggregation=sequence-sum", "loss.length_constant=9"))
    got = {name.rpartition(".")[2]: one.value for name, one in found.items()}
    # 4 tasks in the tiny recipe's minibatches.
    assert got["train_batch_size"] == 4
    assert got["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert got["loss_scale_factor"] == 9
    assert got["clip_ratio_c"] == 1e9
    assert "kl_loss_coef" not in got


def test_each_argument_is_one_word_of_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text(recipe().model_dump_json(), encoding="utf-8")
    lines = arguments(path, ("loss.clip_low=0.1",))
    assert f"+treegraft.recipe={path}" in lines
    assert '+treegraft.changes=["loss.clip_low=0.1"]' in lines
    assert "actor_rollout_ref.actor.clip_ratio_low=0.1" in lines
    assert all(len(line.split()) == 1 for line in lines)


def test_other_versions_of_verl_are_refused() -> None:
    check_version(SUPPORTED)
    for version in ("0.9.0", "0.9.2", "0.10.0"):
        with pytest.raises(SettingError, match=rf"verl {version} is installed, expected 0\.9\.1"):
            check_version(version)


def test_the_page_names_every_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tables = {row.name.partition(".")[0] for row in setting_rows(load_config({}))}
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in sorted(tables) if not re.search(rf"`{name}[.`]", rows)] == []


@pytest.mark.parametrize("name", ["arpo", "rapo"])
def test_recipes_of_the_examples_fit_verl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEGRAFT_DATA", "/data")
    monkeypatch.setenv("TREEGRAFT_CORPUS", "/data/corpus.jsonl")
    lines = arguments(ROOT / "examples" / "verl" / f"{name}.toml", ())
    # ARPO's released script: 128 prompts, minibatches of 16; RAPO: 32, of 16.
    assert f"data.train_batch_size={128 if name == 'arpo' else 32}" in lines
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=16" in lines
    assert "actor_rollout_ref.rollout.n=16" in lines


# ---------------------------------------------------------------------- rows


def facts(weight: float, length: int, loss: int, group: str) -> Facts:
    return Facts(shaping=1.0, weight=weight, num_denominator=length, num_loss=loss, group=group)


ROWS = [
    # One of two leaves of group a has failed; group b is whole, and c has failed: padding.
    facts(1.0, 4, 4, "a"),
    facts(0.5, 2, 2, "b"),
    facts(0.5, 6, 0, "b"),
    None,
    None,
    None,
]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # w Σ loss tokens / Σ w |y|: 6 loss tokens, 1*4 + .5*2 + .5*6 = 8.
        ("token-mean", [0.75, 0.375, 0.375]),
        # w rows / groups, times loss tokens / |y|: 6 rows, 2 groups.
        ("sequence-mean", [3.0, 1.5, 0.0]),
        ("sequence-sum", [3.0, 1.5, 1.5]),
    ],
)
def test_factors_by_hand(aggregation: str, expected: list[float]) -> None:
    config = recipe(f"loss.aggregation={aggregation}")
    assert factors(ROWS, config, num_rows=6) == pytest.approx([*expected, 0.0, 0.0, 0.0])


def test_minibatches_hold_whole_trees() -> None:
    keys = ["a_0_0", "b_0_0", "c_0_0", "b_1_0", "c_1_0", "p_0_0", "p_1_0", "p_2_0"]
    tags = [{"is_padding": key.startswith("p")} for key in keys]
    # Of 4 rows: trees a and b (3 rows, one of padding), then c and what is left.
    assert list(minibatches(keys, tags, 4, 2)) == [[0, 1, 3, 5], [2, 4, 6, 7]]


# ---------------------------------------------------------------------- the engine


class Server:
    """Replies from a list, each (token ids, log-probabilities, extra fields)."""

    def __init__(self, *replies: tuple[list[int], list[float] | None, dict[str, Any]]) -> None:
        self.replies = list(replies)
        self.asked = []

    async def generate(self, request_id: str, **given: Any) -> Any:
        self.asked.append((request_id, given))
        ids, logprobs, extra = self.replies.pop(0)
        return SimpleNamespace(token_ids=ids, log_probs=logprobs, extra_fields=extra)


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 0

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + one) if one else "" for one in ids)

    def __len__(self) -> int:
        return 27


def completed(server: Server, **more: Any) -> Any:
    engine = ServerEngine(
        server,
        Letters(),
        {0},
        load_config({}).engine,
        max_context=more.pop("max_context", None),
    )
    sampling = Sampling(max_new_tokens=8, stop=("c",), final=("z",))
    request = interfaces.Request([1, 2], sampling, (0, "train", 1, "task", "0.1"), **more)
    return asyncio.run(engine.complete(request))


def reply(ids: list[int], version: int = 3) -> tuple[list[int], list[float], dict[str, Any]]:
    entropies = [0.5 + one for one in ids]
    return ids, [-0.1 * one for one in ids], {"global_steps": version, "entropies": entropies}


def test_a_completion_ends_at_the_probe_and_goes_on() -> None:
    probed: list[Any] = []
    server = Server(reply([1, 2]), reply([2, 3, 9]))
    done = completed(server, probe_tokens=2, on_probe=probed.append)
    # What the server wrote behind the stop text "c" is left out.
    assert done.token_ids == (1, 2, 2, 3)
    assert done.sampling_logprobs == pytest.approx((-0.1, -0.2, -0.2, -0.3))
    assert probed == [(1.5, 2.5)]
    assert (done.entropy_kind, done.policy_version, done.finish) == ("top_k", 3, "stop")
    (first, one), (second, two) = server.asked
    # One tree, one server.
    assert first == second == "0/train/1/task"
    assert [given["sampling_params"]["max_tokens"] for given in (one, two)] == [2, 6]
    assert two["prompt_ids"] == [1, 2, 1, 2]
    assert one["sampling_params"]["stop"] == ["c", "z"]
    assert one["sampling_params"]["top_k"] == -1


def test_one_token_of_grace_after_a_final_text() -> None:
    server = Server(reply([5, 26]), reply([0]))
    done = completed(server)
    assert (done.token_ids, done.finish) == ((5, 26, 0), "end")
    parameters = server.asked[1][1]["sampling_params"]
    assert (parameters["max_tokens"], parameters["stop"]) == (1, [])


FAULTS = {
    "no log-probability": [([1], None, {})],
    "gave no entropies": [([1], [-1.0], {})],
    "without a token": [([], [], {"entropies": []})],
    "expected those of one": [reply([1], 3), reply([3], 4)],
}


@pytest.mark.parametrize("text", FAULTS)
def test_replies_that_cannot_be_used(text: str) -> None:
    with pytest.raises(errors.EngineError, match=text):
        completed(Server(*FAULTS[text]))


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(errors.EngineError, match="the path has 2 tokens, the model reads at most"):
        completed(Server(), max_context=2)


def test_entropies_are_sums_over_the_most_likely() -> None:
    logprobs = [math.log(0.5), math.log(0.25)]
    assert served.top_k_entropy(logprobs) == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(4))
    # The token that was drawn, an unlikely one, is the twentieth.
    many = [math.log(0.05)] * SUMMED
    assert served.top_k_entropy([*many, math.log(1e-9)]) == pytest.approx(
        served.top_k_entropy(many)
    )


# ---------------------------------------------------------------------- data


def test_data_and_arguments_by_command(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = tiny(
        run={"num_updates": 0, "dir": str(tmp_path), "name": "base"},
        eval={"every": 0, "at_start": False, "at_end": False},
    )
    base = train_run(tables, display=False).checkpoint_dir
    own = load_config(tiny(**OWN | {"model": {"path": str(base)}}))
    path = tmp_path / "agent.json"
    path.write_text(own.model_dump_json(), encoding="utf-8")
    train = tmp_path / "out" / "train.parquet"
    held_out = tmp_path / "out" / "valid.parquet"
    runner = CliRunner()
    given = ["verl-data", str(path), "--out", str(train), "--held-out", str(held_out)]
    done = runner.invoke(app, given)
    assert done.exit_code == 0, done.output
    rows = parquet.read_table(train).to_pylist()
    assert f"{len(rows)} tasks: {train}" in done.output.replace("\n", "")
    assert {"data_source", "prompt", "ability", "reward_model", "extra_info"} == set(rows[0])
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert len({row["extra_info"]["treegraft"] for row in rows}) == len(rows)
    assert rows[0]["prompt"][0]["role"] == "user"
    assert parquet.read_table(held_out).num_rows > 0
    printed = runner.invoke(app, ["verl-args", str(path), "loss.clip_low=0.1"])
    assert printed.exit_code == 0
    lines = arguments(path, ("loss.clip_low=0.1",))
    assert printed.output.split() == "\n".join(lines).split()
