"""`treegraft push`: a checkpoint with its model card, uploaded to a hub; nothing private goes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from treegraft import Config, SettingError
from treegraft.parts import RunReader, Trained, commands, errors, plain, setting_rows

CARD = "README.md"
SHOWN = (
    "run",
    "model",
    "tasks",
    "format",
    "reward",
    "explore",
    "buffer",
    "rollout",
    "eval",
    "credit",
    "loss",
    "learn",
    "warmup",
)
"""Tables of settings that a card holds; those of tools and environments may name private
services."""
LABELS = ("run.name", "run.dir", "run.num_threads")


def push(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Checkpoint folder, or run folder for its latest checkpoint.",
        ),
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="NAME or OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="License of the weights, such as apache-2.0."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the card and list the files; no network.")
    ] = False,
) -> None:
    """Upload a checkpoint and its model card to a hub.

    The optimiser's state, the run's settings as a file and its trees stay here.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise SettingError(
            f"command line: '{repo_id}' is not a repository's name; expected NAME or OWNER/NAME of"
            " letters, digits, '-', '_' and '.'",
            code="repository-name-invalid",
        ) from error
    found = Trained.of(run)
    api = HfApi(token=get_token(), library_name="treegraft")
    if api.token is None and not dry_run:
        raise SettingError(
            f"there is no token for {api.endpoint}; set HF_TOKEN, or log in with `hf auth login`,"
            " with a token that may write",
            code="token-missing",
        )
    text = model_card(found, repo_id, licence=licence)
    uploaded = {CARD: text.encode(), **files_of(found.checkpoint)}
    if dry_run:
        print(text)
    for name, content in uploaded.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        commands.say(f"  {size:>13,}  {plain(name)}")
    if dry_run:
        commands.say(f"nothing was uploaded; {len(uploaded)} files would go to {repo_id}")
        return
    message = f"Checkpoint of update {found.state.update}"
    place = _upload(api, repo_id, uploaded, message, private=private)
    commands.say(f"uploaded to {place}")


def _upload(
    api: Any,
    repo_id: str,
    uploaded: Mapping[str, bytes | Path],
    message: str,
    *,
    private: bool,
) -> str:
    """Returns the address of the repository.

    Raises:
        HubError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd

    # Files are added one by one, since `upload_folder` cannot change what is in them.
    additions = [CommitOperationAdd(name, content) for name, content in uploaded.items()]
    try:
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        api.create_commit(made.repo_id, additions, commit_message=message)
    # Which HTTP library it is built on, and so what a lost network raises, differs by version; a
    # large file that fails is a RuntimeError without the reason.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        said = plain(" ".join(str(cause).split()), 400)
        raise errors.HubError(
            f"'{repo_id}' could not be uploaded to {api.endpoint} ({type(cause).__name__}: {said});"
            " check the token (`hf auth login`), that it may write there, the network,"
            " HF_ENDPOINT and HF_HUB_OFFLINE, and run the same command again",
            code="hub-failed",
        ) from error
    return str(made)


# --- what is uploaded -----------------------------------------------------------------------------


def files_of(checkpoint: Path) -> dict[str, bytes | Path]:
    """Returns the files to upload of a checkpoint, by their names in the repository: contents if an
    absolute path was removed from them, else the file."""
    found: dict[str, bytes | Path] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        is_ours = name.parts[0] == "treegraft" or any(part.startswith(".") for part in name.parts)
        if path.is_file() and not path.is_symlink() and not is_ours and str(name) != CARD:
            found[name.as_posix()] = _without_paths(path)
    return found


def _without_paths(path: Path) -> bytes | Path:
    # transformers and peft note where a model came from.
    if not path.name.endswith("config.json"):
        return path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise errors.CheckpointError(
            f"'{path}' is not JSON ({error}); the checkpoint is damaged", code="checkpoint-no-json"
        ) from error
    noted = {k: v for k, v in data.items() if k.endswith("name_or_path") and isinstance(v, str)}
    changed = {key: public(value) for key, value in noted.items()}
    return path if noted == changed else json.dumps({**data, **changed}, indent=2).encode()


def public(value: Any) -> Any:
    """Returns a setting's value without absolute paths, and addresses without what may be secret in
    them."""
    if isinstance(value, Mapping):
        return {str(key): public(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public(one) for one in value]
    if not isinstance(value, str):
        return value
    if re.match(r"[a-z][a-z0-9+.-]*://", value, re.I):
        return re.sub(r"://([^/]*@)?", "://", value).partition("?")[0]
    if re.match(r"[/~\\]|[A-Za-z]:[/\\]|\.\.?[/\\]", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


# --- the card -------------------------------------------------------------------------------------


def model_card(of: Trained, name: str, *, licence: str | None = None) -> str:
    """Returns the card in Markdown.

    Args:
        name: its title, such as the repository's name.
        licence: the hub's id of a licence; None leaves it open.
    """
    from huggingface_hub import ModelCardData

    base = base_model(of.config)
    head = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["treegraft", "reinforcement-learning", "tool-use"],
        license=licence,
        base_model=base,
        datasets=hub_datasets(of.config) or None,
    )
    settings = "\n".join(_settings(of.config))
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {plain(name)}",
        "A language-model agent that uses tools, trained with Treegraft.",
        "## Training",
        f"Method: {of.method}. Started from: {plain(base or str(public(of.config.model.path)))}."
        f" Update {of.state.update} of {of.config.run.num_updates}, after {of.state.warmup_steps}"
        " steps of supervised fine-tuning.",
        "## Held-out results",
        "\n".join(_held_out(of)),
        "## Settings that differ from the defaults",
        f"```toml\n{settings}\n```\n",
    ]
    return "\n\n".join(parts)


def base_model(config: Config) -> str | None:
    """Returns the hub id that training started from; None of folders, packages and "tiny"."""
    path = config.model.path
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).expanduser().exists()
    return path if is_hub_id and not path.startswith(".") else None


def hub_datasets(config: Config) -> list[str]:
    """Returns the hub's names of the data sets that tasks come from."""
    if config.tasks.kind != "dataset":
        return []
    sources = [*config.tasks.dataset.train, *config.tasks.dataset.eval]
    names = [source.split(":")[1] for source in sources if source.startswith("hub:")]
    return [*dict.fromkeys(names)]


def _held_out(of: Trained) -> Iterator[str]:
    """Yields the accuracies of this checkpoint alone, never those of another update."""
    update = of.state.update
    lines = [] if of.run_dir is None else RunReader(of.run_dir).clean_metrics()[0]
    line = next((line for line in lines if line["update"] == update), {})
    pattern = r"eval/(accuracy|accuracy_sampled|pass_at_.*)"
    measured = [key for key in line if re.fullmatch(pattern, key)]
    if not measured:
        yield f"No held-out evaluation of this checkpoint (update {update}) is recorded."
        return
    yield (
        f"Of this checkpoint (update {update}), on at most {of.config.tasks.num_eval} held-out"
        f" tasks: `eval/accuracy` greedy, the others sampled at temperature"
        f" {of.config.eval.temperature:g}.\n"
    )
    yield "| measure | value |\n|---|---|"
    for key in measured:
        yield f"| `{key}` | {line[key]:.1%} |"


def _settings(config: Config) -> Iterator[str]:
    for row in setting_rows(config):
        is_shown = row.name.partition(".")[0] in SHOWN and row.name not in LABELS
        if is_shown and not row.is_default:
            value = row.value
            if hasattr(value, "model_dump"):
                value = value.model_dump(mode="json")
            yield f"{row.name} = {json.dumps(public(value), ensure_ascii=False)}"
