"""The `chunkllm` command: parse, call, print."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chunkllm_bridge import __version__
from chunkllm_bridge.cli_heads import heads
from chunkllm_bridge.client import Client
from chunkllm_bridge.common.errors import BridgeError, ConfigError, ControlError, Problem
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.values import from_text

ENGINES = ("vllm", "sglang")
F = TypeVar("F", bound=Callable[..., Any])

WIDE = None if sys.stdout.isatty() else 160
out, err = Console(width=WIDE), Console(stderr=True, width=WIDE)


def as_json(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def to_server(command: F) -> F:
    """Options of a command that talks to a running server."""
    url = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's address.")
    secret = click.option("--token", help="Its token or API key; a local server's token file is found by itself.")
    return url(secret(as_json(command)))


def show_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, default=str))  # TOML has dates


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    grid = Table(title=escape(title), title_justify="left", header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(escape(str(cell)) for cell in row))  # [/tmp] is no closing tag
    out.print(grid)


def warn(texts: Sequence[str], kind: str = "warning") -> None:
    for text in texts:
        err.print(f"[yellow]{kind}:[/] {escape(text)}")


@click.group()
@click.version_option(__version__, prog_name="chunkllm")
def cli() -> None:
    """Look at, change and check ChunkLLM Bridge on a running vLLM or SGLang server."""


cli.add_command(heads)


@cli.command()
@to_server
def status(url: str, token: str | None, as_json: bool) -> None:
    """What the engine holds and what each plugin did."""
    data = Client(url, token).get("status")
    if as_json:
        show_json(data)
        return
    kv, requests = data["kv"], data["requests"]
    table(
        f"{data['engine']} {data['version']}  {data['model']}",
        ("profile", "fingerprint", "generation", "ranks", "in step", "running", "waiting"),
        [
            (
                *(data["profile"], data["fingerprint"], data["generation"], data["ranks"]),
                *("yes" if data["in_step"] else "NO", requests["running"], requests["waiting"]),
            )
        ],
    )
    ratio = kv["memory_ratio"]
    table(
        f"KV cache, in blocks of {kv['block_size']} tokens; kv_cache.memory_ratio = {ratio} "
        f"(at most {kv['memory_ratio_max']:.4f})",
        ("total", "limit", "held", "cached", "free", "peak", "denied", "preempted", "overdrafts"),
        [
            [
                kv[key]
                for key in ("total", "limit", "held", "cached", "free", "peak", "denied", "preempted", "overdrafts")
            ]
        ],
    )
    if drafts := data.get("speculation"):
        table(*speculation_table(drafts))
    table(
        "Plugins",
        ("name", "version", "priority", "generation", "state", "calls", "failures", "last failure"),
        [plugin_row(plugin) for plugin in data["plugins"]],
    )
    warn(data["warnings"])


def speculation_table(drafts: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[object]]]:
    """Title, columns and the row: what drafts now, and how its drafts fared."""
    now = drafts["plugin"] or "none"
    title = f"Speculation by {now}"
    if drafts["stepped_aside"]:
        title += f", which stepped aside: {drafts['stepped_aside']}"
    number = drafts["drafts"]
    shares = [f"{accepted / number:.0%}" for accepted in drafts["accepted_at"]] if number else []
    columns = ("drafts now", "limit", "launched", "drafts", "tokens", "accepted", "at each position", "length", "ever")
    row = (
        *(drafts["width"], drafts["limit"], drafts["launched"], number, drafts["draft_tokens"], drafts["accepted"]),
        *(" ".join(shares), f"{drafts['acceptance_length']:.2f}", f"{drafts['acceptance_length_total']:.2f}"),
    )
    return title, columns, [row]


def plugin_row(plugin: Mapping[str, Any]) -> tuple[object, ...]:
    calls, failures = plugin.get("calls", {}), plugin.get("failures", {})
    return (
        *(plugin["name"], plugin.get("version", ""), plugin.get("priority", ""), plugin.get("generation", "")),
        *(plugin["state"], sum(calls.values()), sum(failures.values()), plugin.get("last_failure", "")),
    )


@cli.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="KEY=VALUE...")
@to_server
def set_(assignments: tuple[str, ...], url: str, token: str | None, as_json: bool) -> None:
    """Change parameters while the server runs, on all ranks or on none."""
    values: dict[str, object] = {}
    for key, value in map(assignment, assignments):
        if key in values:
            raise ConfigError([Problem(key=key, value=value, reason="given twice", where="command line")])
        values[key] = value
    data = Client(url, token).set(values)
    if as_json:
        show_json(data)
        return
    for key, change in data["changed"].items():
        out.print(f"{key}: {change['before']} -> {change['after']}", markup=False, highlight=False, soft_wrap=True)
    kv = data["kv"]
    out.print(f"generation {data['generation']}; KV limit {kv['limit']} of {kv['total']} blocks, {kv['held']} held")


def assignment(text: str) -> tuple[str, object]:
    """ "KEY=VALUE", the value as it would stand in the file, quotes around words left out."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError([Problem(key=text, value=None, reason="write KEY=VALUE", where="command line")])
    return key.strip(), from_text(value)


@cli.group()
def config() -> None:
    """The spec: what is in force, and whether a file is right."""


