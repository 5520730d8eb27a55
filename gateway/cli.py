"""The command `hitherto`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway import config
from gateway.config import Settings
from gateway.settings_file import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A caching gateway for LLM APIs: never pay twice for the same work.",
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="hitherto.yaml; without it ./hitherto.yaml if it is there, else the defaults."),
]


class CommandError(Exception):
    """One clear line for the user, exit code 2."""


@app.command()
def serve(
    config_file: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Gateway processes; they share the engine and the stored answers.")
    ] = 1,
    upstream: Annotated[
        str | None,
        typer.Option(
            help="Transparent mode: cache this OpenAI-compatible endpoint; no config file, clients keep their keys."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for stored answers and converted models.")] = None,
    access_log: Annotated[bool, typer.Option(help="One line per request on standard error.")] = True,
) -> None:
    """Run the gateway."""
    from gateway.serve import run

    if upstream is not None and config_file is not None:
        raise CommandError("--upstream needs no config file; use one or the other")
    settings = load_settings(config_file, upstream)
    listen = f"{host or settings.host}:{settings.port if port is None else port}"
    settings = settings.model_copy(update={"listen": listen, "data": (data or settings.data).expanduser()})
    settings.check_exposure()
    run(settings, workers, access_log)


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, package:NAME/FILE, or a hub id.")],
    listen: Annotated[str, typer.Option(help="unix:PATH or HOST:PORT")] = "127.0.0.1:8081",
    data: Annotated[Path, typer.Option(help="Where converted models are kept.")] = Path("~/.local/share/hitherto"),
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    name: Annotated[str, typer.Option(help="What /v1/models calls it.")] = "engine",
) -> None:
    """Run the built-in engine alone, as an OpenAI-compatible server."""
    from pydantic import ValidationError

    from backends.engine.config import EngineConfig

    try:
        settings = EngineConfig.model_validate({"model": model, "dtype": dtype, "device": device})
    except ValidationError as error:
        first = error.errors()[0]
        raise CommandError(f"--{first['loc'][0]}: {first['msg']}") from error
    from backends.engine.__main__ import serve as serve_engine

    serve_engine(name, settings, data.expanduser(), listen)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Config files, tenants' files, or folders of these.")],
    config_file: ConfigOption = None,
) -> None:
    """Check config and tenants' files; says file, line and key of what is wrong, and the nearest word that is right.

    A tenant's file is checked against the hitherto.yaml of --config, or else the one beside or above its folder.
    """
    from gateway.checking import check_file

    failed = False
    for file in files:
        try:
            done = check_file(file, config_file)
        except ConfigError as error:
            typer.echo(str(error), err=True)
            failed = True
        else:
            typer.echo(f"{file}: {done}")
    if failed:
        raise typer.Exit(2)


@app.command()
def prepare(config_file: ConfigOption = None) -> None:
    """Obtain and convert the models that the configuration names, so that the first start is as fast as the next."""
    from backends.engine.config import EngineConfig

    settings = load_settings(config_file, None)
    for backend in settings.backends.values():
        if isinstance(backend, EngineConfig):
            from backends.engine.models import resolve

            typer.echo(f"{backend.model}: {resolve(backend.model, settings.data, typer.echo)}")


@app.command()
def verify(
    config_file: ConfigOption = None,
    backend: Annotated[str | None, typer.Option(help="Which engine; the first one if not given.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file, one prompt a line; 50 of our own if not given.")] = None,
) -> None:
    """Compare cached with uncached output, token by token, over prompts and every KV tier."""
    from gateway.verify import run

    if not run(load_settings(config_file, None), backend, prompts):
        raise typer.Exit(1)


@app.command()
def warm(url: Annotated[str, typer.Option(help="A running gateway.")] = "http://127.0.0.1:8080") -> None:
    """Compute the KV of the declared templates on every engine, so that the first request behind them is a hit."""
    from gateway.prefixes import warm as warm_templates

    if not warm_templates(url):
        raise typer.Exit(1)


@app.command()
def doctor(url: Annotated[str, typer.Option(help="A running gateway.")] = "http://127.0.0.1:8080") -> None:
    """Say which prefixes were not reused, and which small difference in the prompts is to blame."""
    from gateway.prefixes import doctor as report

    report(url)


UrlOption = Annotated[str, typer.Option(help="A running gateway.")]
GATEWAY = "http://127.0.0.1:8080"


@app.command()
def report(
    by: Annotated[
        str,
        typer.Option(help="Group by: tenant, key, model, backend, surface, cache, outcome or time; commas between."),
    ] = "tenant",
    since: Annotated[str, typer.Option(help="A span like 7d, or a date like 2026-11-30.")] = "24h",
    until: Annotated[str | None, typer.Option(help="The same; without it now.")] = None,
    tenant: Annotated[str, typer.Option(help="This one only.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
    url: UrlOption = GATEWAY,
) -> None:
    """Say what was spent and saved. The key comes from HITHERTO_ADMIN_KEY: the admin's, or a tenant's for its own."""
    from gateway import reports

    reports.report(url, by, since, until, tenant, "json" if as_json else "csv" if as_csv else "table")


@app.command()
def price(
    models: Annotated[list[str], typer.Argument(help="Names of models, as clients ask for them.")],
    url: UrlOption = GATEWAY,
) -> None:
    """Say what models cost, by the operator's own prices or the built-in table."""
    from gateway import reports

    if not reports.price(url, models):
        raise typer.Exit(1)


