"""python -m mome NAME ...: the commands over run folders.

Lives here: the table of commands, the choice among them, and the one line that a user's mistake ends in.
Not here: any command; each is a module of mome/tools with a main(words), imported only when it is called for.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from data.command import error_line
from mome.errors import UserError

TOOLS: dict[str, tuple[str, str]] = {
    "sample": ("mome.tools.sample", "continue a prompt with the model of a run"),
    "report": ("mome.tools.report", "loss.png and report.html of one run, or of several side by side"),
    "export": ("mome.tools.export", "write a run's model as safetensors with its config and tokenizer"),
    "compare": ("mome.tools.compare", "train arms over paired seeds and test their differences"),
    "scaling": ("mome.tools.scaling", "loss and time against a setting, over paired seeds, fitted and plotted"),
    "collisions": ("mome.tools.collisions", "what a hashed table of n-grams does to a corpus, before training"),
    "plan": ("mome.tools.plan", "memory, traffic and step time on nodes of GPUs, before anything is run"),
    "ckpt": ("mome.tools.ckpt", "list, verify or compact the checkpoints of a run"),
    "bench": ("mome.tools.bench", "how fast tables and hashes are, against their peers, in one run"),
}


def usage() -> str:
    """The help text: every command with what it does."""
    width = max(map(len, TOOLS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in TOOLS.items()]
    return "\n".join(["usage: python -m mome NAME ... (options of one: python -m mome NAME --help)", "", *lines])


def dispatch(words: Sequence[str]) -> int:
    """Run the command that the first word names with the rest, and return its exit code.

    Errors: UserError for an unknown name, and whatever the command raises.
    """
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 1
    name, *rest = words
    if name not in TOOLS:
        near = difflib.get_close_matches(name, TOOLS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TOOLS)}"
        raise UserError(f"unknown command {name!r}: {hint}")
    return importlib.import_module(TOOLS[name][0]).main(rest) or 0


def main(words: Sequence[str]) -> int:
    """dispatch(), with errors turned into one line on stderr and exit code 1 (130 after Ctrl-C)."""
    try:
        # A sample may hold what the terminal cannot show.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe has left: keep the interpreter's own flush at exit from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
