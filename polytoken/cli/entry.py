"""Where every command begins and every error ends: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import difflib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, Final

import typer

from polytoken.cli.interrupts import Ending, ending, status_of, word_of
from polytoken.cli.output import say
from polytoken.cli.streams import EXIT_PIPE, OutputClosed, OutputFailed, prepare_streams
from polytoken.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USAGE,
    PolytokenError,
    UsageError,
)

_NO_COMMAND: Final = re.compile(r"No such command '(.*?)'\.?.*", re.DOTALL)
_EXTRA: Final = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
# What other programs call our verbs.
_OTHER_WORDS: Final = {
    **dict.fromkeys(("remove", "delete", "del", "uninstall", "erase"), "rm"),
    **dict.fromkeys(("list", "ls", "catalogue", "catalog"), "models"),
    **dict.fromkeys(("run", "ask", "complete", "prompt", "infer"), "generate"),
    **dict.fromkeys(("talk", "repl"), "chat"),
    **dict.fromkeys(("download", "fetch", "get", "install", "convert"), "pull"),
    **dict.fromkeys(("info", "show", "describe"), "inspect"),
    **dict.fromkeys(("check", "diagnose", "status"), "doctor"),
    **dict.fromkeys(("benchmark", "measure"), "bench"),
}
_PROMPT_FILES: Final = ("--prompt-file", "--input-file", "--file")  # of other programs
# typer carries its own copy of click and names only some of its exceptions: this is the common class of usage errors.
_ClickUsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words[: _verb_position(words)]
    with ending() as end:
        status = _dispatch(words, end, debug=debug)
        if status == EXIT_INTERRUPTED and end.terminated:  # typer makes 130 of every KeyboardInterrupt
            status = EXIT_TERMINATED
        if status in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            say("note", word_of(status))
            exec("")  # an interrupt that passed an `exec` left a mark, and the interpreter would end by a signal
        return status


def _dispatch(words: list[str], end: Ending, *, debug: bool) -> int:
    """Run the verb; everything that it raises becomes a line, if it needs one, and a status."""
    try:
        prepare_streams()
        _prepare_log(debug=debug)
        from polytoken.cli.app import command  # noqa: PLC0415  (after the streams are prepared)

        status = command(words, prog_name="polytoken", standalone_mode=False)
        sys.stdout.flush()
    except PolytokenError as error:
        say("error", describe(error))
        status = error.exit_status
        _trace(debug)
    except _ClickUsageError as error:
        text = describe_usage(error, words)
        if text:  # nothing is wrong with an empty command line but that it is empty: it has got the help
            say("error", text)
        status = EXIT_USAGE
    except typer.Abort:  # end of input where an answer was expected
        status = EXIT_FAILURE
    except KeyboardInterrupt as interrupt:
        status = status_of(interrupt)
    except OutputClosed:
        status = EXIT_PIPE
    except OutputFailed as error:
        say("error", str(error))
        status = EXIT_FAILURE
    except Exception as error:
        status = EXIT_TERMINATED if end.terminated else _explain_failure(error, debug=debug)
    return status if isinstance(status, int) else EXIT_OK


def _explain_failure(error: Exception, *, debug: bool) -> int:
    """Say what is wrong with the installation, or that this is a defect; the exit status."""
    if isinstance(error, ImportError):  # without MLX much cannot be imported: say what to install, not what failed
        say("error", _explain_import(error))
        _trace(debug)
        return EXIT_USAGE
    say("error", f"internal error: {type(error).__name__}: {error}")
    if not debug:
        say("note", "this is a defect; run `polytoken --debug ...` for the traceback")
    _trace(debug)
    return EXIT_FAILURE


def _explain_import(error: ImportError) -> str:
    from polytoken.backend import require_mlx  # noqa: PLC0415

    try:
        require_mlx()
    except PolytokenError as missing:
        return describe(missing)
    return f"this installation is incomplete: {one_line(str(error))}; install the package again"


def describe(error: PolytokenError) -> str:
    """The line for an expected error; a setting that the message does not name as a flag is named in front of it."""
    text = one_line(str(error))
    if isinstance(error, UsageError) and error.field and "--" not in text:
        return f"--{error.field.removeprefix('--').replace('_', '-')}: {text}"
    return text


def describe_usage(error: Any, words: Sequence[str] = ()) -> str:
    """The line for a command line (`words`) that could not be read: the flag, what is wrong, the nearest right one."""
    text = one_line(str(error.message or error.format_message()))
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option:
        typed = next((word for word in words if word.startswith(option) and not word.startswith("--")), option)
        return f"no such option {typed.partition('=')[0]}{_nearest(typed, error)}"
    if verb := _NO_COMMAND.fullmatch(text):
        return f"no such command {verb[1]}{_nearest_verb(verb[1], error)}"
    if extra := _EXTRA.match(text):
        prompt = " (text goes behind --prompt)" if error.ctx.info_name == "generate" else ""
        return f"unexpected argument: {extra[1]}{prompt}; see `{error.ctx.command_path} --help`"
    parameter = getattr(error, "param", None)
    flag = _flag_of(parameter) if parameter is not None else None
    if flag and type(error).__name__ == "MissingParameter":
        return f"{flag} is required; see `{error.ctx.command_path} --help`"
    if not flag and text.startswith("Option '"):  # an option without its value
        text = text[0].lower() + text[1:]
    return f"{flag}: {text}" if flag else text


def one_line(text: str) -> str:
    """White space, line breaks among it, as single blanks."""
    return " ".join(text.split())


def _nearest(option: str, error: Any) -> str:
    context = getattr(error, "ctx", None)
    known = [
        name for item in (context.command.params if context else ()) for name in (*item.opts, *item.secondary_opts)
    ]
    # One dash where two belong is the same word.
    word = "--" + option.lstrip("-").partition("=")[0].lower().replace("_", "-")
    if word in _PROMPT_FILES and "--prompt" in known:
        return "; a prompt in a file goes in as `--prompt - < FILE`"
    close = difflib.get_close_matches(word, [name for name in known if name.startswith("--")], n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; see `{context.command_path} --help`" if context else ""


def _nearest_verb(verb: str, error: Any) -> str:
    known = error.ctx.command.commands if error.ctx else {}
    close = difflib.get_close_matches(verb.lower(), [*known, *_OTHER_WORDS], n=1)
    if close:
        return f"; did you mean {_OTHER_WORDS.get(close[0], close[0])}?"
    return f"; there are {', '.join(known)}"


def _flag_of(parameter: Any) -> str:
    """How the user writes a parameter: its first flag, or the name of an argument."""
    flags = [name for name in parameter.opts if name.startswith("--")]
    return flags[0] if flags else str(parameter.name).upper()


def _verb_position(words: Sequence[str]) -> int:
    """Index of the first word that is no option: what stands before it belongs to the program, not to a verb."""
    return next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))


def _prepare_log(*, debug: bool) -> None:
    """Warnings as one line, the engine's log only when it is wanted."""
    log = logging.getLogger("polytoken")
    log.handlers = [logging.StreamHandler()] if debug else [logging.NullHandler()]
    log.propagate = False
    warnings.showwarning = _show_warning  # type: ignore[assignment]


def _show_warning(message: Warning | str, *_where: object) -> None:
    say("warning", one_line(str(message)))


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()
