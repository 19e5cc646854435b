"""Reading a process's log: its start-up phase, and why it ended.

A log may hold several streams of lines, each with a prefix of its own: the ranks of a trainer, the processes of an
engine. The lines of a traceback are those with the prefix of its first line; the lines of others may lie in between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from trireme.base.processes import last_lines

MAX_LINES = 24
STACK_LINES = 12  # newest frames' lines of a traceback, or lines of a log without one

STARTUP_PHASES = (
    (re.compile(r"Application startup complete"), "ready"),
    (re.compile(r"Capturing CUDA graph|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"torch\.compile|Compiling a graph"), "compiling"),
    (re.compile(r"KV cache size|init engine"), "warming up"),
    (re.compile(r"Starting to load model|Loading weights|Loading safetensors"), "loading the model"),
)

_ERROR = re.compile(r"error|Error|ERROR|exception|Exception|Fatal Python")
_NOISE = re.compile(
    r"^(\[\w*\d+\]:\s*)*$|^\s*warnings\.warn\(|:\d+: \w+Warning: |resource_tracker|leaked \w+ objects"
    r"|destroy_process_group|\d+%\||\"(GET|POST) \S+ HTTP/1\.\d\" 2\d\d"
    r"|Shutting down|Waiting for application shutdown|Finished server process"
)
_RANKS_FAILED = "ranks failed, the others were stopped"  # `launch/ranks.py`, after what the ranks wrote themselves
_HEADER = re.compile(r"(?P<prefix>.*?)(?P<margin>\s*[+|] )?(Exception Group )?Traceback \(most recent call last\):\s*$")
_STREAM = re.compile(r"(\[\w*\d+\]: ?)+")  # "[rank0]: " of torch, "[default0]:" of torchrun
_COUNTING = re.compile(r"(?<![A-Za-z=\[\d])(?!^\d+: )\d+")  # digits of times and lines, not of a rank or process id
_MARGIN = re.compile(r"^\s*[|+] ?")  # drawn before the lines of an exception group
_BORDER = re.compile(r"^\s*\+[-+ ]*-{4}")  # line between the exceptions of a group
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")
_CHAIN = re.compile(r"^(During handling of the above exception, another|The above exception was the direct cause of)")
_FRAME = re.compile(r'^\s*File "[^"]+", line \d+')
# Lines that end a process without a traceback: our commands' own errors, those of argparse, crashes.
_LAST_WORD = re.compile(
    r"(trainer|orchestrator|inference|sft): \S|\S+: error: |Fatal Python error: |terminate called after throwing"
)
_LOG_LINE = re.compile(r"(\[?\d{2,4}[-:]\d\d[-:]\d\d|(\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR)\b|\[?[EWI]\d{4} )")

# vLLM's server prints the first about its engine core, whose traceback comes before; torchrun raises the second.
_SYMPTOM = re.compile(r"root cause above|ChildFailedError")
# Errors of a rank that lost another one: the other's exception is the cause.
_LOST_PEER = re.compile(
    r"[Cc]onnection (closed|reset)|[Bb]roken pipe|Dist(Backend|Network|Store)Error|PeerDied|remote process exited"
    r"|[Ss]ocket closed|NCCL|[Gg]loo|ProcessGroup"
)
# What time, another process or another machine may heal, so that the next try can end otherwise.
_MAY_HEAL = re.compile(
    r"[Cc]onnect|[Tt]imed? ?-?out|[Dd]eadline|[Uu]navailable|ZMQError|already in use|[Mm]emory|No space left|[Qq]uota"
    r"|Too many open files|Stale file handle|Input/output error|[Tt]emporar|[Tt]ry again|HTTP(Status)?Error|CUDA error"
)


def startup_phase(log: Path, start: int = 0) -> str:
    """Return what a starting process is doing, as far as its log shows."""
    for line in reversed(last_lines(log, start=start)):
        for pattern, phase in STARTUP_PHASES:
            if pattern.search(line):
                return phase
    return "starting"


def failure_lines(log: Path, start: int = 0) -> list[str]:
    """Return the lines that most likely say why a process ended: the traceback of the cause, else those around its last
    error, else its last lines. Progress bars, access logs and shutdown messages are left out.
    """
    lines = _lines(log, start)
    if failure := _cause(lines):
        return failure.shown(lines)

    # Without a traceback: the lines around the last error, and the end of the log.
    errors = [index for index, line in enumerate(lines) if _ERROR.search(line)]
    tail = max(0, len(lines) - STACK_LINES)
    if errors and errors[-1] < tail:
        return [*lines[errors[-1] : min(errors[-1] + STACK_LINES, tail)], "…", *lines[tail:]]
    return lines[tail:]


def failure_reason(log: Path, start: int = 0) -> str:
    """Return why a process ended in one line: the exception's own, else the log's last one; "" for an empty log."""
    lines = _lines(log, start)
    if failure := _cause(lines):
        return failure.reason
    return lines[-1].strip() if lines else ""


def repeating_failure(log: Path, start: int = 0) -> str | None:
    """Return the type and the place of the exception that ended a process, by which it is known again.

    None for the end of a process without a traceback, and for an exception that may not come again: of memory, a
    connection, a disk, another process.

    Example:
        repeating_failure(log)  # 'IndexError at File "/x/train.py", line 12'
    """
    failure = _cause(_lines(log, start))
    if failure is None or _MAY_HEAL.search(failure.own) or _LOST_PEER.search(failure.own):
        return None

    # The line number is part of the key: the same error at another place is another failure.
    frames = [found[0].strip() for line in failure.frames if (found := _FRAME.match(line))]
    return f"{failure.own.partition(':')[0]} at {frames[-1]}" if frames else None


def _lines(log: Path, start: int) -> list[str]:
    return [line for line in last_lines(log, start=start) if not _NOISE.search(line)]


@dataclass(frozen=True)
class _Failure:
    """An exception in a log, or a last word without a traceback. Places are indices of the log's lines."""

    stream: str  # the prefix of its lines
    own: str  # its own line, without prefix: "ValueError: boom"
    own_at: int
    begins_at: int
    frames: tuple[str, ...] = ()  # lines of the traceback, without prefix
    frames_at: tuple[int, ...] = ()
    message_at: tuple[int, ...] = ()  # further lines of the message, and notes
    causes_at: tuple[int, ...] = ()  # own lines of the exceptions that led to it, or of the group that it is in

    @property
    def reason(self) -> str:
        rank = re.search(r"\[rank\d+\]", self.stream)
        return f"{rank[0]}: {self.own}" if rank else self.own

    def shown(self, lines: list[str]) -> list[str]:
        """Return its lines without the oldest frames and the end of a long message."""
        block = [lines[at] for at in self.causes_at[-4:]]
        if self.frames:
            newest = [lines[at] for at in self.frames_at[-STACK_LINES:]]
            block += [lines[self.begins_at], *(["  …"] if len(self.frames) > STACK_LINES else []), *newest]
        block.append(lines[self.own_at])
        message = [lines[at] for at in self.message_at]
        left = MAX_LINES - len(block)
        return block + (message if len(message) <= left else [*message[: left - 1], "…"])