@app.command()
def tenants(url: UrlOption = GATEWAY) -> None:
    """List tenants with their keys' ids, models and budgets."""
    from gateway import reports

    reports.tenants(url)


@app.command()
def breakers(url: UrlOption = GATEWAY) -> None:
    """Say how each backend, and each replica, stands."""
    from gateway import reports

    reports.breakers(url)


@app.command()
def reload(url: UrlOption = GATEWAY) -> None:
    """Have the tenants' files read now, and say what has changed."""
    from gateway import reports

    if not reports.reload(url):
        raise typer.Exit(1)


@app.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, newest first.")] = 50,
    url: UrlOption = GATEWAY,
) -> None:
    """Say who changed what."""
    from gateway import reports

    reports.audit(url, limit)


@app.command("forget-prefixes")
def forget_prefixes(url: UrlOption = GATEWAY) -> None:
    """Forget all prefix KV, in every tier of every engine."""
    from gateway.prefixes import purge as purge_prefixes

    purge_prefixes(url)


cache_app = typer.Typer(no_args_is_help=True, help="Look into the answer cache.")
app.add_typer(cache_app, name="cache")


@cache_app.command()
def stats(url: UrlOption = GATEWAY) -> None:
    """Say what is stored."""
    from gateway.cache import commands

    commands.stats(url)


@cache_app.command()
def purge(
    url: UrlOption = GATEWAY,
    entry: Annotated[str, typer.Option(help="What x-hitherto-entry said, or its beginning.")] = "",
    tag: Annotated[str, typer.Option(help="One of the x-hitherto-tags that it was stored with.")] = "",
    model: Annotated[str, typer.Option(help="The model that was asked for.")] = "",
    tenant: Annotated[str, typer.Option(help="Whose it is.")] = "",
    older_than: Annotated[str | None, typer.Option(help="Stored longer ago than this, like 12h or 7d.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only say how many it would be.")] = False,
) -> None:
    """Forget stored answers; of several conditions all must hold."""
    from gateway.cache import commands

    conditions = {"entry": entry, "tag": tag, "model": model, "tenant": tenant, "all": all_, "dry_run": dry_run}
    commands.purge(url, conditions | ({"older_than": older_than} if older_than is not None else {}))


@cache_app.command()
def feedback(
    entry: Annotated[str, typer.Argument(help="What x-hitherto-entry said.")],
    question: Annotated[
        str | None, typer.Option(help="The question that got the wrong answer; without it the entry goes.")
    ] = None,
    url: UrlOption = GATEWAY,
) -> None:
    """Report a wrong answer, so that it is not served again."""
    from gateway.cache import commands

    commands.feedback(url, entry, question)


@cache_app.command()
def risk(
    tenant: Annotated[str, typer.Option(help="Whose; all, where it is not said.")] = "",
    url: UrlOption = GATEWAY,
) -> None:
    """Say how often semantic hits were wrong, and what each max_wrong_rate would serve."""
    from gateway.cache import commands

    commands.risk(url, tenant)


@cache_app.command()
def explain(
    request: Annotated[str, typer.Argument(help="A question, or a file with a chat completion request as JSON.")],
    model: Annotated[str, typer.Option(help="Which model it is for, where only a question is given.")] = "smollm2",
    header: Annotated[list[str], typer.Option(help="A header that comes with it, as 'name: value'.")] = [],
    url: UrlOption = GATEWAY,
) -> None:
    """Say why a request would hit or miss: nearest answers, what speaks against them, which fields differ."""
    from gateway.cache import commands

    body: Any = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": request}]}
    if request.endswith(".json"):
        body = json.loads(Path(request).read_text())
    pairs = [line.partition(":") for line in header]
    commands.explain(url, body, {name.strip(): value.strip() for name, _, value in pairs})