def spec_options(command: F) -> F:
    sets = click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="As --plugin-set at launch.")
    return click.argument("file", required=False, type=click.Path(path_type=Path))(sets(command))


@config.command("show")
@spec_options
@click.option("--url", help="Ask a running server instead of a file.")
@click.option("--token", help="Its token or API key.")
@as_json
def config_show(file: Path | None, sets: tuple[str, ...], url: str | None, token: str | None, as_json: bool) -> None:
    """The effective value of every parameter and where it came from."""
    if url is not None:
        if file is not None or sets:
            raise click.UsageError("give a FILE with --set, or --url; not both")
        data = Client(url, token).get("config")
    else:
        spec = Spec.resolve(file=file, sets=sets, hardware=this_machine(), catalogue=Registry.installed())
        rows = [{"key": key, "value": value, "source": source} for key, value, source in spec.rows()]
        data = {"profile": spec.profile, "parameters": rows}
    if as_json:
        show_json(data)
        return
    rows_ = [(row["key"], row["value"], row["source"]) for row in data["parameters"]]
    table(f"profile {data['profile']}", ("parameter", "value", "from"), rows_)


@config.command("check")
@spec_options
@as_json
def config_check(file: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Whether a spec is right for this machine; every mistake at once. Exit code 2 where it is not."""
    spec = Spec.resolve(file=file, sets=sets, hardware=this_machine(), catalogue=Registry.installed())
    if as_json:
        show_json({"ok": True, "profile": spec.profile, "warnings": list(spec.warnings)})
        return
    warn(spec.warnings)
    out.print(f"{file or 'the defaults'}: right for this machine (profile {spec.profile})", markup=False)


@cli.group(invoke_without_command=True)
@click.option("--url", help="Ask a running server.")
@click.option("--token", help="Its token or API key.")
@as_json
@click.pass_context
def plugins(context: click.Context, url: str | None, token: str | None, as_json: bool) -> None:
    """The plugins that are installed, and on a server which of them have a seat."""
    if context.invoked_subcommand is None:
        list_plugins(url, token, as_json)


@plugins.command("list")
@click.option("--url", help="Ask a running server.")
@click.option("--token", help="Its token or API key.")
@as_json
def plugins_list(url: str | None, token: str | None, as_json: bool) -> None:
    """The same as `chunkllm plugins`."""
    list_plugins(url, token, as_json)


def list_plugins(url: str | None, token: str | None, as_json: bool) -> None:
    rows = Client(url, token).get("plugins")["plugins"] if url else Registry.installed().describe()
    if as_json:
        show_json({"plugins": rows})
        return
    table(
        "Plugins",
        ("name", "version", "ABI", "seams", "state", "from", "remarks"),
        [
            (
                *(row["name"], row.get("version", "?"), ".".join(map(str, row.get("abi", ())))),
                *(", ".join(row.get("seams", ())), row["state"], row["source"]),
                "; ".join(row.get("reasons", ())) or row.get("summary", ""),
            )
            for row in rows
        ],
    )


@cli.command()
@click.option("--engine", type=click.Choice(ENGINES), help="Only this engine; default: every one that is installed.")
@as_json
def doctor(engine: str | None, as_json: bool) -> None:
    """Each engine symbol that the bridge needs: present, changed or missing. Exit code 1 where one is not present."""
    names = [engine] if engine else [name for name in ENGINES if find_spec(name)]
    if not names:
        raise ControlError(f"no engine is installed beside the bridge (looked for {', '.join(ENGINES)})")
    reports = []
    for name in names:
        if find_spec(name) is None:
            raise ControlError(f"{name} is not installed beside the bridge")
        reports.append(importlib.import_module(f"chunkllm_bridge.{name}.doctor").examine())
    if as_json:
        show_json({"engines": reports, "healthy": all(report["healthy"] for report in reports)})
    else:
        for report in reports:
            rows = [(seam["target"], seam["status"], seam["capability"], seam["detail"]) for seam in report["seams"]]
            tested = "tested" if report["tested"] else f"untested; tested: {', '.join(report['versions'])}"
            table(f"{report['engine']} {report['version']} ({tested})", ("seam", "status", "for", "what differs"), rows)
            warn(report["notes"], "note")
    sys.exit(0 if all(report["healthy"] for report in reports) else 1)


def main() -> None:
    """Run the command; a mistake is a message and an exit code."""
    arguments = sys.argv[1:]
    try:
        cli.main(args=arguments, prog_name="chunkllm", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        if "--json" in arguments:
            show_json({"ok": False, "error": error.format_message(), "problems": []})
        else:
            error.show()
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except BridgeError as error:
        if "--json" in arguments:
            show_json({"ok": False, "error": str(error), "problems": problem_rows(error)})
        else:
            err.print(f"chunkllm: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def problem_rows(error: BridgeError) -> list[dict[str, Any]]:
    if isinstance(error, ControlError):
        return [{"reason": text} for text in error.problems]
    problems: Sequence[Problem] = error.problems if isinstance(error, ConfigError) else ()
    return [
        {"key": p.key, "value": p.value, "reason": p.reason, "where": p.where, "nearest": p.nearest} for p in problems
    ]


if __name__ == "__main__":
    main()
