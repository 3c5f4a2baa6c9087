"""What a run of the oracle is asked to do, and which flags go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from polytoken.errors import RequestError, UsageError
from polytoken.request import SamplingParams

Mode = Literal["forward", "decode", "mtp", "ar", "mtp-prefill", "mtp-generate", "canvas"]
TokenEvents = Literal["full", "progress"]
CanaryName = Literal["auto", "native", "mlx", "off"]

DEPTH: Final = 3
PREFILL_WINDOWS: Final[tuple[int | None, ...]] = (None, 3)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. The rules between the fields are checked when it is made.

    Attributes:
        mode: the entry point that is run; `forward` when no flag names another.
        server_defaults: use what the server would use for this checkpoint instead of the oracle's own sampling.
        readme: a text to summarise, in the place of the one-word prompt.
        restored_suffixes: a text for the second of three suffixes that extend the live final state.
        snapshot_restore: go on from a restored snapshot before each suffix, and watch that it stays as it was.
        chat: three turns of a conversation in the place of one answer.
        source_run: receipts of a client run that the chat has to reproduce.
        token_events: every id as it comes, or one line of progress a second.
        canary: what probes the device while the engine works.
        canary_library: the native probe, for `native`.
        temperature, top_p, top_k, seed: of the modes that draw; None for the oracle's own, 0.6, 0.95, 20 and 0.
        max_new_tokens: cap on an answer; None lets it end by itself, within the context.
        depth: drafts per window; None for three.

    Raises:
        UsageError: naming the flag that has no place, or that this mode would not read.
    """

    mode: Mode = "forward"
    server_defaults: bool = False
    readme: Path | None = None
    restored_suffixes: Path | None = None
    snapshot_restore: bool = False
    chat: bool = False
    source_run: Path | None = None
    token_events: TokenEvents = "full"
    canary: CanaryName = "auto"
    canary_library: Path | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        generates = self.mode in ("ar", "mtp-generate")
        _need(self.restored_suffixes is None or self.mode == "mtp-generate", "--restored-suffixes needs --mtp-generate")
        _need(
            not self.snapshot_restore or self.restored_suffixes is not None,
            "--snapshot-restore needs --restored-suffixes",
        )
        _need(not self.chat or self.readme is not None, "--chat needs --readme, the text of its first turn")
        _need(not self.chat or generates, "--chat needs --ar or --mtp-generate")
        _need(not self.chat or self.restored_suffixes is None, "--chat excludes --restored-suffixes")
        _need(self.source_run is None or self.chat, "--source-run needs --chat")
        _need(self.source_run is None or self.server_defaults, "--source-run needs --server-defaults")
        _need(self.token_events == "full" or self.chat, "--token-events progress needs --chat")
        _need(self.token_events in ("full", "progress"), "--token-events must be full or progress")
        _need(self.canary in ("auto", "native", "mlx", "off"), "--canary must be auto, native, mlx or off")
        _need(self.canary != "native" or self.canary_library is not None, "--canary native needs --canary-library")
        _need(
            self.canary_library is None or self.canary in ("auto", "native"), "--canary-library needs --canary native"
        )
        self._check_read()
        _ = self.sampling

    def _check_read(self) -> None:
        """A flag that this run would not read is refused: its user expects something of it."""
        draws = self.mode in ("ar", "mtp-generate")
        for flag, value in (("--temperature", self.temperature), ("--top-p", self.top_p), ("--top-k", self.top_k)):
            _need(value is None or draws, f"{flag} needs --ar or --mtp-generate: no other mode draws by it")
            _need(value is None or not self.server_defaults, f"{flag} excludes --server-defaults, which sets it")
        _need(self.seed is None or draws or self.mode == "canvas", "--seed needs --ar, --mtp-generate or --canvas")
        answers = draws or self.mode in ("decode", "canvas")
        _need(self.max_new_tokens is None or answers, "--max-new-tokens needs a mode with an answer")
        for flag, number in (("--seed", self.seed), ("--max-new-tokens", self.max_new_tokens)):
            _need(number is None or self.source_run is None, f"{flag} excludes --source-run, which sets it")
        _need(self.depth is None or self.mode == "mtp-generate", "--depth needs --mtp-generate")

    @property
    def sampling(self) -> SamplingParams:
        """How the modes that draw do so, if neither server nor source says. Raises UsageError for what is no law."""
        return check_sampling(
            0.6 if self.temperature is None else self.temperature,
            top_p=0.95 if self.top_p is None else self.top_p,
            top_k=20 if self.top_k is None else self.top_k,
        )

    @property
    def drafts(self) -> int:
        """Drafts per window."""
        return DEPTH if self.depth is None else self.depth

    @property
    def lane(self) -> str:
        """The lane that this mode needs."""
        if self.mode == "canvas":
            return "canvas"
        return "mtp" if self.mode.startswith("mtp") else "ar"


def choose_mode(**flags: bool) -> Mode:
    """The one mode whose flag was given, by the flag's name with underscores; `forward` for none.

    Raises:
        UsageError: more than one was given.
    """
    given = [name.replace("_", "-") for name, on in flags.items() if on]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} excludes --{given[1]}: choose one mode", field=f"--{given[1]}")
    return given[0] if given else "forward"  # type: ignore[return-value]


def check_sampling(temperature: float, *, top_p: float, top_k: int, flag: str | None = None) -> SamplingParams:
    """How tokens are drawn. Raises UsageError, naming `flag` or the flag of the value, for what is no law."""
    try:
        return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    except (RequestError, TypeError) as error:
        name = f"--{str(error).split(maxsplit=1)[0].replace('_', '-')}" if flag is None else flag
        raise UsageError(f"{name}: {error}", field=name) from None


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise UsageError(text, field=text.split(maxsplit=1)[0])