@cache_app.command()
def judge(
    file: Annotated[Path, typer.Argument(help="JSONL of {a, b[, same, kind]}; a and b are texts or message lists.")],
    config_file: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object a line: served, similarity, score, reason.")
    ] = False,
) -> None:
    """Would an answer stored for a be served for b? Runs the very code that decides in the gateway."""
    from gateway.cache import judge as judging
    from gateway.cache.semantic import load as load_semantic

    settings = load_settings(config_file, None)
    pairs = list(judging.read_pairs(file))

    async def run() -> list[judging.Verdict]:
        verdicts = []
        rules = settings.cache.rules()
        async for verdict in judging.judge(pairs, lambda: load_semantic(settings.embedder, rules.threshold), rules):
            verdicts.append(verdict)
            similarity = None if verdict.similarity is None else round(verdict.similarity, 4)
            if as_json:
                score = None if verdict.score is None else round(verdict.score, 4)
                print(
                    json.dumps(
                        {"served": verdict.served, "similarity": similarity, "score": score, "reason": verdict.reason}
                    )
                )
            elif not sys.stderr.isatty() or len(verdicts) % 100:
                continue
            else:
                print(f"{len(verdicts)} of {len(pairs)}", end="\r", file=sys.stderr)
        return verdicts

    verdicts = asyncio.run(run())
    if as_json:
        return
    print(f"{'kind':24} {'label':10} {'served':>8} {'of':>8} {'share':>8}")
    for kind, label, served, total in judging.shares(verdicts):
        print(f"{kind:24} {label:10} {served:8} {total:8} {served / total:8.1%}")
    if all(verdict.pair.same is None for verdict in verdicts):
        print(f"{'all':24} {'unlabelled':10} {sum(v.served for v in verdicts):8} {len(verdicts):8}")


DataOption = Annotated[Path | None, typer.Option(help="The gateway's data folder, which has the audit log.")]
keys_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke the keys of tenants.")
app.add_typer(keys_app, name="keys")


@keys_app.command("new")
def new_key(
    tenant: Annotated[str, typer.Argument(help="Whose key; the tenant's file is made if there is none.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    expires: Annotated[str | None, typer.Option(help="How long it is good, like 90d.")] = None,
    config_file: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make a key. It is shown once and kept only as a hash."""
    from backends.protocol import parse_duration
    from gateway import keys

    lifetime = parse_duration(expires) if expires is not None else None
    key, path = keys.new(load_settings(config_file, None, data), tenant, name, lifetime)  # type: ignore[arg-type]
    typer.echo(key)
    typer.echo(f"its hash is in {path}; the key itself is not kept anywhere", err=True)


@keys_app.command("list")
def list_keys(config_file: ConfigOption = None) -> None:
    """Say which keys there are: tenant, id, name, expiry."""
    from gateway import keys

    rows = keys.listed(load_settings(config_file, None))
    for row in [("tenant", "id", "name", "expires"), *rows]:
        print(f"{row[0]:24} {row[1]:14} {row[2]:20} {row[3]}".rstrip())


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The beginning of its id.")],
    config_file: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Take a key out of its tenant's file; a running gateway refuses it within a moment."""
    from gateway import keys

    tenant, path = keys.revoke(load_settings(config_file, None, data), key_id)
    typer.echo(f"{tenant}: the key is revoked ({path})")


def load_settings(file: Path | None, upstream: str | None, data: Path | None = None) -> Settings:
    """Settings for a command, with another data folder. Raises `ConfigError`."""
    if data is not None:
        return load_settings(file, upstream).model_copy(update={"data": data.expanduser()})
    if upstream is not None:
        return config.transparent_settings(upstream)
    if file is None and Path("hitherto.yaml").is_file():
        file = Path("hitherto.yaml")
    return config.load(file)


def main() -> None:
    """Entry point: errors that the user can mend are one line and exit code 2."""
    try:
        result: Any = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, ImportError):
            error = CommandError(f"{error}; this command needs more packages: install hitherto[all]")
        usage = getattr(error, "format_message", None)  # typer's own errors of usage
        if usage is None and not isinstance(error, ValueError | CommandError | OSError):
            raise
        print(f"hitherto: {usage() if usage is not None else error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
