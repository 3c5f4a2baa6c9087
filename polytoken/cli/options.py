"""Flags that several verbs share, and what they become. The only reader of the environment: POLYTOKEN_STORE."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from polytoken.cli.output import drop_unset
from polytoken.cli.streams import standard_input
from polytoken.errors import RequestError, UsageError
from polytoken.request import RequestDefaults, SamplingParams, parse_sampling, parse_stop

if TYPE_CHECKING:
    from polytoken.checkpoint import CheckpointStore
    from polytoken.engine import Engine

TRUE_WORDS: Final = ("1", "true", "yes", "on")
FALSE_WORDS: Final = ("0", "false", "no", "off")

_ENGINE: Final = "Engine"
_SAMPLING: Final = "Sampling"


def parse_switch(text: str) -> bool:
    """A yes or no in words, in any case."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    words = f"{', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)}"
    raise UsageError(f"--think: {text!r} is none of {words}", field="--think")


# -- which model, on what ----------------------------------------------------------------------------------------------

MANIFEST: Final = "export_manifest.json"
HERE: Final = ""  # the default of Model: the folder one is in, if it holds an export


def _choose_model(context: typer.Context, model: str) -> str:
    """The model named on the command line, or the export in the current folder."""
    if model != HERE:
        return model
    if not Path(MANIFEST).is_file():
        raise UsageError(f"--model is required; see `{context.command_path} --help`", field="--model")
    return str(Path.cwd())


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--checkpoint",
        help=f"Folder, hub id, GGUF file or catalogue name (default: the current folder, if it holds {MANIFEST}).",
        callback=_choose_model,
        show_default=False,
    ),
]
Lane = Annotated[
    str,
    typer.Option(
        help="How tokens get committed: ar (one per forward), mtp (drafts, verified), canvas (block diffusion), auto: "
        "canvas for a block-diffusion checkpoint, mtp with a usable draft head or another --drafter, else ar.",
        rich_help_panel=_ENGINE,
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, stored, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)]
Dequantise = Annotated[
    bool | None,
    typer.Option(
        "--dequantise/--no-dequantise",
        help="Unpack quantised weights at load (default: on the CPU, when memory allows).",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
Products = Annotated[
    str,
    typer.Option(help="exact, stock or a BLAS by path: fp32 products on the Linux CPU.", rich_help_panel=_ENGINE),
]
Threads = Annotated[int, typer.Option(min=1, help="Most threads of one CPU product.", rich_help_panel=_ENGINE)]
Device = Annotated[str, typer.Option(help="auto, cpu or gpu.", rich_help_panel=_ENGINE)]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False, rich_help_panel=_ENGINE)
]
Offline = Annotated[bool, typer.Option("--offline", help="Never use the network.", rich_help_panel=_ENGINE)]
Store = Annotated[
    Path | None,
    typer.Option(
        help="Folder of pulled models (default: in the user's cache folder).",
        envvar="POLYTOKEN_STORE",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests served at once.", rich_help_panel=_ENGINE)]
PrefillChunkSize = Annotated[
    int, typer.Option(min=1, help="Prompt tokens per prefill forward.", rich_help_panel=_ENGINE)
]
PrefixCacheMib = Annotated[
    int, typer.Option(min=0, help="MiB for reusable prompt states; 0 turns reuse off.", rich_help_panel=_ENGINE)
]
SessionCacheMib = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="MiB of them that one session may hold (default: all).",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
PrefixReuse = Annotated[
    str,
    typer.Option(
        metavar="exact|close",
        help="Go on from a stored state only where that changes no bit, or wherever one ends.",
        rich_help_panel=_ENGINE,
    ),
]
SessionDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep prompt states and sessions in this folder, too: they outlive the process (default: none).",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
SessionDiskMib = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="MiB that all files in --session-dir may take (default: 4096).",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
MaxQueueSize = Annotated[int, typer.Option(min=1, help="Requests that may wait.", rich_help_panel=_ENGINE)]

# -- how tokens are drawn ----------------------------------------------------------------------------------------------

# None means: what the checkpoint recommends, which is greedy unless it says otherwise.
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; above it, tokens are drawn.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Keep tokens with at least this share of the best one's probability.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Over prompt and answer; 1 is none.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Once for every token in the answer, -2 to 2.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="For every time a token is in the answer, -2 to 2.", rich_help_panel=_SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=VALUE", help="Add to a token's logit; -100 bans it.", rich_help_panel=_SAMPLING),
]
Logprobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Log-probabilities with N alternatives (JSON only).", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int, typer.Option(help="Of the draws; any integer.", rich_help_panel=_SAMPLING)]

# -- what a request is -------------------------------------------------------------------------------------------------

Think = Annotated[
    str,
    typer.Option(
        metavar="true|false",
        callback=lambda text: str(parse_switch(text)).lower(),
        help="Whether the chat template is asked for a block of reasoning.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Cap on new tokens (default: up to 8192, as far as the context has room).", show_default=False
    ),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the text before this string. Repeatable.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Progress and statistics on stderr, terminal or not.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def sampling_members(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Sequence[str] | None = None,
    logprobs: int | None = None,
) -> dict[str, Any]:
    """The sampling flags that were given, checked, as members of a request's `sampling` object."""
    given = drop_unset(
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logprobs": logprobs,
            "logit_bias": _bias_pairs(logit_bias) if logit_bias else None,
        }
    )
    with flag_errors():
        parse_sampling(given, SamplingParams())
    return given


def request_defaults(
    members: Mapping[str, Any],
    *,
    recommended: SamplingParams,
    max_new_tokens: int | None,
    seed: int,
    think: bool,
    stop: Sequence[str] | None,
    ignore_eos: bool,
) -> RequestDefaults:
    """What the flags say about every request that does not say otherwise itself."""
    with flag_errors():
        return RequestDefaults(
            max_new_tokens=RequestDefaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
            limit_is_default=max_new_tokens is None,
            seed=seed,
            think=think,
            sampling=parse_sampling(members, recommended),
            stop=parse_stop(list(stop) if stop else None, ()),
            ignore_eos=ignore_eos,
        )


class flag_errors:  # noqa: N801  (a context, used like a word)
    """Turns an error about a request's field into one about the flag that set it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError):
            field = (error.field or "").removeprefix("sampling.")
            flag = "--" + field.split("[")[0].replace("_", "-")
            raise UsageError(f"{flag}: {error}" if field else str(error), field=flag) from None


def require_backend() -> None:
    """Say in one line what to install, before anything is imported that needs MLX."""
    from polytoken.backend import require_mlx  # noqa: PLC0415

    require_mlx()


def open_store(store: Path | None) -> CheckpointStore:
    """The folder of pulled models: as told, else the user's cache folder."""
    from polytoken.checkpoint.store import CheckpointStore, default_cache_root  # noqa: PLC0415

    return CheckpointStore(default_cache_root() if store is None else store.expanduser())


def check_revision(model: str, revision: str | None) -> None:
    """Refuse a revision of something that has none, rather than pass over it."""
    from polytoken.checkpoint.catalogue import CATALOGUE  # noqa: PLC0415

    if revision is None:
        return
    if not revision.strip():
        raise UsageError("--revision is empty; give a branch, tag or commit, or leave it out", field="--revision")
    try:
        here = Path(model).expanduser().exists()
    except OSError:  # too long for the file system: refused as a model later
        here = False
    if model in CATALOGUE or here:
        raise UsageError(f"--revision: {model} is no hub id, so it has no revisions", field="--revision")


def check_vocabulary(engine: Engine, members: Mapping[str, Any]) -> None:
    """Refuse a bias on an id that the model at work does not have, before anything is served."""
    biases = parse_sampling(members, SamplingParams()).logit_bias
    if not biases:
        return
    size = engine.call(lambda loaded: int(loaded.lane.model.vocab_size))  # type: ignore[attr-defined]  # of causal lanes
    for token_id, _ in biases:
        if token_id >= size:
            raise UsageError(
                f"--logit-bias: id {token_id} is outside this model's vocabulary (0 to {size - 1})",
                field="--logit-bias",
            )


def read_messages(path: str) -> Any:
    """The chat turns in a JSON file, or on standard input for `-`; their form is checked with the request."""
    try:
        text = standard_input("--messages").read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise UsageError(f"--messages: cannot read {path!r}: {error.strerror or error}", field="--messages") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"--messages: {path!r} is not JSON: {error}", field="--messages") from None


def _bias_pairs(items: Sequence[str]) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for item in items:
        token, mark, value = item.partition("=")
        try:
            if not mark or token.strip() in pairs:
                raise ValueError
            pairs[token.strip()] = float(value)
        except ValueError:
            reason = "names a token twice" if token.strip() in pairs else "is not of the form ID=VALUE"
            raise UsageError(f"--logit-bias: {item!r} {reason}", field="--logit-bias") from None
    return pairs
