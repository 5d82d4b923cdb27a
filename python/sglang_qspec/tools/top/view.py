"""Draws one frame of `qspec top`: at most 80 columns wide and 24 lines high."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_qspec.draft_source import OF_SIDECAR
from sglang_qspec.tools.top.interval import Interval, ratio

GOOD, FAIR, BAD = "green", "yellow", "bold red"
STYLES = {"on": GOOD, "off": FAIR, "ready": GOOD, "connecting": FAIR, "none": ""}
"""Style of each good state; all other states are bad."""
VERIFIED_AND_ACCEPTED = ("proposed_tokens", "accepted_tokens")


def frame(interval: Interval, title: str) -> RenderableType:
    """What the server did in the interval; `title` names the server."""
    tables = [_pipelines(interval)] if interval.pipelines else []
    parts: list[RenderableType] = [
        Text(title, style="bold", overflow="ellipsis", no_wrap=True),
        _states(interval),
        _summary(interval),
        _sources(interval),
    ]
    for table in (*tables, _sidecar(interval)):
        parts += [Text(), table]
    return Group(*parts)


def _states(interval: Interval) -> Text:
    now = interval.now
    enabled = now.value("settings", "enabled")
    speculation = "failed" if now.value("failed") else "on" if enabled else "off"
    line = Text("speculation ")
    line.append(speculation, STYLES.get(speculation, BAD))
    line.append(f"   pipeline {now.value('pipeline')} (mode {now.value('settings', 'mode')})")
    sidecar = now.value("sidecar")
    listed = now.state.get("sidecars", ())
    if len(listed) > 1:
        ready = sum(each["state"] == "ready" for each in listed)
        style = STYLES["ready"] if ready == len(listed) else BAD
        return line.append("   sidecars ").append(f"{ready}/{len(listed)} ready", style)
    return line.append("   sidecar ").append(sidecar, STYLES.get(sidecar, BAD))


def _summary(interval: Interval) -> Table:
    now, seconds = interval.now, interval.seconds
    waiting = now.value("waiting_requests")
    first = _number(now.value("queue_to_first_draft_seconds", "p50"))
    lines = _lines()
    lines.add_row(
        "requests",
        f"{now.value('live_requests') - waiting} running   {waiting} waiting   "
        f"first draft after {first} s",
    )
    lines.add_row(
        "decoding",
        f"{interval.token_rate:.1f} tokens/s   accept length {_number(interval.accept_length)}   "
        f"{interval.of_pipelines('passes') / seconds:.1f} passes/s",
    )
    lines.add_row(
        "time",
        f"passes {_share(interval.of_pipelines('seconds'), seconds)}   "
        f"waits for drafts {_share(interval.of_pipelines('waited_seconds'), seconds)}   "
        f"link {_share(interval.increase('link_seconds'), seconds)}",
    )
    if worth := _worth(interval):
        lines.add_row("drafts", worth)
    return lines


def _worth(interval: Interval) -> str:
    """What drafts are worth for the present batch; empty if it was not measured."""
    now = interval.now
    running = now.value("live_requests") - now.value("waiting_requests")
    for trials in now.value("draft_trials"):
        least, most = trials["requests"]
        present = least <= running <= most and trials["kind"] == now.value("answer_kind")
        if present and trials["over_none"] is not None:
            low, high = trials["over_none_range"]
            used = "off: " if trials["drafts"] == "none" else ""
            return (
                f"{used}{trials['over_none']:.2f} times plain decoding "
                f"({low:.2f} to {high:.2f}) at {least} to {most}"
            )
    return ""


def _sources(interval: Interval) -> Table:
    """A row for each source. The tokens per pass and request add up to the accept length."""
    table = _columns("source", "verified/s", "accepted/s", "wasted/s", "accepted", "per pass")
    table.add_column(no_wrap=True)
    requests = interval.of_pipelines("requests")
    for source in interval.sources:
        counts = [interval.of_source(field, source) for field in VERIFIED_AND_ACCEPTED]
        paused = interval.now.value("sources", source, "paused")
        table.add_row(
            source,
            *_drafts(interval, *counts),
            _number(ratio(counts[1], requests)),
            Text("paused" if paused else "", FAIR),
        )
    table.add_row("target", "", "", "", "", _number(ratio(requests, requests)))
    totals = [interval.of_sources(field) for field in VERIFIED_AND_ACCEPTED]
    table.add_row("all", *_drafts(interval, *totals), _number(interval.accept_length))
    return table


def _drafts(interval: Interval, verified: float, accepted: float) -> list[str]:
    """The cells of verified, accepted and wasted draft tokens, and of the accepted share."""
    wasted = max(0.0, verified - accepted)
    rates = [f"{count / interval.seconds:.1f}" for count in (verified, accepted, wasted)]
    return [*rates, _share(accepted, verified)]


def _pipelines(interval: Interval) -> Table:
    table = _columns("pipeline", "passes/s", "requests", "rows/request", "ms/pass", "ms waited")
    for name in interval.pipelines:
        passes, requests, rows, busy, waited = (
            interval.increase("pipelines", name, field)
            for field in ("passes", "requests", "input_tokens", "seconds", "waited_seconds")
        )
        table.add_row(
            name,
            f"{passes / interval.seconds:.1f}",
            _number(ratio(requests, passes)),
            _number(ratio(rows, requests)),
            _number(ratio(1000 * busy, passes)),
            _number(ratio(1000 * waited, passes)),
        )
    return table


def _sidecar(interval: Interval) -> Table:
    now, lines = interval.now, _lines()
    accepted = sum(interval.increase("accepted_tokens", each.name.lower()) for each in OF_SIDECAR)
    worth = ratio(accepted, interval.increase("sidecar_pass_seconds"))
    lines.add_row(
        "sidecar",
        f"{interval.rate('drafted_tokens'):.0f} tokens/s   "
        f"worth: {'-' if worth is None else f'{worth:.1f}'}/s   "
        f"requests: {now.value('drafting_requests')}   "
        f"rows: {now.value('drafting_rows')}",
    )
    load = Text(
        f"prompts: {now.value('sidecar_texts')}   KV slots: {now.value('sidecar_kv_tokens')}   "
        f"backlog: {now.value('sidecar_backlog_seconds'):.0f} s   "
    )
    overload = now.value("sidecar_overload")
    load.append(f"overload: {overload}", FAIR if overload else "")
    lines.add_row("", load)
    losses = {
        "restarts": now.value("sidecar_restarts"),
        "declined": now.value("declined_requests"),
        "evicted": now.value("evictions"),
        "lost messages": sum(now.value("dropped_messages").values()),
    }
    if any(losses.values()):
        text = "   ".join(f"{what}: {count}" for what, count in losses.items() if count)
        lines.add_row("since start", Text(text, FAIR))
    return lines


def _lines() -> Table:
    """A table of lines, each with its subject in the first column."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(min_width=11, no_wrap=True)
    table.add_column()
    return table


def _columns(*names: str) -> Table:
    """A table with a name in its first column and numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(names[0], min_width=10, no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(part: float, whole: float) -> str:
    share = ratio(part, whole)
    return "-" if share is None else f"{100 * share:.0f} %"