def _cause(lines: list[str]) -> _Failure | None:
    """Return the failure that ended the process: the last one, or the first rank's that failed by itself."""
    # Sort by place in the log, and drop errors that only report the end of another process.
    found = [failure for stream, texts in _streams(lines).items() for failure in _failures(stream, texts)]
    found.sort(key=lambda failure: failure.begins_at)
    found = [failure for failure in found if not _SYMPTOM.search(failure.own)] or found
    by_itself = [failure for failure in found if not _LOST_PEER.search(failure.own)]

    # All ranks lost a rank that was killed and wrote no error: the line with the exit codes explains more.
    if found and not by_itself:
        killed = [at for at, line in enumerate(lines) if line.startswith(_RANKS_FAILED) and ": -" in line]
        by_itself = [_Failure("", lines[at], at, at) for at in killed[-1:]] or found
    if not by_itself:
        return None

    # Ranks fail one after the other because of the first.
    last = by_itself[-1]
    newest = {failure.stream: failure for failure in by_itself if "rank" in failure.stream}
    return min(newest.values(), key=lambda failure: failure.begins_at) if last.stream in newest else last


def _streams(lines: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Return the lines of each stream by its prefix, as their places in the log and their texts after the prefix."""
    # Learn the prefix of each stream from the first line of its tracebacks; digits in it may vary.
    patterns: dict[str, re.Pattern[str]] = {}
    for index, line in enumerate(lines):
        if (header := _HEADER.match(line)) and (prefix := header["prefix"].rstrip()):
            pieces = (re.escape(piece) for piece in _COUNTING.split(prefix))
            pattern = re.compile(r"\d+".join(pieces) + " ?")
            # A logger may have written the whole traceback as one message, with its prefix on the first line only.
            following = lines[index + 1] if index + 1 < len(lines) else ""
            if pattern.match(following) or not following.startswith("  "):
                patterns[_COUNTING.sub("0", prefix)] = pattern
            else:
                patterns[""] = pattern

    streams: dict[str, list[tuple[int, str]]] = defaultdict(list)

    # Longest prefix first, because a short one may be the beginning of another.
    ordered = sorted(patterns.items(), key=lambda item: -len(item[0]))
    for index, line in enumerate(lines):
        matches = ((prefix, found) for prefix, pattern in ordered if (found := pattern.match(line)))
        prefix, found = next(matches, (None, _STREAM.match(line)))
        stream = prefix if prefix is not None else found[0].rstrip() if found else ""
        text = line[found.end() :] if found else line
        if text.strip(" |"):  # skip empty lines of a message, or of a group's margin
            streams[stream].append((index, text))
    return streams


def _failures(stream: str, texts: list[tuple[int, str]]) -> list[_Failure]:
    """Return the failures in the lines of one stream. Exceptions of one chain, or of one group, are one failure."""
    found, at = [], 0
    while at < len(texts):
        index, text = texts[at]
        if header := _HEADER.match(text):
            failure, at = _read_traceback(stream, texts, at, is_in_group=header["margin"] is not None)
            found += [failure] if failure else []
        else:
            at += 1
            if _LAST_WORD.match(text):
                message, at = _read_message(texts, at)
                found.append(_Failure(stream, text.strip(), index, index, message_at=message))
    return found


def _read_traceback(
    stream: str, texts: list[tuple[int, str]], at: int, *, is_in_group: bool
) -> tuple[_Failure | None, int]:
    """Read the failure whose traceback begins at a place; return it, and the place after it."""

    def text_at(place: int) -> str:
        text = texts[place][1] if place < len(texts) else ""
        return _MARGIN.sub("", text, count=1) if is_in_group else text

    # Frames and source lines are indented; the first line that is not is the exception itself.
    begins, frames_from = texts[at][0], at + 1
    at += 1
    while text_at(at).startswith((" ", "\t")):
        at += 1

    if at >= len(texts) or _HEADER.match(texts[at][1]):  # it was cut off
        return None, at

    frames = range(frames_from, at)
    failure = _Failure(
        stream,
        text_at(at).strip(),
        texts[at][0],
        begins,
        tuple(map(text_at, frames)),
        tuple(texts[place][0] for place in frames),
    )

    message, at = _read_message(texts, at + 1)
    failure = replace(failure, message_at=message)

    # The first exception of a group represents it; the others are skipped.
    while is_in_group and _GROUP.search(failure.own) and at < len(texts) and _BORDER.match(texts[at][1]):
        at += 1
        causes = (*failure.causes_at, failure.own_at)
        if at < len(texts) and _HEADER.match(texts[at][1]):
            first, at = _read_traceback(stream, texts, at, is_in_group=True)
            failure = replace(first, causes_at=causes + first.causes_at) if first else failure
        elif at < len(texts):
            own, own_at = text_at(at).strip(), texts[at][0]
            message, at = _read_message(texts, at + 1)
            failure = replace(failure, own=own, own_at=own_at, causes_at=causes, message_at=message)
        if not _GROUP.search(failure.own):
            while at < len(texts) and _MARGIN.match(texts[at][1]):
                at += 1

    # What was raised last is the failure, and the exceptions that it was raised for are its causes.
    if _CHAIN.match(text_at(at)) and _HEADER.match(texts[at + 1][1] if at + 1 < len(texts) else ""):
        chained = (*failure.causes_at, failure.own_at, texts[at][0])
        header = _HEADER.match(texts[at + 1][1])
        assert header is not None
        final, at = _read_traceback(stream, texts, at + 1, is_in_group=header["margin"] is not None)
        failure = replace(final, causes_at=chained + final.causes_at) if final else failure
    return failure, at


def _read_message(texts: list[tuple[int, str]], at: int) -> tuple[tuple[int, ...], int]:
    """Return the lines that belong to a message from a place on, and the place after them."""
    first = at
    while at < len(texts):
        text = texts[at][1]

        # A message may have many lines. It ends at the next traceback, log line or command error.
        inside = _MARGIN.sub("", text, count=1)
        ends = _HEADER.match(text) or _BORDER.match(text) or _CHAIN.match(inside) or _LAST_WORD.match(text)
        if ends or _LOG_LINE.match(text) or text.startswith(_RANKS_FAILED):
            break
        at += 1
    return tuple(index for index, _ in texts[first:at]), at
